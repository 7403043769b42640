"""The sessions this process has in memory: their forests, replies and keys, read from the store when they are not.

The store is the only state; this is a cache. A tree knows how many records of its session it has read (`known`); `begin` tells
it of the ones other processes wrote meanwhile. Trees beyond `session_cache` are forgotten, least recently used first.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from proxy.errors import NotFound
from proxy.store.base import SessionInfo, SessionStore
from reconstruct.codec import decode
from reconstruct.errors import ReconstructError
from reconstruct.forest import Forest
from reconstruct.records import Call, Ids

_decode = msgspec.json.decode


class SessionTree:
    """One session's forest, with its replies decoded once and what planning learned of its templates."""

    def __init__(self, info: SessionInfo) -> None:
        self.info = info
        self.forest = Forest()
        self.known = 0
        self.turn_ends: dict[bytes, Ids] = {}
        self._replies: dict[str, dict[str, Any]] = {}

    def reply(self, call_id: str) -> dict[str, Any]:
        """The reply of a call as it was sent to the harness, a chat message."""
        message = self._replies.get(call_id)
        if message is None:
            message = self._replies[call_id] = _decode(self.forest.calls[call_id].reply)
        return message

    def learn(self, records: Sequence[bytes], start: int) -> bool:
        """Take in the store's records from number `start` on; whether any was new. A damaged record is left to the accounting:
        it stays in the store, and no call can be found to continue it."""
        size = len(self.forest)
        for record in records:
            with contextlib.suppress(ReconstructError):
                self.forest.add(decode(record))
        self.known = max(self.known, start + len(records))
        return len(self.forest) > size

    def committed(self, calls: Iterable[Call], total: int) -> None:
        """This process appended `calls`, after which the store counts `total` records."""
        added = 0
        for call in calls:
            self.forest.add(call)
            added += 1
        if total == self.known + added:
            self.known = total


class SessionTrees:
    def __init__(self, sessions: SessionStore, capacity: int) -> None:
        self._sessions = sessions
        self._capacity = capacity
        self._trees: OrderedDict[str, SessionTree] = OrderedDict()

    async def open(self, session_id: str) -> SessionTree:
        """The session's tree, from memory or from the store. Raises NotFound for a session that does not exist."""
        tree = self._trees.get(session_id)
        if tree is not None:
            self._trees.move_to_end(session_id)
            return tree
        state = await self._sessions.load(session_id)
        if state is None:
            raise NotFound(f"session '{session_id}' does not exist")
        tree = SessionTree(state.info)
        if state.calls:
            tree.learn(await self._sessions.records(session_id), 0)
        # Another call may have opened it while the store was asked: one tree for all of them.
        tree = self._trees.setdefault(session_id, tree)
        while len(self._trees) > self._capacity:
            self._trees.popitem(last=False)
        return tree

    def forget(self, session_id: str) -> None:
        self._trees.pop(session_id, None)
