"""CancelScope: the one way to end a call early, whatever its task is doing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from proxy.engine.wire.channel import Answer
from proxy.errors import EngineFailed

ASIDE_SECONDS = 60.0
HUNG_UP_SECONDS = 2.0
"""How long an engine may take to interpret sampled tokens, and how long once the line is hung up."""


ABORT_SECONDS = 5.0
ABORT_PATIENCE_SECONDS = 0.5
"""How long an engine may take to end a call that it was asked to end, before it is hung up on (less than a close waits), and after how
long it is asked again: before it knew of the request, it would not have stopped."""

_CUT = "the call was cut before it was sampled"


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
        self.done = asyncio.Event()
        """Set when the call is recorded, or will never be."""
        self._abort: Callable[[], Awaitable[bool]] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._answer: Answer | None = None
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
            self._task = self._answer = None

    @contextlib.contextmanager
    def sampling(self, abort: Callable[[], Awaitable[bool]]) -> Iterator[None]:
        """Around the engine's work. `abort` asks the engine to end the request; False if it cannot be asked. Raises as `interruptible`."""
        with self.interruptible():
            self._abort, self.may_have_sampled = abort, True
            try:
                yield
            finally:
                self._abort = None

    def attach(self, answer: Answer) -> None:
        """From now on hanging up closes this answer."""
        self._answer = answer

    def redial(self) -> None:
        """The request was refused and is sent again. Raises EngineFailed if it was hung up meanwhile."""
        self._answer = None
        if self.hung_up:
            raise EngineFailed("the call was hung up")

    def hang_up(self) -> None:
        """End what is under way now, without asking the engine."""
        if self.hung_up:
            return
        self.hung_up = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + HUNG_UP_SECONDS)
        if self._answer is not None:
            self._answer.close()
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

    async def _end(self, abort: Callable[[], Awaitable[bool]]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                while await abort():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_PATIENCE_SECONDS):
                            await self.done.wait()
                            return
        # An engine that hangs would keep the call, and whoever closes its session.
        self.hang_up()
