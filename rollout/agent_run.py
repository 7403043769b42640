"""The run of an agent: the harness works against its session, and what it did is held against what can be trained on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from rollout.attempts import AttemptId
from rollout.evaluators.base import Run
from rollout.failures import Failure, RolloutFailed
from rollout.harness_run import HarnessRun, last_words
from rollout.harnesses.prepared import Endpoint
from rollout.models import first_model
from rollout.node_parts import NodeParts
from rollout.runtimes.base import Executed, Runtime
from rollout.sessions import OpenSession

T = TypeVar("T")
BUDGET_EXHAUSTED = "budget_exhausted"
"""The service's word for a call that the session's budget did not cover."""
SIGNALLED = 128
"""Exit codes above it say which signal ended a command."""


Calls = Sequence[Mapping[str, Any]]
Unserved = Mapping[str, Any]
"""The session's last call that the service or its engine failed, of which there may be no record."""


class Patiently(Protocol):
    """Gives what it is given to do, however long the service does not answer."""

    async def __call__(self, act: Callable[[], Awaitable[T]], /) -> T: ...


async def run_agent(
    parts: NodeParts, harness: HarnessRun, opened: OpenSession, attempt: AttemptId, patiently: Patiently
) -> Run:
    """How the harness's run ended, well or by its own budget. Raises `RolloutFailed` for every other end."""
    endpoint = Endpoint(_urls_inside(parts.url, opened.base_urls, harness.runtime), opened.api_key)
    # Without an engine its first call would fail, and the attempt be used up.
    await patiently(parts.sessions.ready)
    model = harness.task.model or ""
    if not model and harness.harness.takes_model:
        model = await patiently(lambda: first_model(parts.url, opened))
    done = await harness.start(endpoint, model)
    calls = await patiently(lambda: parts.sessions.calls(attempt.session_id))
    session = await patiently(lambda: parts.sessions.load(attempt.session_id))
    check(harness, done, calls, session.get("unserved"))
    return Run(attempt.session_id, None if done.timed_out else done.exit_code, done.timed_out, done.stdout, done.stderr, calls)


def check(harness: HarnessRun, done: Executed, calls: Calls, unserved: Unserved | None = None) -> None:
    """Raises `RolloutFailed` where what the agent did, and what was recorded of it, is nothing to be scored."""
    name, look = harness.harness.name, harness.logs.place("agent.err")
    last = max(calls, key=lambda call: call["started_at"], default=None)
    if done.timed_out and calls:
        # It was stopped in the middle of whatever call it was in.
        return
    if unserved is not None and unserved["code"] == BUDGET_EXHAUSTED and calls:
        # However it ended: it did what it did with what it was given.
        return
    # Whatever the agent made of it, this is not how it would have gone on.
    if last is not None and last["status"] == "dangling":
        raise RolloutFailed(Failure.SERVICE_FAILED, f"the service died in the last call of {name}, {last['call_id']}", look)
    if unserved is not None and (last is None or last["started_at"] < unserved["at"]):
        message = f"the last call of {name}, {unserved['call_id']}, was not served: {unserved['code']}: {unserved['message']}"
        raise RolloutFailed(Failure.SERVICE_FAILED, message, look)
    if done.exit_code > SIGNALLED and not done.timed_out:
        message = f"{name} was ended by signal {done.exit_code - SIGNALLED}: {last_words(done)}"
        raise RolloutFailed(Failure.HARNESS_CRASHED, message, look)
    if done.exit_code and not done.timed_out:
        raise RolloutFailed(Failure.HARNESS_FAILED, f"{name} ended with exit code {done.exit_code}: {last_words(done)}", look)
    if not calls:
        raise RolloutFailed(Failure.NO_CALLS, f"{name} never called the model: {last_words(done)}", look)


def _urls_inside(url: str, base_urls: Mapping[str, str], runtime: Runtime) -> dict[str, str]:
    """The session's base URLs as the runtime reaches them: the service's own name for itself may mean nothing there."""
    inside = runtime.base_url(url).rstrip("/")
    return {dialect: inside + urlsplit(given).path for dialect, given in base_urls.items()}
