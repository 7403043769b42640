"""Sessions and the records of their calls in Redis. Every step of a call is one script and one round trip."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.errors import Conflict, NotFound
from proxy.store import keys
from proxy.store.connection import Script, StoreConnection
from proxy.store.groups import GroupRule
from proxy.store.keys import pack, pack_versioned, unpack, unpack_versioned
from reconstruct.roles import RoleRule

CREATE = Script.read("create", "_session")
SNAPSHOT = Script.read("snapshot", "_session")
DELETE = Script.read("delete")
BEGIN = Script.read("begin", "_session")
COMMIT = Script.read("commit", "_session")
DROP_INTENT = Script.read("drop_intent", "_session")
NOTE_UNSERVED = Script.read("note_unserved", "_session")
DISOWN = Script.read("disown", "_session")
MARK_DELIVERED = Script.read("mark_delivered", "_session")
SET_REWARD = Script.read("set_reward", "_session")
MARK_LEASED = Script.read("mark_leased", "_session")
BEGIN_CLOSE = Script.read("begin_close", "_session")
CLOSE = Script.read("close", "_session")
EXPIRE = Script.read("expire", "_session")


class RedisSessionStore:
    """Implements `proxy.store.sessions.SessionStore`. `process` is who signs the intents. `clock`: in place of Redis's own."""

    def __init__(self, connection: StoreConnection, process: str = "", clock: Callable[[], float] | None = None) -> None:
        self._redis = connection
        self._process = process
        self._clock = clock
        self._unsettled: dict[str, _Unsettled] = {}
        self._listing = SessionListing(connection, self.load)

    async def ping(self) -> None:
        await self._redis.check_room()

    async def create(self, info: SessionInfo) -> bool:
        # The listing first: a session that is listed nowhere could never be found again, a listed one that does not
        # exist is skipped.
        unclosed = self._redis.execute("ZADD", keys.UNCLOSED, repr(info.created_at), info.session_id)
        await asyncio.gather(self._listing.add(info), unclosed)
        if await self._redis.run(CREATE, _both(info.session_id), (pack_versioned(info), repr(info.created_at))):
            return True
        other = await self.load(info.session_id)
        if other is None or other.info.created_at != info.created_at:
            await self._listing.remove(info)
        return False

    async def load(self, session_id: str) -> SessionState | None:
        return _state(await self._redis.run(SNAPSHOT, _both(session_id)))

    async def listing(
        self, *, status: str | None, group_id: str | None, limit: int, cursor: str | None
    ) -> tuple[list[SessionState], str | None]:
        return await self._listing.page(status=status, group_id=group_id, limit=limit, cursor=cursor)

    async def delete(self, session_id: str) -> bool:
        state = await self.load(session_id)
        parts = (*_both(session_id), keys.index(session_id), keys.intents(session_id), keys.delivered(session_id))
        removed = await self._redis.run(DELETE, parts)
        if state is not None:
            await self._listing.remove(state.info)
        await self.seen(session_id, None)
        return bool(removed)

    async def begin(self, session_id: str, known_calls: int, intent: Intent, most_bytes: int = 0) -> Begun:
        signed = Intent(
            intent.call_id, intent.parent_id, intent.digest, intent.replica, intent.started_at, process=self._process
        )
        # Until the answer is here nobody knows whether the intent is.
        self._unsettled[intent.call_id] = _Unsettled(session_id, None)
        status, accepted, created_at, records = await self._redis.run(
            BEGIN, _with_intents(session_id), (known_calls, intent.call_id, pack_versioned(signed), most_bytes)
        )
        if accepted:
            self._unsettled[intent.call_id] = _Unsettled(session_id, intent)
        else:
            self._unsettled.pop(intent.call_id, None)
        return Begun(status.decode(), bool(accepted), records, float(created_at))

    async def commit(self, session_id: str, intent_id: str, records: Mapping[str, bytes], size_bytes: int = 0) -> int:
        parts = (*_both(session_id), keys.index(session_id), keys.intents(session_id))
        args: list[bytes | str] = [intent_id, self._now(), str(size_bytes)]
        for call_id, record in records.items():
            args += (call_id, hashlib.blake2b(record, digest_size=16).digest(), record)
        outcome, *detail = await self._redis.run(COMMIT, parts, args, durable=True, patient=True)
        if outcome == b"ok":
            self._unsettled.pop(intent_id, None)
            return int(detail[0])
        if outcome == b"conflict":
            raise Conflict(f"call {detail[0].decode()} of session {session_id} was recorded before with other content")
        if outcome == b"frozen":
            raise Conflict(f"session {session_id} was closed as {detail[0].decode()} before the call was recorded")
        raise Conflict(f"session {session_id} was deleted before the call was recorded")

    async def drop_intent(self, session_id: str, intent_id: str) -> None:
        self._unsettled[intent_id] = _Unsettled(session_id, None)
        await self._redis.run(DROP_INTENT, _with_intents(session_id), (intent_id, self._now()))
        self._unsettled.pop(intent_id, None)

    async def note_unserved(self, session_id: str, unserved: Unserved) -> None:
        await self._redis.run(NOTE_UNSERVED, _both(session_id), (repr(unserved.at), pack_versioned(unserved)))

    async def disown(self, running: Container[str]) -> None:
        for call_id, left in [each for each in self._unsettled.items() if each[0] not in running]:
            if left.intent is None:
                await self.drop_intent(left.session_id, call_id)
            else:
                await self._redis.run(DISOWN, _with_intents(left.session_id), (call_id, pack_versioned(left.intent)))
                self._unsettled.pop(call_id, None)

    async def mark_delivered(self, session_id: str, call_ids: Sequence[str]) -> None:
        if call_ids:
            await self._redis.run(MARK_DELIVERED, (*_both(session_id), keys.delivered(session_id)), tuple(call_ids))

    async def delivered(self, session_id: str) -> set[str]:
        return {member.decode() for member in await self._redis.execute("SMEMBERS", keys.delivered(session_id))}

    async def records(self, session_id: str, start: int = 0, stop: int = -1) -> list[bytes]:
        return list(await self._redis.execute("LRANGE", keys.calls(session_id), start, stop))

    async def intents(self, session_id: str) -> list[Intent]:
        blobs = await self._redis.execute("HVALS", keys.intents(session_id))
        return sorted((unpack_versioned(blob, Intent) for blob in blobs), key=lambda intent: intent.started_at)

    async def set_reward(
        self,
        session_id: str,
        reward: float | None,
        per_call: Mapping[str, float],
        per_branch: Mapping[str, float],
        metadata: Mapping[str, Any],
    ) -> SessionState:
        args = (_number(reward), pack(per_call), pack(per_branch), pack(metadata), self._now())
        outcome, *answer = await self._redis.run(SET_REWARD, _both(session_id), args)
        if outcome == b"leased":
            raise Conflict(f"session {session_id} was handed to a trainer: its reward is fixed")
        return _found(session_id, answer[0] if answer else None)

    async def mark_leased(self, session_id: str) -> SessionState | None:
        return _state(await self._redis.run(MARK_LEASED, _both(session_id), (self._now(),)))

    async def begin_close(self, session_id: str) -> SessionState:
        return _found(session_id, await self._redis.run(BEGIN_CLOSE, _both(session_id), (self._now(),)))

    async def close(
        self, session_id: str, status: str, reward: float | None, error: str | None, closed_at: float
    ) -> SessionState:
        args = (status, _number(reward), error or "", repr(closed_at))
        outcome, *answer = await self._redis.run(CLOSE, _both(session_id), args, durable=True)
        if outcome == b"frozen":
            raise Conflict(f"session {session_id} is closed as {answer[0].decode()}, not {status}")
        await self.seen(session_id, None)
        return _found(session_id, answer[0] if answer else None)

    async def unclosed(self, before: float, limit: int = 100) -> Sequence[str]:
        found = await self._redis.execute("ZRANGEBYSCORE", keys.UNCLOSED, "-inf", f"({before!r}", "LIMIT", 0, limit)
        return [session_id.decode() for session_id in found]

    async def seen(self, session_id: str, at: float | None) -> None:
        if at is None:
            await self._redis.execute("ZREM", keys.UNCLOSED, session_id)
        else:
            # Only one that is there: it may have been closed meanwhile.
            await self._redis.execute("ZADD", keys.UNCLOSED, "XX", repr(at), session_id)

    async def expire(self, session_id: str, idle_since: float, closing_since: float, intents: int) -> bool:
        args = (repr(idle_since), repr(closing_since), intents, self._now())
        return bool(await self._redis.run(EXPIRE, _with_intents(session_id), args))

    def _now(self) -> str:
        """What scripts are told of the time: "" that they look themselves."""
        return "" if self._clock is None else repr(self._clock())


@dataclass(frozen=True, slots=True)
class Intent:
    """Written before the engine is asked: without a result it becomes a dangling call after a crash.

    `process` is who asked; empty when that process has given the call up. A call is under way while its process lives."""

    call_id: str
    parent_id: str | None
    digest: bytes
    replica: str
    started_at: float
    process: str = ""


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """An intent that this process wrote, or may have written, and has not seen settled. Without `intent` it is to go away."""

    session_id: str
    intent: Intent | None


def _both(session_id: str) -> tuple[str, str]:
    return keys.state(session_id), keys.calls(session_id)


def _with_intents(session_id: str) -> tuple[str, str, str]:
    return keys.state(session_id), keys.calls(session_id), keys.intents(session_id)


def _number(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _found(session_id: str, snapshot: Any) -> SessionState:
    state = None if snapshot is None else _state(snapshot)
    if state is None:
        raise NotFound(f"there is no session {session_id}")
    return state


def _state(snapshot: Any) -> SessionState | None:
    flat, calls = snapshot
    if not flat:
        return None
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    reward, error, closed_at = fields.get(b"reward"), fields.get(b"error"), fields.get(b"closed_at")
    return SessionState(
        info=unpack_versioned(fields[b"info"], SessionInfo),
        status=fields[b"status"].decode(),
        calls=calls,
        reward=None if reward is None else float(reward),
        per_call=_mapping(fields.get(b"per_call")),
        per_branch=_mapping(fields.get(b"per_branch")),
        reward_metadata=_mapping(fields.get(b"reward_metadata")),
        error=None if error is None else error.decode(),
        closed_at=None if closed_at is None else float(closed_at),
        updated_at=float(fields[b"updated_at"]),
        unserved=unpack_versioned(fields[b"unserved"], Unserved) if b"unserved" in fields else None,
    )


def _mapping(blob: bytes | None) -> dict[str, Any]:
    return {} if blob is None else unpack(blob, dict[str, Any])


# SessionStore: sessions and the records of their calls, as the rest of the service sees them.
#
# All keys of a session share one hash tag. Records are opaque bytes here (`reconstruct.codec` writes and reads them). The path of
# one call is two round trips: `begin` (snapshot + new records + intent) and `commit`.


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What is fixed when a session is created. `key_hash` is sha256 of the session's API key; the key is not stored."""

    session_id: str
    key_hash: bytes
    created_at: float
    task_id: str | None = None
    group_id: str | None = None
    group_size: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    group_rule: GroupRule | None = None
    trained: bool = True
    """False: no trainer ever gets it, whatever its reward, and nobody counts it among the groups that wait for one."""
    echo_policy: str = "strict"
    """What becomes of a reply that its harness replays with an edit: strict: a branch; minted: the reply as it was sampled, where an id
    that was minted into it proves which one is meant."""
    role_rules: tuple[RoleRule, ...] = ()
    """What its harness's definition declares of the roles of its calls."""
    max_calls: int | None = None
    max_completion_tokens: int | None = None
    max_total_tokens: int | None = None
    """Its budget (`proxy.call.budget`): calls, sampled tokens, and tokens of prompts and replies; None: any number."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """A call that the service or its engine failed. `at` is when its harness was told, in epoch seconds; `code` is the error's."""

    at: float
    call_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as it stands. `status` is open, closing, completed, failed, timeout or cancelled; or restoring while an import
    of it has not ended."""

    info: SessionInfo
    status: str = "open"
    calls: int = 0
    reward: float | None = None
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    reward_metadata: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    closed_at: float | None = None
    updated_at: float = 0.0
    unserved: Unserved | None = None
    """The last one, of which there may be no record."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Answer of `begin`. `status` is the session's, or "missing", or "full". `accepted` is true when the intent was written:
    the session is open and `known_calls` was current. Otherwise `records` holds the calls the caller did not know.

    `created_at` is the session's: a cached tree of another `created_at` belongs to a deleted session of the same id.
    "missing" is also the answer when the caller claims to know more calls than there are (the same case)."""

    status: str
    accepted: bool
    records: Sequence[bytes] = ()
    created_at: float = 0.0


class SessionStore(Protocol):
    async def ping(self) -> None:
        """Returns when the store answers and takes records; raises `StoreUnavailable` otherwise."""
        ...

    async def create(self, info: SessionInfo) -> bool:
        """False when another session of that id exists. Repeating the same creation is a no-op and True."""
        ...

    async def load(self, session_id: str) -> SessionState | None: ...

    async def listing(
        self, *, status: str | None, group_id: str | None, limit: int, cursor: str | None
    ) -> tuple[list[SessionState], str | None]:
        """Newest first, with the cursor of the next page or None."""
        ...

    async def delete(self, session_id: str) -> bool: ...

    async def begin(self, session_id: str, known_calls: int, intent: Intent, most_bytes: int = 0) -> Begun:
        """Write the intent. The status of a session whose calls hold `most_bytes` (0: any number) or more is "full"."""
        ...

    async def commit(self, session_id: str, intent_id: str, records: Mapping[str, bytes], size_bytes: int = 0) -> int:
        """Append `records` (call_id -> bytes, all or none), drop the intent, return the session's number of calls. `size_bytes` is what
        they hold before they are compressed.

        Repeating a commit is a no-op. A call_id that exists with other bytes raises `Conflict`; a session frozen or deleted
        meanwhile raises `Conflict` ("closing" still takes the calls that were in flight)."""
        ...

    async def drop_intent(self, session_id: str, intent_id: str) -> None:
        """The engine refused the call: the tree is as it was."""
        ...

    async def note_unserved(self, session_id: str, unserved: Unserved) -> None:
        """Kept with the session unless that is closed or knows of a later one."""
        ...

    async def disown(self, running: Container[str]) -> None:
        """Settle the intents of this process whose calls are not `running` any more, though the store could not be told when
        they ended: those that came to nothing are taken away, the others are nobody's from now on, and so dangling."""
        ...

    async def mark_delivered(self, session_id: str, call_ids: Sequence[str]) -> None: ...

    async def delivered(self, session_id: str) -> set[str]: ...

    async def records(self, session_id: str, start: int = 0, stop: int = -1) -> list[bytes]:
        """Records in commit order; indexes as in LRANGE."""
        ...

    async def intents(self, session_id: str) -> list[Intent]: ...

    async def set_reward(
        self,
        session_id: str,
        reward: float | None,
        per_call: Mapping[str, float],
        per_branch: Mapping[str, float],
        metadata: Mapping[str, Any],
    ) -> SessionState:
        """A reward of None keeps the one there. Raises `NotFound`, or `Conflict` once the session was leased."""
        ...

    async def mark_leased(self, session_id: str) -> SessionState | None:
        """The state that a trainer is given; from now on the reward is fixed. None when the session is gone."""
        ...

    async def begin_close(self, session_id: str) -> SessionState:
        """open -> closing: no new call begins. Raises `NotFound`; on a closed session returns its state."""
        ...

    async def close(
        self, session_id: str, status: str, reward: float | None, error: str | None, closed_at: float
    ) -> SessionState:
        """closing -> frozen with `status`. Repeating it with the same status is a no-op; another status raises `Conflict`."""
        ...

    async def unclosed(self, before: float, limit: int = 100) -> Sequence[str]:
        """Sessions not closed and last known to be active before that time, longest ago first."""
        ...

    async def seen(self, session_id: str, at: float | None) -> None:
        """Note when the session was active; None: it is closed or gone."""
        ...

    async def expire(self, session_id: str, idle_since: float, closing_since: float, intents: int) -> bool:
        """open -> closing, if the session was not active after `idle_since` and has `intents` intents. Also taken over is a
        session whose closing somebody left undone at `closing_since`. True for one caller only, who then closes it."""
        ...


# The list of sessions, newest first, in pages.
#
# The list lives in another slot than the sessions: it is written before a session and cleaned after it, so an entry without its
# session (or of an earlier session of the same id) is skipped. A page looks at a bounded number of entries; one that finds few
# matches among them is short and has a cursor all the same. The end is a cursor of None.


LOADED_AT_ONCE = 32
LOOKED_AT = 2048


class SessionListing:
    def __init__(self, connection: StoreConnection, load: Callable[[str], Awaitable[SessionState | None]]) -> None:
        self._redis = connection
        self._load = load

    async def add(self, info: SessionInfo) -> None:
        member = keys.listing_member(info.created_at, info.session_id)
        await asyncio.gather(*(self._redis.execute("ZADD", key, 0, member) for key in _lists(info)))

    async def remove(self, info: SessionInfo) -> None:
        member = keys.listing_member(info.created_at, info.session_id)
        await asyncio.gather(*(self._redis.execute("ZREM", key, member) for key in _lists(info)))

    async def page(
        self, *, status: str | None, group_id: str | None, limit: int, cursor: str | None
    ) -> tuple[list[SessionState], str | None]:
        key = keys.SESSIONS if group_id is None else keys.group_sessions(group_id)
        found: list[SessionState] = []
        for _ in range(LOOKED_AT // LOADED_AT_ONCE):
            members = await self._members(key, cursor)
            for member, state in zip(members, await self._states(members), strict=True):
                cursor = member
                if state is not None and status in (None, state.status):
                    found.append(state)
                    if len(found) == limit:
                        return found, cursor
            if len(members) < LOADED_AT_ONCE:
                return found, None
        return found, cursor

    async def _members(self, key: str, cursor: str | None) -> list[str]:
        before = "+" if cursor is None else f"({cursor}"
        raw = await self._redis.execute("ZREVRANGEBYLEX", key, before, "-", "LIMIT", 0, LOADED_AT_ONCE)
        return [member.decode() for member in raw]

    async def _states(self, members: list[str]) -> list[SessionState | None]:
        states = await asyncio.gather(*(self._load(keys.listed(member)) for member in members))
        return [
            state if state and member == keys.listing_member(state.info.created_at, state.info.session_id) else None
            for member, state in zip(members, states, strict=True)
        ]


def _lists(info: SessionInfo) -> tuple[str, ...]:
    return (keys.SESSIONS,) if info.group_id is None else (keys.SESSIONS, keys.group_sessions(info.group_id))
