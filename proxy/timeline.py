"""The time of a call and its end: Timeline says where the time goes, Deadline bounds a wait, CancelScope ends the call early.

Metrics, the log's line per call and its trace are all read from the timeline.

Each step has the service's own time, and the time it waits for somebody else.

| step | what happens | waits for |
|---|---|---|
| admit | path, key and session are checked, the body arrives | store (a session that is not in memory), harness |
| parse | the body becomes a canonical request | |
| queue | a replica that serves and has room is found | engine |
| intent | the parent is found, and what is about to be sampled recorded | store |
| plan | the prompt's ids are made and proven (token path) | engine (renderings) |
| sample | the engine samples, and the reply is put together | engine |
| interpret | the engine's parsers read the sampled ids (token path) | engine |
| commit | the records are made and stored | store |
| reply | the answer is rendered and sent | harness |

Everything between two marks belongs to one step and one part, so all parts together are the time from the first look at the request
to the answer that went out. Waiting is measured at the wire; what a client library does there counts as waiting, and so does whatever
else the event loop does meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from itertools import compress
from types import TracebackType
from typing import Any, Protocol

import msgspec

from proxy.errors import EngineFailed

log = logging.getLogger(__name__)


STEPS = ("admit", "parse", "queue", "intent", "plan", "sample", "interpret", "commit", "reply")
ADMIT, PARSE, QUEUE, INTENT, PLAN, SAMPLE, INTERPRET, COMMIT, REPLY = range(len(STEPS))

PARTS = ("own", "engine", "store", "harness")
OWN, ENGINE, STORE, HARNESS = range(len(PARTS))

_CELLS = range(len(STEPS) * len(PARTS))
_AT_REPLICA = (INTENT, PLAN, SAMPLE)
_ENGINE_CELLS = [step * len(PARTS) + ENGINE for step in (PLAN, SAMPLE, INTERPRET)]


class CallTrace(Protocol):
    """The spans of one call. A step lasts until the next one begins, or the call ends."""

    trace_id: str

    def step(self, name: str, attributes: Mapping[str, str] | None = None) -> None: ...

    def event(self, name: str) -> None: ...

    def carry(self, headers: MutableMapping[str, str]) -> None:
        """Add what lets another service's spans be children of the step."""
        ...

    def end(self, attributes: Mapping[str, str | int | float | list[str]], error: str) -> None:
        """`error`: its code, "" where there was none."""
        ...


class Timeline:
    """One call's time so far, by step and part, in seconds. It starts in `admit`."""

    __slots__ = ("_at", "_first", "_traced", "api", "first_token_at", "replica", "seconds", "session_id", "started_at", "trace")

    def __init__(self, trace: CallTrace | None = None) -> None:
        self.seconds = [0.0] * len(_CELLS)
        self.trace = trace
        """None: not traced, or the call is over, though tasks that it started may still hold its timeline."""
        self.first_token_at: float | None = None
        self.session_id = ""
        self.replica = self.api = ""
        """Where the call is sampled, or was last tried."""
        self.started_at = self._at = time.perf_counter()
        self._first = ADMIT * len(PARTS)
        self._traced = ADMIT
        if trace is not None:
            trace.step(STEPS[ADMIT])

    def begin(self, step: int) -> None:
        """The current step is over and this one begins."""
        now = time.perf_counter()
        self.seconds[self._first] += now - self._at
        self._at = now
        self._first = step * len(PARTS)
        # In a trace, interpreting is part of sampling.
        if self.trace is not None and step not in (self._traced, INTERPRET):
            self._traced = step
            self.trace.step(STEPS[step], {"verbatim.replica": self.replica} if step in _AT_REPLICA else None)

    def end_wait(self, part: int, since: float) -> None:
        """The wait for `part` is over that began at `since` (`time.perf_counter`)."""
        now = time.perf_counter()
        # Of waits that overlap, and of one that a step begins in, each moment counts once.
        since = max(since, self._at)
        self.seconds[self._first] += since - self._at
        self.seconds[self._first + part] += now - since
        self._at = now

    def mark_first_token(self) -> None:
        """The engine sampled the first token."""
        self.first_token_at = time.perf_counter()
        if self.trace is not None:
            self.trace.event("first_token")

    def list_spent(self) -> Iterator[tuple[int, float]]:
        """(index in `seconds`, seconds) of every cell that took any."""
        return zip(compress(_CELLS, self.seconds), filter(None, self.seconds), strict=True)

    @property
    def step(self) -> int:
        return self._first // len(PARTS)

    @property
    def engine_seconds(self) -> float:
        """How long the call waited for its engine to render, sample and interpret."""
        return sum(map(self.seconds.__getitem__, _ENGINE_CELLS))


TIMELINE: ContextVar[Timeline] = ContextVar("timeline", default=Timeline())  # noqa: B039  that of all that is no call: nobody reads it
"""The timeline of the call that the running task works for, so that the wire need not be told."""


class Waiting(msgspec.Struct):
    """`with Waiting(STORE):` around an await; counts for the running task's call, where it works for one."""

    part: int
    since: float = msgspec.field(default_factory=time.perf_counter)
    """It begins when it is made."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        TIMELINE.get().end_wait(self.part, self.since)


class Within(msgspec.Struct):
    """`with Within(INTERPRET):` around what is a step of its own in the middle of another one."""

    step: int
    before: int = ADMIT

    def __enter__(self) -> None:
        timeline = TIMELINE.get()
        self.before = timeline.step
        timeline.begin(self.step)

    def __exit__(self, *_: object) -> None:
        TIMELINE.get().begin(self.before)


def carried() -> Mapping[str, str]:
    """The headers that let what an engine does for a call be a part of the call's step."""
    trace, headers = TIMELINE.get().trace, dict[str, str]()
    if trace is not None:
        trace.carry(headers)
    return headers


# Deadline: `async with Deadline(seconds):` works as `asyncio.timeout` at a third of its instructions; every call runs under several.
#
# After that time the task is cancelled where it waits, and the block raises TimeoutError. A cancellation from elsewhere stays one.


class Deadline(msgspec.Struct, eq=False):
    """`seconds` 0 or None: never."""

    seconds: float | None
    _over: bool = False
    _task: asyncio.Task[Any] | None = None
    _cancelling: int = 0
    _timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        if self.seconds:
            task = asyncio.current_task()
            if task is None:
                raise RuntimeError("only a task can have a deadline")
            self._task, self._cancelling = task, task.cancelling()
            self._timer = task.get_loop().call_later(self.seconds, self._end)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None and self._task is not None:
            self._timer.cancel()
            if self._over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _end(self) -> None:
        self._over = True
        if self._task is not None:
            self._task.cancel()


# Cancelling.

ASIDE_SECONDS = 60.0
HUNG_UP_SECONDS = 2.0
"""How long an engine may take to interpret sampled tokens, and how long once the line is hung up."""


ABORT_SECONDS = 5.0
ABORT_PATIENCE_SECONDS = 0.5
"""How long an engine may take to end a call that it was asked to end, before it is hung up on (less than a close waits), and after how
long it is asked again: before it knew of the request, it would not have stopped."""

_CUT = "the call was cut before it was sampled"


class AbortRequest(Protocol):
    """Asks an engine to end a request; False if it cannot be asked. `again`: it was asked before."""

    async def __call__(self, *, again: bool) -> bool: ...


class CancelScope:
    """The one way to end a call early. `cancel` may come at any moment, from any task:

    - while the call waits for a replica or a rendering (`interruptible`), that wait ends with EngineFailed;
    - while the engine samples (`sampling`), the engine is asked to end the request, and answers with what it has. An engine that cannot
      be asked, or does not answer in time, is hung up on: it sees a disconnected client, and the call gets EngineFailed;
    - while anything else is done, such as recording, it goes on to its end."""

    def __init__(self, session_id: str, call_id: str) -> None:
        self.session_id = session_id
        self.call_id = call_id
        self.cancelled = False
        self.hung_up = False
        self.may_have_sampled = False
        """Whether the engine that the call is at was asked to sample."""
        self.heard_at = 0.0
        """When the engine last told of a token or ended the reply, by `time.perf_counter`; 0 before."""
        self.done = asyncio.Event()
        """Set when the call is recorded, or will never be."""
        self._abort: AbortRequest | None = None
        self._ending: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._close: Callable[[], None] | None = None
        self._limit: asyncio.Timeout | None = None

    def cancel(self) -> None:
        """End the call, once."""
        if self.cancelled or self.done.is_set():
            return
        self.cancelled = True
        if self._abort is None:
            self.hang_up()
        else:
            self._ending = asyncio.create_task(self._end(self._abort))

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around what may be broken off. Raises EngineFailed if the call is cancelled, before or inside."""
        if self.cancelled:
            raise EngineFailed(_CUT)
        self.may_have_sampled = False
        task = self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self.hung_up or task is None:
                raise
            task.uncancel()
            raise EngineFailed(_CUT) from None
        finally:
            self._task = self._close = None

    @contextlib.contextmanager
    def sampling(self, abort: AbortRequest) -> Iterator[None]:
        """Around the engine's work. `abort` asks the engine to end the request; False if it cannot be asked. Raises as `interruptible`."""
        with self.interruptible():
            self._abort, self.may_have_sampled = abort, True
            try:
                yield
            finally:
                self._abort = None

    def attach(self, close: Callable[[], None]) -> None:
        """From now on hanging up calls `close`, which closes the engine's answer."""
        self._close = close

    def break_off(self) -> None:
        """Close the engine's answer: the call ends as one whose connection broke."""
        if self._close is not None:
            self._close()

    def redial(self) -> None:
        """The request was refused and is sent again. Raises EngineFailed if it was hung up meanwhile."""
        self._close = None
        if self.hung_up:
            raise EngineFailed("the call was hung up")

    def hang_up(self) -> None:
        """End what is under way now, without asking the engine."""
        if self.hung_up:
            return
        self.hung_up = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + HUNG_UP_SECONDS)
        if self._close is not None:
            self._close()
        elif self._task is not None:
            self._task.cancel()

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Bounds requests about tokens that are already sampled; the bound shrinks once the call is hung up, or a hanging engine
        would keep the tokens from being recorded. Raises EngineFailed."""
        try:
            async with asyncio.timeout(HUNG_UP_SECONDS if self.hung_up else ASIDE_SECONDS) as self._limit:
                yield
        except TimeoutError as error:
            raise EngineFailed("the engine did not interpret the sampled tokens in time") from error
        finally:
            self._limit = None

    async def _end(self, abort: AbortRequest) -> None:
        # Whoever ends the call may work for no session, or for another: a router in front of engines is told this one. The call's own
        # timeline goes on beside it.
        timeline = Timeline()
        timeline.session_id = self.session_id
        TIMELINE.set(timeline)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                again = False
                while await abort(again=again):
                    again = True
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_PATIENCE_SECONDS):
                            await self.done.wait()
                            return
        # An engine that hangs would keep the call, and whoever closes its session.
        self.hang_up()


# The calls in flight in this process. Closing a session, or stopping the service, cuts them and waits until they are recorded.


class Inflight:
    def __init__(self) -> None:
        self._scopes: dict[str, dict[CancelScope, None]] = {}

    def __len__(self) -> int:
        return sum(len(scopes) for scopes in self._scopes.values())

    def list_running(self) -> dict[str, str]:
        """The session of each call, by its id."""
        return {scope.call_id: session_id for session_id, scopes in self._scopes.items() for scope in scopes}

    def enter(self, scope: CancelScope) -> None:
        self._scopes.setdefault(scope.session_id, {})[scope] = None

    def leave(self, scope: CancelScope) -> None:
        scope.done.set()
        scopes = self._scopes.get(scope.session_id, {})
        scopes.pop(scope, None)
        if not scopes:
            self._scopes.pop(scope.session_id, None)

    async def cut(self, session_id: str) -> None:
        """Cancel the session's calls in this process; returns when they are recorded."""
        await _end(list(self._scopes.get(session_id, ())))

    async def drain(self, seconds: float) -> None:
        """Let calls in flight finish for `seconds`, then cut the rest and wait until they are recorded."""
        everyone = [scope for scopes in self._scopes.values() for scope in scopes]
        waits = [asyncio.ensure_future(scope.done.wait()) for scope in everyone]
        if waits:
            if seconds:
                log.info("calls in flight: %d, which have up to %g s to end before they are cut", len(waits), seconds)
            await asyncio.wait(waits, timeout=seconds)
            for wait in waits:
                wait.cancel()
        await _end([scope for scope in everyone if not scope.done.is_set()])


async def _end(scopes: list[CancelScope]) -> None:
    for scope in scopes:
        scope.cancel()
    for scope in scopes:
        await scope.done.wait()
