"""SessionCache: the sessions that this process keeps in memory; the store is the only state.

Beyond `session_cache` sessions or `session_cache_bytes` the least recently used go, in two steps: while those kept whole take more than
half of the bytes, the one used longest ago is stripped (`Session.strip`), and its next call costs a parse of its history; after
that the stripped one used longest ago is dropped, and its next call reads it from the store. A session that would fill a quarter of
the bytes by itself is not kept. All calls of a session that are in flight share one `Session`, cached or not.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from contract.sessions import Fork
from proxy.call.recording import Recording
from proxy.call.session import Session
from proxy.errors import Conflict, NotFound, Unauthorized
from proxy.images import ImageBounds
from proxy.store.sessions import Begun, SessionStore, digest, is_reference, refer
from proxy.store.states import SessionInfo

LONG_BYTES = 2**20
"""Records of more than this take a while to be decoded."""

LARGEST_SHARE = 4
"""A session is kept while it takes at most one part in so many of the memory for all."""

WHOLE_SHARE = 2
"""Sessions are stripped while the whole ones take more than one part in so many of it."""


class SessionCache:
    def __init__(
        self,
        sessions: SessionStore,
        capacity: int,
        capacity_bytes: int,
        volatile_lines: Sequence[str] = (),
        bounds: ImageBounds | None = None,
        *,
        memo: bool = True,
    ) -> None:
        self._bounds = bounds
        self._memo = memo
        self._volatile = (
            re.compile("|".join(f"(?:{line})" for line in volatile_lines), re.MULTILINE) if volatile_lines else None
        )
        self._sessions = sessions
        self._capacity = capacity
        self.capacity_bytes = capacity_bytes
        self._kept: OrderedDict[str, Session] = OrderedDict()
        self._stripped: OrderedDict[str, Session] = OrderedDict()
        """Both by last use, the latest at the end."""
        self._used: WeakValueDictionary[str, Session] = WeakValueDictionary()
        """Kept ones, and those that a call under way still holds."""
        self._recordings: WeakValueDictionary[Fork, Recording] = WeakValueDictionary()
        self._weighed: dict[str, int] = {}
        self.memory_bytes = self._stripped_bytes = 0
        """About how much memory the sessions that are kept take, and of these the stripped ones."""
        self.found = self.restored = self.reloaded = 0
        """How often a session with calls was in memory when it was opened for another, was there without its texts, was read from the
        store."""

    def is_used(self, session_id: str) -> bool:
        """Whether the session is in memory here, kept or held by a call."""
        return session_id in self._used

    def __len__(self) -> int:
        return len(self._kept) + len(self._stripped)

    async def open(self, session_id: str, admits: Callable[[SessionInfo], None] = lambda _: None) -> Session:
        """The session, from memory or from the store. Raises NotFound for a session that does not exist, Conflict for one that
        is known to be closed, and what `admits` raises for a caller who may not have it: before anything but the session's own
        state is read."""
        session = self._kept.get(session_id)
        if session is not None and _is_admitted(admits, session.info):
            self._kept.move_to_end(session_id)
            self.found += session.known > 0
            return session
        session = self._stripped.get(session_id)
        if session is not None and _is_admitted(admits, session.info):
            self.restored += 1
            self.weigh(session)
            return session
        session = self._used.get(session_id)
        if session is not None and _is_admitted(admits, session.info):
            self.found += session.known > 0
            return session
        # Also when memory admits nobody: meanwhile another session may have been given the same id, and another key.
        state = await self._sessions.load(session_id)
        if state is None:
            self.forget(session_id)
            raise NotFound(f"session '{session_id}' does not exist")
        admits(state.info)
        state.info.check_understood()
        if state.status != "open":
            raise Conflict(f"session '{session_id}' is {state.status}; it takes no more calls")
        if session is not None and session.info.created_at != state.info.created_at:
            self.forget(session_id)
        session = Session(state.info, self._volatile, self._bounds, memo=self._memo)
        if state.info.replay is not None:
            session.recording = await self.load_recording(state.info.replay)
        if state.calls:
            self.reloaded += 1
            records = await self._sessions.load_records(session_id)
            # Of a long session beside everybody else's calls.
            if sum(map(len, records)) > LONG_BYTES:
                await asyncio.to_thread(session.learn, records, 0)
            else:
                session.learn(records, 0)
        # Another call may have opened it while the store was asked: one object for all of them.
        session = self._used.setdefault(session_id, session)
        self.weigh(session)
        return session

    async def load_recording(self, fork: Fork) -> Recording:
        """What a fork replays; forks of one pivot share it. Raises Conflict when its records are gone."""
        recording = self._recordings.get(fork)
        if recording is not None:
            return recording
        state = await self._sessions.load(fork.session_id)
        if state is not None:
            state.info.check_understood()
        entries = await self._sessions.load_entries(fork.session_id, 0, fork.calls - 1) if fork.calls else []
        records = await self._sessions.resolve(entries)
        delivered = await self._sessions.load_heard(fork.session_id)
        gone = state is None or state.info.created_at != fork.created_at or len(records) < fork.calls
        if gone or any(map(is_reference, records)):
            raise Conflict(f"the records of session '{fork.session_id}', which are to be replayed, are gone")
        # A reference is passed on as it is: a fork of a fork refers to where the record stands.
        named = [entry if is_reference(entry) else refer(fork.session_id, number) for number, entry in enumerate(entries)]
        stored = [(digest(record), entry) for record, entry in zip(records, named, strict=True)]
        recording = await asyncio.to_thread(Recording, fork, records, stored, delivered)
        return self._recordings.setdefault(fork, recording)

    def check_open(self, session: Session, begun: Begun) -> None:
        """Raises NotFound when the store has no such session any more, Conflict when it takes no more calls."""
        session_id = session.info.session_id
        if begun.status == "missing":
            self.forget(session_id)
            raise NotFound(f"session '{session_id}' does not exist")
        if begun.status not in ("open", "full"):
            raise Conflict(f"session '{session_id}' is {begun.status}; it takes no more calls")

    async def refresh(self, session: Session) -> bool:
        """Take in what other processes recorded meanwhile, and all records where texts are missing; whether that was anything."""
        start = 0 if session.lacks_texts else session.known
        records = await self._sessions.load_records(session.info.session_id, start)
        new = session.learn(records, start)
        self.weigh(session)
        return new

    def weigh(self, session: Session) -> None:
        """The session has grown: keep it where there is room, at the cost of those used longest ago."""
        session_id, size = session.info.session_id, session.memory_bytes
        if self._used.get(session_id) is not session:
            return
        self._drop(session_id)
        if size > self.capacity_bytes // LARGEST_SHARE:
            return
        self._kept[session_id] = session
        self._count(session_id, size)
        while len(self) > self._capacity:
            self._drop(next(iter(self._stripped or self._kept)))
        while self.memory_bytes > self.capacity_bytes:
            self._make_room(session)

    def _make_room(self, session: Session) -> None:
        """Strip or drop the session used longest ago; the `session` in use is not stripped."""
        oldest = next(iter(self._kept))
        whole_bytes = self.memory_bytes - self._stripped_bytes
        if whole_bytes > self.capacity_bytes // WHOLE_SHARE and oldest != session.info.session_id:
            self._strip(oldest)
        else:
            self._drop(next(iter(self._stripped or self._kept)))

    def _strip(self, session_id: str) -> None:
        session = self._kept[session_id]
        self._drop(session_id)
        self._stripped[session_id] = session
        size = session.strip()
        self._count(session_id, size)
        self._stripped_bytes += size

    def _count(self, session_id: str, size: int) -> None:
        self._weighed[session_id] = size
        self.memory_bytes += size

    def forget(self, session_id: str) -> None:
        """The session is closed or gone, or another one has its id by now."""
        self._drop(session_id)
        self._used.pop(session_id, None)

    def _drop(self, session_id: str) -> None:
        self._kept.pop(session_id, None)
        size = self._weighed.pop(session_id, 0)
        self.memory_bytes -= size
        if self._stripped.pop(session_id, None) is not None:
            self._stripped_bytes -= size


def _is_admitted(admits: Callable[[SessionInfo], None], info: SessionInfo) -> bool:
    try:
        admits(info)
    except Unauthorized:
        return False
    return True
