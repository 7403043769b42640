"""A call's intent on its way into the store: written while the call does other things, and taken back when nothing is sampled."""

from __future__ import annotations

import asyncio

from proxy.budget import check_budget
from proxy.errors import Conflict, NotFound, SessionFull, Unavailable, VerbatimError
from proxy.planner import Planner
from proxy.services import Services
from proxy.store.session_store import Intent
from proxy.turn import Turn

_TRIES = 50
"""How often a call starts over because other calls of its session were recorded meanwhile."""


class WritingIntent:
    """The intent of `turn` at its replica. When other calls of the session were recorded meanwhile, the parent is looked for again."""

    def __init__(self, services: Services, planner: Planner, turn: Turn) -> None:
        self._services = services
        self._planner = planner
        self._turn = turn
        self._task = asyncio.create_task(self._write())

    @property
    def is_written(self) -> bool:
        return self._task.done() and not self._task.cancelled() and self._task.exception() is None

    async def written(self) -> None:
        """Returns when it is. Raises Conflict for a session that is not open, NotFound where there is none, and as the store."""
        await asyncio.shield(self._task)

    async def take_back(self) -> None:
        """The call is not sampled: drop the intent, if it was written."""
        try:
            await self.written()
        except VerbatimError:
            return
        await self._services.sessions.drop_intent(self._turn.session_id, self._turn.call_ids[0])

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._task.cancel()

    async def _write(self) -> None:
        turn, sessions = self._turn, self._services.sessions
        for _ in range(_TRIES):
            assert turn.replica is not None and turn.found is not None
            check_budget(turn, self._services.inflight.of(turn.session_id))
            parent_id = turn.found.parent.call_id if turn.found.parent else None
            intent = Intent(turn.call_ids[0], parent_id, turn.digest, turn.replica.name, turn.started_at)
            known = turn.tree.known
            begun = await sessions.begin(turn.session_id, known, intent, self._services.settings.max_session_bytes)
            if begun.status == "missing" or (begun.created_at and begun.created_at != turn.tree.info.created_at):
                self._services.trees.forget(turn.session_id)
                raise NotFound(f"session '{turn.session_id}' does not exist")
            if begun.accepted:
                return
            if begun.status == "full":
                raise _full(turn.session_id, self._services.settings.max_session_bytes)
            if begun.status != "open":
                raise Conflict(f"session '{turn.session_id}' is {begun.status}; it takes no more calls")
            if turn.tree.learn(begun.records, known):
                self._planner.find_again(turn)
        raise Unavailable(f"session '{turn.session_id}' is too busy; try again")


def _full(session_id: str, most_bytes: int) -> SessionFull:
    return SessionFull(
        f"session '{session_id}' has recorded all that one session may, {most_bytes} bytes: close it, or raise "
        "VERBATIM_MAX_SESSION_BYTES"
    )
