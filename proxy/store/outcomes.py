"""What became of the replies of recorded calls: delivered or not. One that was not delivered is an abandoned attempt.

A commit notes in `answering` that its process answers the call. Once the reply went out, or did not, the outcome waits in the process for
the session's next write (`begin`, `commit`, `close`), which carries it in the same round trip. What finds none within
`CARRIED_WITHIN_SECONDS` is written on its own, and so is everything when the process stops.

An outcome may be late, because nobody acts on it before it is there:

- What is an attempt is decided when rows are built. Of an open session rows are a view, in which what is on its way counts as delivered.
- Of a closed session rows count. Whoever closes it asks the processes that `answering` names to end their calls and to write what waits
  (`settle`), and waits for them as for calls in flight. A reply that is still on its way then counts as not delivered.
- The close empties `answering`, and an outcome is taken only for a call that stands there. So nothing changes the rows of a closed
  session, nor those of a later session of the same id.
- What waits in a process that is killed is lost. Whoever closes the session presumes it from what the harness did next
  (reconstruct.accounting.presume_delivered).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Container, Iterable
from typing import Any

from proxy.errors import StoreUnavailable
from proxy.store.connection import Argument

CARRIED_WITHIN_SECONDS = 0.5

Outcomes = list[Argument]
"""Call id, and "1" if its reply was delivered or "", of each: as the scripts' `note_answers` reads them."""


class DeliveryOutcomes:
    """Those of this process. `write` writes outcomes of a session on their own."""

    def __init__(self, write: Callable[[str, Outcomes], Awaitable[Any]]) -> None:
        self._write = write
        self._on_their_way: dict[str, set[str]] = {}
        """By session, the calls whose outcome is not known."""
        self._waiting: dict[str, dict[str, bool]] = {}
        """By session and call, whether the reply was delivered: what the store does not know."""
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None

    def expect(self, session_id: str, call_ids: Iterable[str]) -> None:
        """These calls are being recorded and answered; `note` must follow."""
        self._on_their_way.setdefault(session_id, set()).update(call_ids)

    def note(self, session_id: str, call_ids: Iterable[str], delivered: bool) -> None:
        """Of calls that were never to be recorded nothing is noted."""
        on_their_way = self._on_their_way.get(session_id)
        if on_their_way is None or not (noted := on_their_way.intersection(call_ids)):
            return
        on_their_way -= noted
        if not on_their_way:
            del self._on_their_way[session_id]
        self._waiting.setdefault(session_id, {}).update(dict.fromkeys(noted, delivered))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CARRIED_WITHIN_SECONDS, self._flush_in_background)

    def find_delivered(self, session_id: str) -> set[str]:
        """Of the calls whose outcome waits those whose reply was delivered."""
        return {call_id for call_id, delivered in self._waiting.get(session_id, {}).items() if delivered}

    def find_known(self, session_id: str) -> Container[str]:
        """The calls whose outcome waits."""
        return self._waiting.get(session_id, {})

    def encode(self, session_id: str) -> Outcomes:
        """What the session's next write is to carry. `forget` follows once it was made."""
        waiting = self._waiting.get(session_id)
        if waiting is None:
            return []
        return [part for call_id, delivered in waiting.items() for part in (call_id, "1" if delivered else "")]

    def forget(self, session_id: str, carried: Outcomes) -> None:
        """The store has what was carried."""
        waiting = self._waiting.get(session_id) if carried else None
        if waiting is None:
            return
        for call_id in carried[::2]:
            waiting.pop(str(call_id), None)
        if not waiting:
            del self._waiting[session_id]

    def forget_session(self, session_id: str) -> None:
        self._on_their_way.pop(session_id, None)
        self._waiting.pop(session_id, None)

    async def flush(self) -> None:
        """Returns when the store has all that waits. Raises StoreUnavailable; then it waits on."""
        await asyncio.gather(*map(self._flush_session, list(self._waiting)))

    async def settle(self, session_id: str | None = None) -> None:
        """The same for one session, or for all, of which no reply is on its way afterwards: one that is counts as not delivered."""
        for each in list(self._on_their_way) if session_id is None else [session_id]:
            self.note(each, self._on_their_way.get(each, ()), delivered=False)
        await (self.flush() if session_id is None else self._flush_session(session_id))

    async def _flush_session(self, session_id: str) -> None:
        if carried := self.encode(session_id):
            await self._write(session_id, carried)
            self.forget(session_id, carried)

    def _flush_in_background(self) -> None:
        self._timer = None
        self._flushing = asyncio.create_task(self._try_to_flush())

    async def _try_to_flush(self) -> None:
        # Otherwise the process's next beat tries again.
        with contextlib.suppress(StoreUnavailable):
            await self.flush()
