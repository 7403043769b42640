"""Kind `http`: the result is POSTed to a service of the user's own, which answers with the reward.

Options:

    url              where to
    headers          further headers
    token_variable   name of a variable of the node's environment that holds a bearer token; it must begin with VERBATIM_EVALUATOR_
    files            paths whose content goes along as a base64-encoded tar.gz in `files`
    calls            outline (default): of each call its ids, role, status and how it finished. all: with its messages. none
    timeout_seconds  of one try; default 60
    retries          further tries after no answer, 429 or 5xx; default 4
    backoff_seconds  the first wait between tries is about so long, and each further one twice as long; default 1

The body is `{task, session_id, run, files?}`, the answer `{reward, per_call?, per_branch?, feedback?, metadata?}`. A request may
arrive more than once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rollout.evaluators.base import BadReward, Case, EvaluationFailed, Options, Score, of_case, parse_score
from rollout.evaluators.command import require_runtime
from rollout.evaluators.diff import BOUND_BYTES
from rollout.task import EvaluatorSpec, Task

TOKEN_PREFIX = "VERBATIM_EVALUATOR_"
"""Of variables that a task may have sent somewhere: it must not get at the node's other secrets."""
CALLS = ("outline", "all", "none")
OUTLINE = ("call_id", "parent_id", "role", "status", "finish_reason")
LONGEST_WAIT_SECONDS = 60.0
OUTPUT_CHARS = 100_000
"""Of the harness's stdout and of its stderr: the last ones."""


@dataclass(frozen=True, slots=True)
class Wanted:
    url: str
    headers: Mapping[str, str] = field(repr=False)
    token_variable: str | None
    files: tuple[str, ...]
    calls: str
    timeout_seconds: float
    retries: int
    backoff_seconds: float


class _Unanswered(Exception):
    """Worth another try."""


class HttpEvaluator:
    name = "http"
    needs_runtime = True
    fresh_runtime = False

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        _read(Options(self.name, spec.options))

    async def evaluate(self, case: Case) -> Score:
        wanted = of_case(self.name, case, _read)
        body = await _body(case, wanted)
        answer = await _posted(wanted, body)
        try:
            value = answer.json()
        except ValueError as error:
            raise BadReward(f"{wanted.url} answered with no JSON: {answer.text[:500]!r}") from error
        return parse_score(value, f"the answer of {wanted.url}")


def _read(options: Options) -> Wanted:
    wanted = Wanted(
        url=options.text("url"),
        headers=options.text_table("headers"),
        token_variable=options.some_text("token_variable"),
        files=options.texts("files"),
        calls=options.choice("calls", CALLS),
        timeout_seconds=options.number("timeout_seconds", 60.0, above=0),
        retries=options.count("retries", 4, greatest=100),
        backoff_seconds=options.number("backoff_seconds", 1.0, above=0),
    )
    options.done()
    if not _is_url(wanted.url):
        raise options.refused("url", f"must be an http or https URL, not {wanted.url!r}")
    if wanted.token_variable and not wanted.token_variable.startswith(TOKEN_PREFIX):
        raise options.refused("token_variable", f"must begin with {TOKEN_PREFIX}")
    return wanted


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


async def _body(case: Case, wanted: Wanted) -> dict[str, Any]:
    task, run = case.task, case.run
    told: dict[str, Any] = {"exit_code": run.exit_code, "timed_out": run.timed_out}
    told |= {"stdout": _end(run.stdout), "stderr": _end(run.stderr)}
    if wanted.calls == "all":
        told["calls"] = list(run.calls)
    elif wanted.calls == "outline":
        told["calls"] = [{name: call.get(name) for name in OUTLINE} for call in run.calls]
    body: dict[str, Any] = {
        "task": {
            "task_id": task.task_id,
            "instruction": task.instruction,
            "model": task.model,
            "harness": task.harness.name,
            "metadata": dict(task.metadata),
        },
        "session_id": run.session_id,
        "run": told,
    }
    if wanted.files:
        archive = await require_runtime(case).download(wanted.files, bound_bytes=BOUND_BYTES)
        body["files"] = (await asyncio.to_thread(base64.b64encode, archive)).decode()
    return body


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, allow_nan=False).encode()


async def _posted(wanted: Wanted, body: Mapping[str, Any]) -> httpx.Response:
    """The answer. Raises `EvaluationFailed` when it is none, or another than 2xx."""
    tries = AsyncRetrying(
        retry=retry_if_exception_type(_Unanswered),
        stop=stop_after_attempt(1 + wanted.retries),
        wait=wait_random_exponential(multiplier=wanted.backoff_seconds, max=LONGEST_WAIT_SECONDS),
        reraise=True,
    )
    headers = httpx.Headers({"Content-Type": "application/json"})
    headers.update(_headers(wanted))
    try:
        # A great body takes seconds to encode, in which nothing else of the node would go on.
        content = await asyncio.to_thread(_encoded, body)
        async with httpx.AsyncClient(timeout=wanted.timeout_seconds) as client:
            return await tries(_tried, client, wanted.url, headers, content)
    except _Unanswered as error:
        raise EvaluationFailed(f"{error}, {1 + wanted.retries} times") from error
    except ValueError as error:
        raise EvaluationFailed(f"{wanted.url} could not be asked: {type(error).__name__}: {error}") from error


async def _tried(client: httpx.AsyncClient, url: str, headers: httpx.Headers, content: bytes) -> httpx.Response:
    try:
        answer = await client.post(url, content=content, headers=headers)
    except httpx.TransportError as error:
        raise _Unanswered(f"{url} gave no answer: {type(error).__name__}: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise EvaluationFailed(f"{url} could not be asked: {type(error).__name__}: {error}") from error
    said = f"{url} answered {answer.status_code}: {answer.text[:500]!r}"
    if answer.status_code == 429 or answer.status_code >= 500:
        raise _Unanswered(said)
    if not answer.is_success:
        raise EvaluationFailed(said)
    return answer


def _headers(wanted: Wanted) -> dict[str, str]:
    headers = dict(wanted.headers)
    if wanted.token_variable:
        token = os.environ.get(wanted.token_variable)
        if not token:
            raise EvaluationFailed(f"this node has no variable {wanted.token_variable}")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _end(output: bytes) -> str:
    return output.decode("utf-8", "replace")[-OUTPUT_CHARS:]
