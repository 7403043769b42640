"""Sessions of an agent of yours: one for each rollout, opened, handed to the agent, and closed with its reward.

    with Sessions("http://127.0.0.1:8700", token) as sessions:
        with sessions.open(group_id="task-7", group_size=8) as session:
            subprocess.run(agent, env=os.environ | session.environment, timeout=600)
            session.reward = 1.0

The session ends as its block does: completed; `timeout` after a TimeoutError; `cancelled` after an interrupt or a cancelled task; `failed`
after any other exception. A block that ends well fails its session all the same if the model was never called in it or the reward is no
finite number: the agent did not do what the reward says. `AsyncSessions` is the same for asyncio.

What is sent, and what follows from an answer, are generators: they yield requests and are sent the decoded answers, or thrown the errors.
The two clients carry them out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar
from urllib.parse import quote

import httpx

from contract.client import JSON, TRANSIENT, AsyncServiceClient, RetryRule, ServiceClient, is_never_started
from contract.errors import ResourceConflict, ResourceNotFound, ServiceError
from reconstruct.trajectory import Trajectory
from trainer_client.wire import ACCEPT, decode_body, decode_trajectory

T = TypeVar("T")

log = logging.getLogger(__name__)

WHEN_ADMITTED = RetryRule(is_never_started, waits=True)
"""Waits as long as trainers lag behind."""
TRIES = 3
"""How often a session is opened whose answer was lost."""
CALLS_PAGE = 500
MOST_ERROR_CHARACTERS = 4000
NO_CALLS = "no_calls"
TIMEOUTS = (TimeoutError, subprocess.TimeoutExpired)
INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


class RequestStep(NamedTuple):
    """One request: arguments of a client's `request`."""

    method: str
    path: str
    body: Any = None
    retry: RetryRule = TRANSIENT
    accept: str = JSON


Steps = Generator[RequestStep, Any, T]


class StepCourse(Generic[T]):
    """Steps under way. `next_request` is None once they have returned `result`. What they raise, `answer` and `fail` raise."""

    result: T

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self._go_on(steps.send, None)

    def answer(self, response: httpx.Response) -> None:
        try:
            answer = decode_body(response) if response.content else None
        except ServiceError as error:
            self.fail(error)
        else:
            self._go_on(self._steps.send, answer)

    def fail(self, error: ServiceError) -> None:
        self._go_on(self._steps.throw, error)

    def _go_on(self, resume: Callable[[Any], RequestStep], outcome: Any) -> None:
        self.next_request: dict[str, Any] | None = None
        try:
            self.next_request = resume(outcome)._asdict()
        except StopIteration as end:
            self.result = end.value


class OpenedSession:
    """What an agent needs, and how its session stands. `status` is the service's once the session is closed; `reward` is sent with the
    close."""

    def __init__(self, opened: Mapping[str, Any]) -> None:
        self.session_id: str = opened["session_id"]
        self.api_key: str = opened["api_key"]
        self.base_urls: Mapping[str, str] = opened["base_urls"]
        """For clients of OpenAI (`openai`, ends in /v1), Anthropic (`anthropic`) and Google (`gemini`)."""
        self.reward: float | None = None
        self.status = "open"
        self.error: str | None = None
        """Why it did not complete."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables from which the vendors' SDKs read base URL and key."""
        openai, anthropic, gemini = (self.base_urls[name] for name in ("openai", "anthropic", "gemini"))
        keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"), self.api_key)
        urls = {"OPENAI_BASE_URL": openai, "OPENAI_API_BASE": openai, "ANTHROPIC_BASE_URL": anthropic}
        return {**urls, "GOOGLE_GEMINI_BASE_URL": gemini, **keys}

    def __repr__(self) -> str:
        return f"<session {self.session_id} {self.status}>"

    @property
    def _path(self) -> str:
        return f"/sessions/{quote(self.session_id, safe='')}"

    def _end(self, error: BaseException | None) -> Steps[None]:
        """Close it as the block ended."""
        if self.status == "open":
            yield from self._close(*describe_end(error), self.reward)

    def _close(self, status: str, error: str | None, reward: float | None, **of: Any) -> Steps[None]:
        """`of`: what else the close says: group_id, group_size, task_id."""
        if reward is not None and not math.isfinite(reward):
            yield from self._fail(error or f"the reward is {reward}", of)
            return
        try:
            yield from self._send_close(status, error, reward, of)
        except ResourceConflict as refusal:
            if refusal.code != NO_CALLS:
                raise
            yield from self._fail(f"{NO_CALLS}: {refusal.reason}", of)

    def _fail(self, error: str, of: Mapping[str, Any]) -> Steps[None]:
        yield from self._send_close("failed", error, None, of)
        log.warning("session %s failed: %s", self.session_id, error)

    def _send_close(self, status: str, error: str | None, reward: float | None, of: Mapping[str, Any]) -> Steps[None]:
        body = {"status": status, "error": error and error[:MOST_ERROR_CHARACTERS], "reward": reward, **of}
        given = {name: value for name, value in body.items() if value is not None}
        answer = yield RequestStep("POST", f"{self._path}/close", given)
        self.status, self.error = answer["status"], answer["error"]

    def _calls(self) -> Steps[list[dict[str, Any]]]:
        calls: list[dict[str, Any]] = []
        cursor: str | None = ""
        while cursor is not None:
            after = f"&cursor={quote(cursor, safe='')}" if cursor else ""
            page = yield RequestStep("GET", f"{self._path}/calls?limit={CALLS_PAGE}{after}")
            calls += page["calls"]
            cursor = page["cursor"]
        return calls

    def _rows(self, builder: str | None) -> Steps[list[Trajectory]]:
        chosen = "" if builder is None else f"?builder={quote(builder, safe='')}"
        answer = yield RequestStep("GET", f"{self._path}/trajectories{chosen}", accept=ACCEPT)
        return [decode_trajectory(row) for row in answer["trajectories"]]


def describe_end(error: BaseException | None) -> tuple[str, str | None]:
    """The status of a session whose block ended so, and its error."""
    if error is None:
        return "completed", None
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, TIMEOUTS):
        return "timeout", said
    return ("cancelled" if isinstance(error, INTERRUPTS) else "failed"), said


def open_steps(fields: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
    """The answer to POST /sessions. A session whose answer was lost, and with it its key, is deleted, and another one opened."""
    chosen = fields.get("session_id")
    for left in reversed(range(TRIES)):
        session_id = chosen or uuid.uuid4().hex
        try:
            opened: Mapping[str, Any] = yield RequestStep(
                "POST", "/sessions", {**fields, "session_id": session_id}, WHEN_ADMITTED
            )
            return opened
        except ServiceError as error:
            # Of an id that the caller chose it is not known whose session has it.
            if not error.lost or chosen or not left:
                raise
        with suppress(ResourceNotFound):
            yield RequestStep("DELETE", f"/sessions/{session_id}")
    raise AssertionError("the last try returns or raises")


class Session(OpenedSession):
    """An open session. Its `with` block closes it."""

    def __init__(self, opened: Mapping[str, Any], sessions: Sessions) -> None:
        super().__init__(opened)
        self._sessions = sessions

    def close(self, status: str = "completed", *, reward: float | None = None, error: str | None = None, **of: Any) -> None:
        """Close it now, as completed, failed, timeout or cancelled, with this reward or else `self.reward`. One without a call fails.
        `of`: group_id, group_size and task_id, if it was opened without. Raises ServiceError."""
        self._sessions.carry_out(self._close(status, error, self.reward if reward is None else reward, **of))

    def calls(self) -> list[dict[str, Any]]:
        """Its calls as `GET /sessions/{id}/calls` lists them. Raises ServiceError."""
        return self._sessions.carry_out(self._calls())

    def rows(self, builder: str | None = None) -> list[Trajectory]:
        """Its training rows: merged, per_call, or as a builder of the service's own makes them. Raises ServiceError, InvalidAnswer."""
        return self._sessions.carry_out(self._rows(builder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._sessions.carry_out(self._end(error))
        except ServiceError as failure:
            if error is None:
                raise
            error.add_note(f"Session {self.session_id} could not be closed: {failure}")


class Sessions:
    """Thread-safe. `token` is one that may open sessions, or a function that returns the valid one. `timeout_seconds` is how long the
    service may stay silent, `retry_seconds` for how long what may pass is retried. Raises ValueError for what cannot be sent as a token."""

    def __init__(self, url: str, token: str, *, timeout_seconds: float = 30.0, retry_seconds: float = 120.0) -> None:
        self._service = ServiceClient(url, token, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds)

    def open(self, **fields: Any) -> Session:
        """A new session. `fields` are those of `POST /sessions`: group_id, group_size, task_id, metadata, sampling and so on. Waits while
        the service holds new groups back. Raises ServiceError."""
        return Session(self.carry_out(open_steps(fields)), self)

    def carry_out(self, steps: Steps[T]) -> T:
        """What the steps return."""
        course = StepCourse(steps)
        while course.next_request is not None:
            try:
                response = self._service.request(**course.next_request)
            except ServiceError as error:
                course.fail(error)
            else:
                course.answer(response)
        return course.result

    def close(self) -> None:
        """Close the connections; sessions stay as they are."""
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class AsyncSession(OpenedSession):
    """As `Session`, in an `async with` block."""

    def __init__(self, opened: Mapping[str, Any], sessions: AsyncSessions) -> None:
        super().__init__(opened)
        self._sessions = sessions

    async def close(
        self, status: str = "completed", *, reward: float | None = None, error: str | None = None, **of: Any
    ) -> None:
        await self._sessions.carry_out(self._close(status, error, self.reward if reward is None else reward, **of))

    async def calls(self) -> list[dict[str, Any]]:
        return await self._sessions.carry_out(self._calls())

    async def rows(self, builder: str | None = None) -> list[Trajectory]:
        return await self._sessions.carry_out(self._rows(builder))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._sessions.carry_out(self._end(error))
        except ServiceError as failure:
            if error is None:
                raise
            error.add_note(f"Session {self.session_id} could not be closed: {failure}")


class AsyncSessions:
    """As `Sessions`: `async with await sessions.open(...) as session`."""

    def __init__(self, url: str, token: str, *, timeout_seconds: float = 30.0, retry_seconds: float = 120.0) -> None:
        self._service = AsyncServiceClient(url, token, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds)

    async def open(self, **fields: Any) -> AsyncSession:
        return AsyncSession(await self.carry_out(open_steps(fields)), self)

    async def carry_out(self, steps: Steps[T]) -> T:
        course = StepCourse(steps)
        while course.next_request is not None:
            try:
                response = await self._service.request(**course.next_request)
            except ServiceError as error:
                course.fail(error)
            else:
                course.answer(response)
        return course.result

    async def close(self) -> None:
        await self._service.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
