"""Kind `http`: the result is POSTed to a service of the user's, which answers with the reward.

The body is `{task, session_id, run, files?}`, the answer `{reward, per_call?, per_branch?, feedback?, metadata?}`. A request may arrive
more than once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator, Field

from contract.tasks import EvaluatorSpec, Task
from rollout.evaluators.base import (
    BadReward,
    Case,
    EvaluationFailed,
    Options,
    Score,
    Seconds,
    Text,
    Texts,
    TextTable,
    parse_score,
    whole,
)
from rollout.evaluators.collected import BOUND_BYTES
from rollout.evaluators.command import require_runtime

TOKEN_PREFIX = "VERBATIM_EVALUATOR_"
"""A task may only send variables with this prefix: it must not get at the node's other secrets."""
OUTLINE = ("call_id", "parent_id", "role", "status", "finish_reason")
LONGEST_WAIT_SECONDS = 60.0
OUTPUT_CHARS = 100_000
"""The end of the harness's stdout, and of its stderr, that is sent."""


def _check_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"must be an http or https URL, not {text!r}")
    return text


def _check_variable(name: str) -> str:
    if not name.startswith(TOKEN_PREFIX):
        raise ValueError(f"must begin with {TOKEN_PREFIX}")
    return name


class HttpOptions(Options):
    kind = "http"

    url: Annotated[Text, AfterValidator(_check_url)]
    headers: TextTable = Field(default={}, repr=False)
    token_variable: Annotated[Text, AfterValidator(_check_variable)] | None = None
    """A variable of the node's environment that holds a bearer token."""
    files: Texts = ()
    """Paths sent as a base64-encoded tar.gz in `files`."""
    calls: Literal["outline", "all", "none"] = "outline"
    """outline: each call's ids, role, status and finish reason. all: with its messages."""
    timeout_seconds: Seconds = 60.0
    """Of one try."""
    retries: Annotated[int, whole(100)] = 4
    """Further tries after no answer, 429 or 5xx."""
    backoff_seconds: Seconds = 1.0
    """The mean first wait between tries; each further one is about twice as long."""


class _Unanswered(Exception):
    """Worth another try."""


class HttpEvaluator:
    name = "http"
    needs_runtime = True
    fresh_runtime = False

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        HttpOptions.read(spec.options)

    async def evaluate(self, case: Case) -> Score:
        options = HttpOptions.read_case(case)
        body = await _build_body(case, options)
        answer = await _post(options, body)
        try:
            value = answer.json()
        except ValueError as error:
            raise BadReward(f"{options.url} answered with no JSON: {answer.text[:500]!r}") from error
        return parse_score(value, f"the answer of {options.url}")


async def _build_body(case: Case, options: HttpOptions) -> dict[str, Any]:
    task, run = case.task, case.run
    ended: dict[str, Any] = {"exit_code": run.exit_code, "timed_out": run.timed_out}
    ended |= {"stdout": _cut(run.stdout), "stderr": _cut(run.stderr)}
    if options.calls == "all":
        ended["calls"] = list(run.calls)
    elif options.calls == "outline":
        ended["calls"] = [{name: call.get(name) for name in OUTLINE} for call in run.calls]
    body: dict[str, Any] = {
        "task": {
            "task_id": task.task_id,
            "instruction": task.instruction,
            "model": task.model,
            "harness": task.harness.name,
            "metadata": dict(task.metadata),
        },
        "session_id": run.session_id,
        "run": ended,
    }
    if options.files:
        archive = await require_runtime(case).download(options.files, bound_bytes=BOUND_BYTES)
        body["files"] = (await asyncio.to_thread(base64.b64encode, archive)).decode()
    return body


async def _post(options: HttpOptions, body: Mapping[str, Any]) -> httpx.Response:
    """The 2xx answer. Raises `EvaluationFailed`."""
    headers = httpx.Headers({"Content-Type": "application/json"})
    headers.update(_build_headers(options))
    try:
        # In a thread: a large body takes seconds to encode.
        content = (await asyncio.to_thread(json.dumps, body, allow_nan=False)).encode()
        async with httpx.AsyncClient(timeout=options.timeout_seconds) as client:
            for made in range(options.retries):
                with suppress(_Unanswered):
                    return await _try(client, options.url, headers, content)
                await asyncio.sleep(random.uniform(0, min(LONGEST_WAIT_SECONDS, options.backoff_seconds * 2.0**made)))
            return await _try(client, options.url, headers, content)
    except _Unanswered as error:
        raise EvaluationFailed(f"{error}, {1 + options.retries} times") from error
    except ValueError as error:
        raise EvaluationFailed(f"{options.url} did not answer: {type(error).__name__}: {error}") from error


async def _try(client: httpx.AsyncClient, url: str, headers: httpx.Headers, content: bytes) -> httpx.Response:
    try:
        answer = await client.post(url, content=content, headers=headers)
    except httpx.TransportError as error:
        raise _Unanswered(f"{url} gave no answer: {type(error).__name__}: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise EvaluationFailed(f"{url} did not answer: {type(error).__name__}: {error}") from error
    answered = f"{url} answered {answer.status_code}: {answer.text[:500]!r}"
    if answer.status_code == 429 or answer.status_code >= 500:
        raise _Unanswered(answered)
    if not answer.is_success:
        raise EvaluationFailed(answered)
    return answer


def _build_headers(options: HttpOptions) -> dict[str, str]:
    headers = dict(options.headers)
    if options.token_variable:
        token = os.environ.get(options.token_variable)
        if not token:
            raise EvaluationFailed(f"this node has no variable {options.token_variable}")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _cut(output: bytes) -> str:
    return output.decode("utf-8", "replace")[-OUTPUT_CHARS:]
