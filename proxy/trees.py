"""SessionTrees: the sessions this process has in memory, read from the store when they are not.

The store is the only state; this is a cache. Trees beyond `session_cache` are forgotten, least recently used first.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence

from proxy.errors import NotFound, Unauthorized
from proxy.session_tree import SessionTree
from proxy.steps import STORE, Waiting
from proxy.store.session_store import SessionInfo, SessionStore


class SessionTrees:
    def __init__(self, sessions: SessionStore, capacity: int, volatile_lines: Sequence[str] = ()) -> None:
        self._volatile = (
            re.compile("|".join(f"(?:{line})" for line in volatile_lines), re.MULTILINE) if volatile_lines else None
        )
        self._sessions = sessions
        self._capacity = capacity
        self._trees: OrderedDict[str, SessionTree] = OrderedDict()

    async def open(self, session_id: str, admits: Callable[[SessionInfo], None] = lambda _: None) -> SessionTree:
        """The session's tree, from memory or from the store. Raises NotFound for a session that does not exist, and what `admits`
        raises for a caller who may not have it: before anything but the session's own state is read."""
        tree = self._trees.get(session_id)
        if tree is not None and _admitted(admits, tree.info):
            self._trees.move_to_end(session_id)
            return tree
        # Also when memory admits nobody: meanwhile another session may have been given the same id, and another key.
        with Waiting(STORE):
            state = await self._sessions.load(session_id)
        if state is None:
            self.forget(session_id)
            raise NotFound(f"session '{session_id}' does not exist")
        admits(state.info)
        if tree is not None and tree.info.created_at != state.info.created_at:
            self.forget(session_id)
        tree = SessionTree(state.info, self._volatile)
        if state.calls:
            with Waiting(STORE):
                records = await self._sessions.records(session_id)
            tree.learn(records, 0)
        # Another call may have opened it while the store was asked: one tree for all of them.
        tree = self._trees.setdefault(session_id, tree)
        while len(self._trees) > self._capacity:
            self._trees.popitem(last=False)
        return tree

    async def refresh(self, tree: SessionTree) -> None:
        """Take in what other processes recorded meanwhile."""
        known = tree.known
        with Waiting(STORE):
            records = await self._sessions.records(tree.info.session_id, known)
        tree.learn(records, known)

    def forget(self, session_id: str) -> None:
        self._trees.pop(session_id, None)


def _admitted(admits: Callable[[SessionInfo], None], info: SessionInfo) -> bool:
    try:
        admits(info)
    except Unauthorized:
        return False
    return True
