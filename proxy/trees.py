"""SessionTrees: the sessions this process has in memory, read from the store when they are not.

The store is the only state; this is a cache. Trees beyond `session_cache` of them or `session_cache_bytes` in all are not kept, least
recently used first, nor is one that would fill a quarter of it alone. All calls under way of a session share one tree, kept or not.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from proxy.errors import Conflict, NotFound, Unauthorized
from proxy.session_tree import SessionTree
from proxy.steps import STORE, Waiting
from proxy.store.session_store import SessionInfo, SessionStore

LONG_BYTES = 2**20
"""Records of more than this take a while to be decoded."""

LARGEST_SHARE = 4
"""One session's tree is kept while it takes at most one part in so many of the memory for all."""


class SessionTrees:
    def __init__(self, sessions: SessionStore, capacity: int, capacity_bytes: int, volatile_lines: Sequence[str] = ()) -> None:
        self._volatile = (
            re.compile("|".join(f"(?:{line})" for line in volatile_lines), re.MULTILINE) if volatile_lines else None
        )
        self._sessions = sessions
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._trees: OrderedDict[str, SessionTree] = OrderedDict()
        self._used: WeakValueDictionary[str, SessionTree] = WeakValueDictionary()
        """Kept ones, and those that a call under way still holds."""
        self._weighed: dict[str, int] = {}
        self.memory_bytes = 0
        """About how much memory the trees that are kept take."""

    def __len__(self) -> int:
        return len(self._trees)

    async def open(self, session_id: str, admits: Callable[[SessionInfo], None] = lambda _: None) -> SessionTree:
        """The session's tree, from memory or from the store. Raises NotFound for a session that does not exist, Conflict for one that
        is known to be closed, and what `admits` raises for a caller who may not have it: before anything but the session's own
        state is read."""
        tree = self._trees.get(session_id)
        if tree is not None and _admitted(admits, tree.info):
            self._trees.move_to_end(session_id)
            return tree
        tree = self._used.get(session_id)
        if tree is not None and _admitted(admits, tree.info):
            return tree
        # Also when memory admits nobody: meanwhile another session may have been given the same id, and another key.
        with Waiting(STORE):
            state = await self._sessions.load(session_id)
        if state is None:
            self.forget(session_id)
            raise NotFound(f"session '{session_id}' does not exist")
        admits(state.info)
        if state.status != "open":
            raise Conflict(f"session '{session_id}' is {state.status}; it takes no more calls")
        if tree is not None and tree.info.created_at != state.info.created_at:
            self.forget(session_id)
        tree = SessionTree(state.info, self._volatile)
        if state.calls:
            with Waiting(STORE):
                records = await self._sessions.records(session_id)
            # Of a long session beside everybody else's calls.
            if sum(map(len, records)) > LONG_BYTES:
                await asyncio.to_thread(tree.learn, records, 0)
            else:
                tree.learn(records, 0)
        # Another call may have opened it while the store was asked: one tree for all of them.
        tree = self._used.setdefault(session_id, tree)
        self.weigh(tree)
        return tree

    async def refresh(self, tree: SessionTree) -> None:
        """Take in what other processes recorded meanwhile."""
        known = tree.known
        with Waiting(STORE):
            records = await self._sessions.records(tree.info.session_id, known)
        tree.learn(records, known)
        self.weigh(tree)

    def weigh(self, tree: SessionTree) -> None:
        """The tree has grown: keep it where there is room, at the cost of those used longest ago."""
        session_id, size = tree.info.session_id, tree.memory_bytes
        if self._used.get(session_id) is not tree:
            return
        if size > self._capacity_bytes // LARGEST_SHARE:
            self._drop(session_id)
            return
        self._trees[session_id] = tree
        self.memory_bytes += size - self._weighed.get(session_id, 0)
        self._weighed[session_id] = size
        while len(self._trees) > self._capacity or self.memory_bytes > self._capacity_bytes:
            self._drop(next(iter(self._trees)))

    def forget(self, session_id: str) -> None:
        """The session is closed or gone, or another one has its id by now."""
        self._drop(session_id)
        self._used.pop(session_id, None)

    def _drop(self, session_id: str) -> None:
        self._trees.pop(session_id, None)
        self.memory_bytes -= self._weighed.pop(session_id, 0)


def _admitted(admits: Callable[[SessionInfo], None], info: SessionInfo) -> bool:
    try:
        admits(info)
    except Unauthorized:
        return False
    return True
