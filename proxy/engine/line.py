"""Line: the connection of one sampling request, and the ways it ends before its time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from proxy.engine.channel import Answer, Before
from proxy.errors import EngineFailed, VerbatimError

ASIDE_SECONDS = 60.0
HUNG_UP_SECONDS = 2.0
"""How long an engine may take to say what sampled tokens mean, and how long when nobody waits for them any more."""


class Withheld(Exception):
    """The engine was not given the request; `error` says why. It is no failure of the engine, and nobody on the way is to take it for
    one."""

    def __init__(self, error: VerbatimError) -> None:
        super().__init__(error.message)
        self.error = error


class Line:
    """The connection of one sampling request, so that someone else can hang up. `before`, while it is there, is to return before the
    engine gets the request's end; it may raise `Withheld`."""

    def __init__(self) -> None:
        self.hung_up = False
        self.before: Before | None = None
        self._task = asyncio.current_task()
        self._answer: Answer | None = None
        self._limit: asyncio.Timeout | None = None

    def connected(self, answer: Answer) -> None:
        self._answer = answer

    def redial(self) -> None:
        """The request was refused and is made again. Raises EngineFailed when it was hung up on meanwhile."""
        self._answer = None
        if self.hung_up:
            raise EngineFailed("the call was hung up")

    def over(self) -> None:
        """Nothing is left to hang up on: the task goes on to other things."""
        self._answer, self._task = None, None

    def hang_up(self) -> None:
        """End the request now: the engine sees a client that went away, the reader an EngineFailed."""
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
    async def aside(self) -> AsyncIterator[None]:
        """Around what the engine is asked about tokens that are sampled: soon over once the line is hung up, or an engine that
        hangs would keep them from being recorded. Raises EngineFailed."""
        try:
            async with asyncio.timeout(HUNG_UP_SECONDS if self.hung_up else ASIDE_SECONDS) as self._limit:
                yield
        except TimeoutError as error:
            raise EngineFailed("the engine did not say in time what the sampled tokens mean") from error
        finally:
            self._limit = None

    def absorb(self) -> EngineFailed:
        """What a cancellation that came from `hang_up` becomes."""
        if self._task is not None:
            self._task.uncancel()
        return EngineFailed("the call was hung up")
