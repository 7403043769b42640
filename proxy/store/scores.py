"""The scores of a session's calls in Redis: one of each scorer and call, in the session's slot, deleted with it.

The first score of a call and scorer stays, so that a repeated job changes nothing; whoever was asked for another one replaces it. From the
session's first lease on all of them are fixed, as its reward is: rows that are delivered again are the rows of the first delivery.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from proxy.errors import Conflict, NotFound, RequestError
from proxy.store import keys
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.keys import parse_hash
from reconstruct.errors import DecodeError
from reconstruct.records import UNKNOWN_MODE
from reconstruct.scores import Score, Scores, decode_score, encode_score, unscored

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Of a scorer: it becomes part of the names of columns."""


def check_scorer_name(name: str) -> None:
    """Raises RequestError."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"a scorer's name is 1 to 64 letters, digits, '_', '.' or '-', not {name!r}", param="scorer")


class ScoreStore:
    """Every method may raise `StoreUnavailable`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def keep(
        self,
        session_id: str,
        scorer: str,
        by_call: Mapping[str, Score],
        *,
        created_at: float | None = None,
        replace: bool = False,
    ) -> None:
        """Stores what the scorer says of calls, by their ids: all or none. A call that has a score of it keeps that one, unless they are to
        be replaced. `created_at` says which session is meant; None: any of the id.

        Raises `NotFound` when the session is gone, `Conflict` when a score would change one that was leased. Repeating it is a no-op."""
        check_scorer_name(scorer)
        args: list[Argument] = ["" if created_at is None else repr(float(created_at)), "1" if replace else ""]
        for call_id, score in by_call.items():
            args += (_field(scorer, call_id), encode_score(score))
        parts = (keys.state(session_id), keys.scores(session_id))
        outcome = await self._redis.run(Script.read("keep_scores", "_session"), parts, args, durable=True)
        if outcome == b"missing":
            raise NotFound(f"session {session_id} was deleted before its scores by {scorer} were kept")
        if outcome == b"leased":
            raise Conflict(f"session {session_id} was leased to a trainer: its scores are fixed")

    async def load(self, session_id: str) -> dict[str, Scores]:
        """All scores of the session, by call and scorer. One that this build cannot read has no tokens, and its `error` says why."""
        found: dict[str, dict[str, Score]] = {}
        for field, blob in (await self.load_packed(session_id)).items():
            scorer, _, call_id = field.partition("=")
            try:
                score = decode_score(blob)
            except DecodeError as error:
                score = unscored(0, scorer, UNKNOWN_MODE, f"{call_id}: {error}")
            found.setdefault(call_id, {})[scorer] = score
        return dict(found)

    async def load_packed(self, session_id: str) -> dict[str, bytes]:
        """The same as it is stored, for archives: `<scorer>=<call_id>` -> `encode_score` of it."""
        stored = parse_hash(await self._redis.execute("HGETALL", keys.scores(session_id)))
        return {field.decode(): blob for field, blob in stored.items()}

    async def restore(self, session_id: str, created_at: float, packed: Mapping[str, bytes]) -> None:
        """Gives a session that is being restored its scores, as `load_packed` had them; one that has them is left alone. Raises
        RequestError for a score that cannot be read, and as `keep` does."""
        by_scorer: dict[str, dict[str, Score]] = {}
        for field, blob in packed.items():
            scorer, _, call_id = field.partition("=")
            try:
                by_scorer.setdefault(scorer, {})[call_id] = decode_score(blob)
            except DecodeError as error:
                raise RequestError(
                    f"the score {field} of session {session_id} cannot be read: {error}", param="scores"
                ) from error
        for scorer, by_call in by_scorer.items():
            await self.keep(session_id, scorer, by_call, created_at=created_at)


def _field(scorer: str, call_id: str) -> str:
    return f"{scorer}={call_id}"
