"""Sessions and the records of their calls in Redis.

All keys of a session share a hash tag, so every step of a call is one script and one round trip: `begin` (snapshot, new records, intent)
and `commit`. Records are opaque bytes here; `reconstruct.codec` reads and writes them. A fork stores references to the records that it
replays; whoever loads its records gets those.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.errors import Conflict, NotFound
from proxy.store import keys
from proxy.store.answers import Answers
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.groups import GroupRule
from proxy.store.keys import pack, pack_versioned, unpack, unpack_versioned
from reconstruct.roles import RoleRule

_REFERENCE = b"\xc1"
LOADED_AT_ONCE = 32
OPENING_SECONDS = 60.0
"""How long a fork that was announced may take to exist."""
LOOKED_AT = 2048
"""Listed sessions that one page looks at."""


@dataclass(frozen=True, slots=True)
class Fork:
    """What a session replays before it samples: the first `calls` records of the session `session_id`, its origin, as far as the call
    `until`, the pivot (None: all of them). `created_at` is the origin's: no other session of that id is meant.

    `on_divergence`: what becomes of a request that was not recorded, live or fail. `tokens_per_second`: the pace of streamed replies that
    are replayed; None: at once."""

    session_id: str
    created_at: float
    calls: int
    until: str | None = None
    on_divergence: str = "live"
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How many candidates are sampled for one reply, and who chooses: `choose` is logprob (the highest mean logprob), model (`model`
    judges) or http (the endpoint `url`). `roles`: of which calls; none: of all."""

    n: int
    choose: str = "logprob"
    model: str | None = None
    url: str | None = None
    roles: tuple[str, ...] = ()
    timeout_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The fields fixed when a session is created. `key_hash` is sha256 of the session's API key; the key is not stored."""

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
    """False: never leased to a trainer, whatever its reward, and not counted among undelivered groups."""
    echo_policy: str = "strict"
    """What an edited replay of a reply becomes. strict: a branch. minted: the reply as sampled, where an id minted into it proves which
    reply is meant."""
    role_rules: tuple[RoleRule, ...] = ()
    """The roles of its calls, as its harness's definition declares them."""
    max_calls: int | None = None
    max_completion_tokens: int | None = None
    max_total_tokens: int | None = None
    """The budget (`proxy.call.budget`): calls, sampled tokens, tokens of prompts and replies. None: unlimited."""
    replay: Fork | None = None
    lookahead: Lookahead | None = None


@dataclass(frozen=True, slots=True)
class Unserved:
    """A call that the service or its engine failed. `at`: when the harness got the error, in epoch seconds; `code` is the error's."""

    at: float
    call_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as it stands. `status`: open, closing, completed, failed, timeout, cancelled, or restoring during an import."""

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
    """The last unserved call, which may have no record."""
    replayed_at: float | None = None
    """When a recorded reply was last given to its harness. A replayed call itself keeps the start that it had."""
    sampled_tokens: int | None = None
    """Known once the session is closed and ready for its group."""


@dataclass(frozen=True, slots=True)
class Intent:
    """Written before the engine samples. One that stays without a record is a dangling call.

    `process` asks the engine, and the call is in flight while that process lives; "" once the process has given the call up."""

    call_id: str
    parent_id: str | None
    digest: bytes
    replica: str
    started_at: float
    process: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer of `begin`. `status` is the session's, or "missing", or "full". `accepted`: the intent was written, because the session
    is open and `known_calls` was current. Otherwise `records` are the calls that the caller did not know.

    `created_at` is the session's: a cached tree with another one belongs to a deleted session of the same id. So does a caller that
    knows more calls than there are, whose answer is "missing" too."""

    status: str
    accepted: bool
    records: Sequence[bytes] = ()
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """An intent that this process wrote, or may have written, and has not seen settled. `intent` None: it is to be dropped."""

    session_id: str
    intent: Intent | None


class SessionStore:
    """`process` signs the intents. `clock` replaces Redis's own, for tests. Every method may raise `StoreUnavailable`."""

    def __init__(self, connection: StoreConnection, process: str = "", clock: Callable[[], float] | None = None) -> None:
        self._redis = connection
        self._process = process
        self._clock = clock
        self._unsettled: dict[str, _Unsettled] = {}
        self._answers = Answers(self._write_answers)
        self._listing = SessionListing(connection, self.load)

    async def ping(self) -> None:
        """Returns when the store answers and has room for records."""
        await self._redis.check_room()

    async def create(self, info: SessionInfo) -> bool:
        """False when another session of that id exists. Repeating a creation is a no-op and True."""
        # The listing first: an unlisted session could never be found again, a listed one that does not exist is skipped.
        unclosed = self._redis.execute("ZADD", keys.UNCLOSED, repr(info.created_at), info.session_id)
        await asyncio.gather(self._listing.add(info), unclosed)
        if await self._run("create", _state_and_calls(info.session_id), (pack_versioned(info), repr(info.created_at))):
            return True
        other = await self.load(info.session_id)
        if other is None or other.info.created_at != info.created_at:
            await self._listing.remove(info)
        return False

    async def load(self, session_id: str) -> SessionState | None:
        return _parse_state(await self._run("snapshot", _state_and_calls(session_id)))

    async def list_sessions(
        self, *, status: str | None, group_id: str | None, limit: int, cursor: str | None
    ) -> tuple[list[SessionState], str | None]:
        """A page, newest first, and the cursor of the next one; None: it was the last."""
        return await self._listing.load_page(status=status, group_id=group_id, limit=limit, cursor=cursor)

    async def delete(self, session_id: str) -> bool:
        """False when there was none. Raises `Conflict` while forks replay it."""
        state = await self.load(session_id)
        removed = await self._redis.run(Script.read("delete"), keys.session(session_id))
        if removed < 0:
            raise Conflict(f"session {session_id} is replayed by forks: delete them first")
        if state is not None:
            await self._listing.remove(state.info)
            if state.info.replay is not None:
                await self._redis.execute("ZREM", keys.forks(state.info.replay.session_id), session_id)
        await self.mark_active(session_id, None)
        self._answers.forget_session(session_id)
        return bool(removed)

    async def begin(self, session_id: str, known_calls: int, intent: Intent, most_bytes: int = 0) -> Begun:
        """Writes the intent. A session whose calls hold `most_bytes` or more (0: unlimited) has the status "full"."""
        signed = Intent(
            intent.call_id, intent.parent_id, intent.digest, intent.replica, intent.started_at, process=self._process
        )
        # The intent may have been written even when no answer arrives.
        self._unsettled[intent.call_id] = _Unsettled(session_id, None)
        answers = self._answers.encode(session_id)
        args = (known_calls, intent.call_id, pack_versioned(signed), most_bytes, *answers)
        parts = (*_with_intents(session_id), *_answers_of(session_id))
        status, accepted, created_at, records = await self._run("begin", parts, args)
        if accepted:
            self._answers.forget(session_id, answers)
            self._unsettled[intent.call_id] = _Unsettled(session_id, intent)
        else:
            self._unsettled.pop(intent.call_id, None)
        return Begun(status.decode(), bool(accepted), await self.resolve(records), float(created_at))

    async def replay(self, session_id: str, known_calls: int, calls: Mapping[str, tuple[bytes, bytes]], at: float) -> Begun:
        """Appends those of the calls (id -> digest of the record, entry) that are not there yet, all or none, if the session is open and
        `known_calls` is current (`accepted`): so one process alone gives a recorded reply, at the time `at`. All of them count as being
        answered here."""
        args: list[Argument] = [known_calls, self._now(), self._process, repr(at)]
        for call_id, stored in calls.items():
            args += (call_id, *stored)
        parts = (*_state_and_calls(session_id), keys.index(session_id), keys.answering(session_id))
        status, accepted, created_at, records = await self._run("replay", parts, args, durable=True)
        if accepted:
            self._answers.expect(session_id, calls)
        return Begun(status.decode(), bool(accepted), await self.resolve(records), float(created_at))

    async def pin(self, fork_id: str, fork: Fork, now: float) -> bool:
        """Keeps the origin from being deleted while the fork exists, and for `OPENING_SECONDS` until it does. False when the origin is
        gone."""
        parts = (keys.state(fork.session_id), keys.forks(fork.session_id))
        return bool(await self._redis.run(Script.read("pin"), parts, (repr(fork.created_at), fork_id, repr(now))))

    async def find_forks(self, session_id: str, now: float) -> list[str]:
        """The sessions that replay this one, or are being opened. Forgets those that are gone."""
        pinned = await self._redis.execute("ZRANGE", keys.forks(session_id), 0, -1)
        opening = set(await self._redis.execute("ZRANGEBYSCORE", keys.forks(session_id), repr(now - OPENING_SECONDS), "+inf"))
        states = await asyncio.gather(*(self.load(member.decode()) for member in pinned))
        alive = {
            member
            for member, state in zip(pinned, states, strict=True)
            if member in opening or (state and state.info.replay and state.info.replay.session_id == session_id)
        }
        if gone := [member for member in pinned if member not in alive]:
            await self._redis.execute("ZREM", keys.forks(session_id), *gone)
        return sorted(member.decode() for member in alive)

    async def commit(self, session_id: str, intent_id: str, records: Mapping[str, bytes], size_bytes: int = 0) -> int:
        """Appends `records` (call id -> bytes), all or none, and drops the intent. Returns the session's number of calls. `size_bytes`:
        of the records before compression.

        Repeating a commit is a no-op. Raises `Conflict` when a call id was recorded with other bytes, and when the session was
        frozen or deleted meanwhile; one that is `closing` still takes the calls in flight."""
        answers = self._answers.encode(session_id)
        parts = (*_state_and_calls(session_id), keys.index(session_id), keys.intents(session_id), *_answers_of(session_id))
        args: list[Argument] = [intent_id, self._now(), str(size_bytes), self._process, len(records)]
        for call_id, record in records.items():
            args += (call_id, digest(record), record)
        args += answers
        # They may have been recorded even when no answer arrives.
        self._answers.expect(session_id, records)
        outcome, *detail = await self._run("commit", parts, args, durable=True, patient=True)
        if outcome == b"ok":
            self._unsettled.pop(intent_id, None)
            self._answers.forget(session_id, answers)
            return int(detail[0])
        if outcome == b"conflict":
            raise Conflict(f"call {detail[0].decode()} of session {session_id} was recorded before with other content")
        if outcome == b"frozen":
            raise Conflict(f"session {session_id} was closed as {detail[0].decode()} before the call was recorded")
        raise Conflict(f"session {session_id} was deleted before the call was recorded")

    async def drop_intent(self, session_id: str, intent_id: str) -> None:
        """The engine refused the call: the tree stays as it was."""
        self._unsettled[intent_id] = _Unsettled(session_id, None)
        await self._run("drop_intent", _with_intents(session_id), (intent_id, self._now()))
        self._unsettled.pop(intent_id, None)

    async def note_unserved(self, session_id: str, unserved: Unserved) -> None:
        """No-op when the session is closed or has a later one."""
        await self._run("note_unserved", _state_and_calls(session_id), (repr(unserved.at), pack_versioned(unserved)))

    async def note_sampled(self, session_id: str, tokens: int) -> None:
        """Notes with a closed session how many tokens were sampled in it."""
        await self._run("note_sampled", _state_and_calls(session_id), (tokens,))

    async def disown(self, running: Container[str]) -> None:
        """Settles the intents of this process whose calls are not `running` any more, for when the store was away as they ended: drops
        those without a call, and gives the others up, so that they are dangling. Writes the outcomes that wait."""
        await self._answers.flush()
        for call_id, left in [each for each in self._unsettled.items() if each[0] not in running]:
            if left.intent is None:
                await self.drop_intent(left.session_id, call_id)
            else:
                await self._run("disown", _with_intents(left.session_id), (call_id, pack_versioned(left.intent)))
                self._unsettled.pop(call_id, None)

    def note_answered(self, session_id: str, call_ids: Sequence[str], *, delivered: bool) -> None:
        """Whether the replies of a request were flushed to the harness; see `proxy.store.answers`."""
        self._answers.note(session_id, call_ids, delivered)

    async def settle_answers(self, session_id: str | None = None) -> None:
        """Returns when the store knows what became of the session's replies, None: of all. One that is on its way counts as not
        delivered."""
        await self._answers.settle(session_id)

    async def load_delivered(self, session_id: str) -> set[str]:
        """The calls whose replies were flushed to the harness."""
        waiting = self._answers.find_delivered(session_id)
        return waiting | {member.decode() for member in await self._redis.execute("SMEMBERS", keys.delivered(session_id))}

    async def find_holders(self, session_id: str) -> set[str]:
        """The processes that have calls of the session under way, or have not told what became of their replies."""
        intents = self.load_intents(session_id)
        answering = self._redis.execute("HVALS", keys.answering(session_id))
        under_way, processes = await asyncio.gather(intents, answering)
        return {intent.process for intent in under_way} | {process.decode() for process in processes} - {""}

    async def set_log(self, session_id: str, text: str) -> None:
        """Replaces the session's log. Raises `NotFound`."""
        if not await self._run("set_log", (keys.state(session_id), keys.log(session_id)), (text.encode("utf-8", "replace"),)):
            raise NotFound(f"there is no session {session_id}")

    async def load_log(self, session_id: str) -> str:
        """The log as it was stored; "" if there is none."""
        return (await self._redis.execute("GET", keys.log(session_id)) or b"").decode()

    async def load_records(self, session_id: str, start: int = 0, stop: int = -1) -> Sequence[bytes]:
        """In commit order; indexes as in LRANGE. Of a replayed call the record it refers to; the reference if that is gone."""
        return await self.resolve(await self.load_entries(session_id, start, stop))

    async def load_entries(self, session_id: str, start: int = 0, stop: int = -1) -> list[bytes]:
        """The same with references as they are stored."""
        return list(await self._redis.execute("LRANGE", keys.calls(session_id), start, stop))

    async def resolve(self, entries: Sequence[bytes]) -> Sequence[bytes]:
        """The records of entries; a reference whose record is gone stays one."""
        named: dict[str, dict[int, int]] = {}
        for at, entry in enumerate(entries):
            if is_reference(entry):
                owner, number = unpack(entry[1:], tuple[str, int])
                named.setdefault(owner, {})[at] = number
        if not named:
            return entries
        records = list(entries)
        for owner, numbers in named.items():
            first = min(numbers.values())
            found = await self.load_entries(owner, first, max(numbers.values()))
            for at, number in numbers.items():
                if number - first < len(found):
                    records[at] = found[number - first]
        return records

    async def load_intents(self, session_id: str) -> list[Intent]:
        """Those without a record, in the order in which they were written."""
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
        """A reward of None keeps the present one. Raises `NotFound`, and `Conflict` once the session was leased."""
        args = (_number(reward), pack(per_call), pack(per_branch), pack(metadata), self._now())
        outcome, *answer = await self._run("set_reward", _state_and_calls(session_id), args)
        if outcome == b"leased":
            raise Conflict(f"session {session_id} was leased to a trainer: its reward is fixed")
        return _require_state(session_id, answer[0] if answer else None)

    async def mark_leased(self, session_id: str) -> SessionState | None:
        """Fixes the reward, and returns the state to lease; None when the session is gone."""
        return _parse_state(await self._run("mark_leased", _state_and_calls(session_id), (self._now(),)))

    async def begin_close(self, session_id: str) -> SessionState:
        """open -> closing: no new call begins. Returns the state of a closed session unchanged. Raises `NotFound`."""
        return _require_state(session_id, await self._run("begin_close", _state_and_calls(session_id), (self._now(),)))

    async def close(
        self, session_id: str, status: str, reward: float | None, error: str | None, closed_at: float
    ) -> SessionState:
        """closing -> `status`, frozen. Repeating it is a no-op. Raises `Conflict` when it is frozen with another status."""
        answers = self._answers.encode(session_id)
        args = (status, _number(reward), error or "", repr(closed_at), *answers)
        parts = (*_state_and_calls(session_id), *_answers_of(session_id))
        outcome, *answer = await self._run("close", parts, args, durable=True)
        if outcome == b"frozen":
            raise Conflict(f"session {session_id} is closed as {answer[0].decode()}, not {status}")
        self._answers.forget_session(session_id)
        await self.mark_active(session_id, None)
        return _require_state(session_id, answer[0] if answer else None)

    async def find_unclosed(self, before: float, limit: int = 100) -> Sequence[str]:
        """Ids of unclosed sessions last known active before that time, the longest idle first."""
        found = await self._redis.execute("ZRANGEBYSCORE", keys.UNCLOSED, "-inf", f"({before!r}", "LIMIT", 0, limit)
        return [session_id.decode() for session_id in found]

    async def mark_active(self, session_id: str, at: float | None) -> None:
        """Notes when the session was active; None: it is closed or gone."""
        if at is None:
            await self._redis.execute("ZREM", keys.UNCLOSED, session_id)
        else:
            # XX: it may have been closed meanwhile.
            await self._redis.execute("ZADD", keys.UNCLOSED, "XX", repr(at), session_id)

    async def expire(self, session_id: str, idle_since: float, closing_since: float, intents: int) -> bool:
        """open -> closing, when the session was not active after `idle_since` and has `intents` intents; so is a session that was left
        half closed before `closing_since`. True for one caller only, which then closes the session."""
        args = (repr(idle_since), repr(closing_since), intents, self._now())
        return bool(await self._run("expire", _with_intents(session_id), args))

    async def _write_answers(self, session_id: str, outcomes: Sequence[Argument]) -> None:
        await self._run("note_answers", _answers_of(session_id), outcomes)

    def _run(self, script: str, parts: Sequence[str], args: Sequence[Argument] = (), **how: bool) -> Awaitable[Any]:
        return self._redis.run(Script.read(script, "_session"), parts, args, **how)

    def _now(self) -> str:
        """The time for scripts; "": they read Redis's clock."""
        return "" if self._clock is None else repr(self._clock())


class SessionListing:
    """All sessions by creation time, also those of each group.

    The lists are in other slots than the sessions, written before a session and cleaned after it: readers skip an entry whose session
    is missing, or was created at another time. A page looks at `LOOKED_AT` entries at most; a short page may still have a cursor.
    """

    def __init__(self, connection: StoreConnection, load: Callable[[str], Awaitable[SessionState | None]]) -> None:
        self._redis = connection
        self._load = load

    async def add(self, info: SessionInfo) -> None:
        member = keys.listing_member(info.created_at, info.session_id)
        await asyncio.gather(*(self._redis.execute("ZADD", key, 0, member) for key in _lists(info)))

    async def remove(self, info: SessionInfo) -> None:
        member = keys.listing_member(info.created_at, info.session_id)
        await asyncio.gather(*(self._redis.execute("ZREM", key, member) for key in _lists(info)))

    async def load_page(
        self, *, status: str | None, group_id: str | None, limit: int, cursor: str | None
    ) -> tuple[list[SessionState], str | None]:
        key = keys.SESSIONS if group_id is None else keys.group_sessions(group_id)
        found: list[SessionState] = []
        for _ in range(LOOKED_AT // LOADED_AT_ONCE):
            before = "+" if cursor is None else f"({cursor}"
            raw = await self._redis.execute("ZREVRANGEBYLEX", key, before, "-", "LIMIT", 0, LOADED_AT_ONCE)
            members = [member.decode() for member in raw]
            for member, state in zip(members, await self._load_members(members), strict=True):
                cursor = member
                if state is not None and status in (None, state.status):
                    found.append(state)
                    if len(found) == limit:
                        return found, cursor
            if len(members) < LOADED_AT_ONCE:
                return found, None
        return found, cursor

    async def _load_members(self, members: list[str]) -> list[SessionState | None]:
        states = await asyncio.gather(*(self._load(keys.parse_member(member)[0]) for member in members))
        return [
            state if state and member == keys.listing_member(state.info.created_at, state.info.session_id) else None
            for member, state in zip(members, states, strict=True)
        ]


def refer(session_id: str, number: int) -> bytes:
    """The entry of a replayed call: record `number` of the session."""
    return _REFERENCE + pack((session_id, number))


def is_reference(entry: bytes) -> bool:
    return entry.startswith(_REFERENCE)


def digest(record: bytes) -> bytes:
    """Distinguishes a repeated commit from a conflicting one."""
    return hashlib.blake2b(record, digest_size=16).digest()


def _lists(info: SessionInfo) -> tuple[str, ...]:
    return (keys.SESSIONS,) if info.group_id is None else (keys.SESSIONS, keys.group_sessions(info.group_id))


def _state_and_calls(session_id: str) -> tuple[str, str]:
    return keys.state(session_id), keys.calls(session_id)


def _with_intents(session_id: str) -> tuple[str, str, str]:
    return keys.state(session_id), keys.calls(session_id), keys.intents(session_id)


def _answers_of(session_id: str) -> tuple[str, str]:
    return keys.delivered(session_id), keys.answering(session_id)


def _number(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _require_state(session_id: str, snapshot: Any) -> SessionState:
    state = None if snapshot is None else _parse_state(snapshot)
    if state is None:
        raise NotFound(f"there is no session {session_id}")
    return state


def _parse_state(snapshot: Any) -> SessionState | None:
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
        per_call=_unpack_mapping(fields.get(b"per_call")),
        per_branch=_unpack_mapping(fields.get(b"per_branch")),
        reward_metadata=_unpack_mapping(fields.get(b"reward_metadata")),
        error=None if error is None else error.decode(),
        closed_at=None if closed_at is None else float(closed_at),
        updated_at=float(fields[b"updated_at"]),
        unserved=unpack_versioned(fields[b"unserved"], Unserved) if b"unserved" in fields else None,
        replayed_at=float(fields[b"replayed_at"]) if b"replayed_at" in fields else None,
        sampled_tokens=int(fields[b"sampled_tokens"]) if b"sampled_tokens" in fields else None,
    )


def _unpack_mapping(blob: bytes | None) -> dict[str, Any]:
    return {} if blob is None else unpack(blob, dict[str, Any])
