"""Sessions and the records of their calls in Redis.

All keys of a session share a hash tag, so every step of a call is one script and one round trip: `begin` (snapshot, new records, intent)
and `commit`. Records are opaque bytes here; `reconstruct.codec` reads and writes them. A fork stores references to the records that it
replays; whoever loads its records gets those.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contract.sessions import Fork, TokenSums, Unserved
from proxy.errors import Conflict, NotFound
from proxy.store import keys
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.keys import SCHEMA, pack, pack_versioned, parse_hash, unpack, unpack_versioned
from proxy.store.listing import SessionListing
from proxy.store.outcomes import DeliveryOutcomes
from proxy.store.states import (
    NO_SHARE,
    Intent,
    SessionInfo,
    SessionState,
    Share,
    Verdicts,
    pack_info,
    parse_state,
)

_REFERENCE = b"\xc1"
_RESERVED = re.compile(rb"\A\d+ \d+ \d+\n")
"""Before an intent: what its call holds of the budget, as `begin.lua` writes and reads it. MessagePack begins with another byte."""
OPENING_SECONDS = 60.0
"""How long a fork that was announced may take to exist."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer of `begin`. `status` is the session's, or "missing", or "full", or "reserved". `accepted`: the intent was written, because
    the session is open, `known_calls` was current and the budget covers what the intent reserves. Otherwise `records` are the calls that
    the caller did not know, or `reserved` is what the intents of calls under way hold. A caller that knows more calls than there are means
    a deleted session of the same id, which is missing."""

    status: str
    accepted: bool
    records: Sequence[bytes] = ()
    reserved: Share = NO_SHARE


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """An intent that this process wrote, or may have written, and has not seen settled. `intent` None: it is to be dropped."""

    session_id: str
    intent: Intent | None


class SessionStore:
    """`process` signs the intents. `clock` replaces Redis's own, for tests. Every method may raise `StoreUnavailable`.

    `created_at` says which session is meant: to a caller that means a deleted one, a later one of its id is missing. None: any."""

    def __init__(self, connection: StoreConnection, process: str = "", clock: Callable[[], float] | None = None) -> None:
        self._redis = connection
        self._process = process
        self._clock = clock
        self._unsettled: dict[str, _Unsettled] = {}
        self._answers = DeliveryOutcomes(self._write_answers)
        self.listing = SessionListing(connection, self.load)

    async def ping(self) -> list[str]:
        """Returns when the store takes records, of some sessions at least. A sentence for each thing that is wrong nevertheless."""
        return await self._redis.check()

    async def measure_free(self) -> int | None:
        """Bytes free on the store's disk; None where they are not known."""
        return await self._redis.measure_free()

    async def create(self, info: SessionInfo) -> bool:
        """False when another session of that id exists. Repeating a creation is a no-op and True."""
        # The listing first: an unlisted session could never be found again, a listed one that does not exist is skipped.
        unclosed = self._redis.execute("ZADD", keys.UNCLOSED, repr(info.created_at), info.session_id)
        await asyncio.gather(self.listing.add(info), unclosed)
        if await self._run("create", _state_and_calls(info.session_id), (pack_info(info), repr(info.created_at))):
            return True
        other = await self.load(info.session_id)
        if other is None or other.info.created_at != info.created_at:
            await self.listing.remove(info)
        return False

    async def amend(self, session_id: str, change: Callable[[SessionInfo], SessionInfo]) -> None:
        """Stores what `change` makes of the session's fixed fields, before it is closed; nothing where that is the same. Raises `NotFound`,
        `Conflict` for one that is closed, and what `change` raises."""
        while True:
            read = await self._redis.execute("HGET", keys.state(session_id), "info")
            if read is None:
                raise NotFound(f"there is no session {session_id}")
            info = unpack_versioned(read, SessionInfo)
            changed = change(info)
            if changed == info:
                return
            await self.listing.add(changed)
            args = (read, pack_info(changed), self._now())
            outcome, *detail = await self._run("amend", _state_and_calls(session_id), args, durable=True)
            if outcome == b"ok":
                return
            await self.listing.leave(changed, info)
            if outcome == b"frozen":
                raise Conflict(f"session {session_id} is {detail[0].decode()}: what it was opened with is fixed")

    async def load(self, session_id: str) -> SessionState | None:
        return parse_state(await self._run("snapshot", _state_and_calls(session_id)))

    async def begin_delete(self, session_id: str) -> None:
        """From here on no fork of it is opened. Raises `Conflict` while forks replay it."""
        if not await self._run("begin_delete", (keys.state(session_id), keys.forks(session_id))):
            raise Conflict(f"session {session_id} is replayed by forks: delete them first")

    async def call_off_delete(self, session_id: str) -> None:
        """Undoes `begin_delete`."""
        await self._redis.execute("HDEL", keys.state(session_id), "deleting")

    async def delete(self, session_id: str) -> bool:
        """False when there was none. Raises `Conflict` while forks replay it."""
        state = await self.load(session_id)
        removed = await self._redis.run(Script.read("delete"), keys.session(session_id))
        if removed < 0:
            raise Conflict(f"session {session_id} is replayed by forks: delete them first")
        if state is not None:
            await self.listing.remove(state.info)
            if state.info.replay is not None:
                await self._redis.execute("ZREM", keys.forks(state.info.replay.session_id), session_id)
        await self.mark_active(session_id, None)
        self._answers.forget_session(session_id)
        return bool(removed)

    async def begin(
        self,
        session_id: str,
        known_calls: int,
        intent: Intent,
        most_bytes: int = 0,
        *,
        left: Share = NO_SHARE,
        wanted: Share = NO_SHARE,
        created_at: float | None = None,
    ) -> Begun:
        """Writes the intent. A session whose calls hold `most_bytes` or more (0: unlimited) has the status "full"; one that has `left` of
        its budget after `known_calls`, and less than `wanted` beside what calls under way hold, "reserved". Accepted, the call holds what
        is `wanted` until its intent is gone or given up."""
        signed = replace(intent, process=self._process)
        # The intent may have been written even when no answer arrives.
        self._unsettled[intent.call_id] = _Unsettled(session_id, None)
        answers = self._answers.encode(session_id)
        args = (
            _number(created_at),
            known_calls,
            intent.call_id,
            pack((SCHEMA, signed)),
            most_bytes,
            *_amounts(left),
            *_amounts(wanted),
            *answers,
        )
        parts = (*_with_intents(session_id), *_answers_of(session_id))
        status, accepted, records, *reserved = await self._run("begin", parts, args)
        if accepted:
            self._answers.forget(session_id, answers)
            self._unsettled[intent.call_id] = _Unsettled(session_id, intent)
        else:
            self._unsettled.pop(intent.call_id, None)
        return Begun(status.decode(), bool(accepted), await self.resolve(records), Share(*reserved))

    async def replay(
        self,
        session_id: str,
        known_calls: int,
        calls: Mapping[str, tuple[bytes, bytes]],
        at: float,
        *,
        created_at: float | None = None,
    ) -> Begun:
        """Appends those of the calls (id -> digest of the record, entry) that are not there yet, all or none, if the session is open and
        `known_calls` is current (`accepted`): so one process alone gives a recorded reply, at the time `at`. All of them count as being
        answered here."""
        args: list[Argument] = [_number(created_at), known_calls, self._now(), self._process, repr(at)]
        for call_id, stored in calls.items():
            args += (call_id, *stored)
        parts = (*_state_and_calls(session_id), keys.index(session_id), keys.answering(session_id))
        status, accepted, records = await self._run("replay", parts, args, durable=True)
        if accepted:
            self._answers.expect(session_id, calls)
        return Begun(status.decode(), bool(accepted), await self.resolve(records))

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

    async def load_forks(self, session_id: str) -> list[SessionState]:
        """The sessions that replay this one and still exist."""
        pinned = await self._redis.execute("ZRANGE", keys.forks(session_id), 0, -1)
        states = await asyncio.gather(*(self.load(member.decode()) for member in pinned))
        return [state for state in states if state and state.info.replay and state.info.replay.session_id == session_id]

    async def commit(
        self,
        session_id: str,
        intent_id: str,
        records: Mapping[str, bytes],
        size_bytes: int = 0,
        *,
        created_at: float | None = None,
    ) -> int:
        """Appends `records` (call id -> bytes), all or none, and drops the intent. Returns the session's number of calls. `size_bytes`:
        of the records before compression.

        Repeating a commit is a no-op. Raises `Conflict` when a call id was recorded with other bytes, and when the session was
        frozen or deleted meanwhile; one that is `closing` still takes the calls in flight."""
        answers = self._answers.encode(session_id)
        parts = (*_state_and_calls(session_id), keys.index(session_id), keys.intents(session_id), *_answers_of(session_id))
        args: list[Argument] = [_number(created_at), intent_id, self._now(), str(size_bytes), self._process, len(records)]
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

    async def note_accounting(self, session_id: str, accounting: TokenSums) -> None:
        """Notes with a closed session what became of its tokens."""
        await self._run("note_accounting", _state_and_calls(session_id), (pack_versioned(accounting),))

    async def give_up(self, session_id: str, intent: Intent) -> None:
        """Gives up the call of a process that is dead: it is dangling, and what it reserved is free."""
        await self._run(
            "abandon_intents", _with_intents(session_id), (intent.call_id, pack_versioned(replace(intent, process="")))
        )

    async def abandon_intents(self, running: Container[str]) -> None:
        """Settles the intents of this process whose calls are not `running` any more, for when the store was away as they ended: drops
        those without a call, and gives the others up, so that they are dangling. Writes the outcomes that wait."""
        # Before anything is waited for: a call that begins meanwhile is not among `running`.
        for call_id, left in [each for each in self._unsettled.items() if each[0] not in running]:
            if left.intent is None:
                await self.drop_intent(left.session_id, call_id)
            else:
                await self._run("abandon_intents", _with_intents(left.session_id), (call_id, pack_versioned(left.intent)))
                self._unsettled.pop(call_id, None)
        await self._answers.flush()

    async def keep_active(self, running: Mapping[str, str]) -> None:
        """Notes that sessions are not idle though a `running` call of theirs (id -> session) has no intent: it waits for an engine, or its
        reply is on its way."""
        waiting = {session_id for call_id, session_id in running.items() if call_id not in self._unsettled}
        await asyncio.gather(*(self._run("keep_active", _state_and_calls(each), (self._now(),)) for each in waiting))

    def note_answered(self, session_id: str, call_ids: Sequence[str], *, delivered: bool) -> None:
        """Whether the replies of a request were flushed to the harness; see `DeliveryOutcomes`."""
        self._answers.note(session_id, call_ids, delivered)

    async def note_fetched(self, session_id: str, call_id: str) -> None:
        """The recorded reply was given to the harness again: it is delivered, unless the session is closed, whose rows no longer change."""
        await self._run("note_fetched", (keys.state(session_id), keys.delivered(session_id)), (call_id,))

    async def settle_answers(self, session_id: str | None = None) -> None:
        """Returns when the store knows what became of the session's replies, None: of all. One that is on its way counts as not
        delivered."""
        await self._answers.settle(session_id)

    async def load_delivered(self, session_id: str) -> set[str]:
        """The calls whose replies were flushed to the harness."""
        waiting = self._answers.find_delivered(session_id)
        return waiting | {member.decode() for member in await self._redis.execute("SMEMBERS", keys.delivered(session_id))}

    async def load_untold(self, session_id: str) -> dict[str, str]:
        """The recorded calls whose reply may still be on its way, and their processes: nothing is known yet of whether it was delivered.
        None of a closed session."""
        answering = parse_hash(await self._redis.execute("HGETALL", keys.answering(session_id)))
        waiting = self._answers.find_known(session_id)
        named = {call_id.decode(): process.decode() for call_id, process in answering.items()}
        return {call_id: process for call_id, process in named.items() if call_id not in waiting}

    async def load_heard(self, session_id: str) -> set[str]:
        """Those that are not known to be undelivered: delivered, or on their way. To be asked after the records: then none of these is
        missing because its outcome was noted meanwhile."""
        untold = await self.load_untold(session_id)
        return untold.keys() | await self.load_delivered(session_id)

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
        return sorted(
            (unpack_versioned(_RESERVED.sub(b"", blob), Intent) for blob in blobs), key=lambda intent: intent.started_at
        )

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

    async def note_verdicts(self, session_id: str, created_at: float, judge: str, verdicts: Verdicts) -> None:
        """Replaces what the judge said before. Raises `NotFound` when the session is gone, `Conflict` once it was leased."""
        args = (repr(created_at), judge, pack_versioned(verdicts))
        outcome = await self._run("note_verdicts", _state_and_calls(session_id), args, durable=True)
        if outcome == b"missing":
            raise NotFound(f"session {session_id} was deleted before it was judged")
        if outcome == b"leased":
            raise Conflict(f"session {session_id} was leased to a trainer: its rewards are fixed")

    async def set_review(self, session_id: str, flag: str, note: str) -> SessionState:
        """Replaces both; an empty one is taken away. Raises `NotFound`."""
        _, *answer = await self._run("set_review", _state_and_calls(session_id), (flag, note.encode("utf-8", "replace")))
        return _require_state(session_id, answer[0] if answer else None)

    async def mark_leased(self, session_id: str) -> SessionState | None:
        """Fixes the reward, and returns the state to lease; None when the session is gone."""
        return parse_state(await self._run("mark_leased", _state_and_calls(session_id), (self._now(),)))

    async def is_leased(self, session_id: str) -> bool:
        """Whether the session was ever leased, which fixes its reward and scores."""
        return bool(await self._redis.execute("HEXISTS", keys.state(session_id), "leased"))

    async def begin_close(self, session_id: str) -> SessionState:
        """open -> closing: no new call begins. Returns the state of a closed session unchanged. Raises `NotFound`."""
        return _require_state(session_id, await self._run("begin_close", _state_and_calls(session_id), (self._now(),)))

    async def close(
        self,
        session_id: str,
        status: str,
        reward: float | None,
        error: str | None,
        closed_at: float,
        presumed: Iterable[str] = (),
    ) -> SessionState:
        """closing -> `status`, frozen. `presumed`: calls that count as delivered though nobody told. Repeating it is a no-op. Raises
        `Conflict` when it is frozen with another status."""
        answers = [*self._answers.encode(session_id), *(part for call_id in presumed for part in (call_id, "1"))]
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


def refer(session_id: str, number: int) -> bytes:
    """The entry of a replayed call: record `number` of the session."""
    return _REFERENCE + pack((session_id, number))


def is_reference(entry: bytes) -> bool:
    return entry.startswith(_REFERENCE)


def digest(record: bytes) -> bytes:
    """Distinguishes a repeated commit from a conflicting one."""
    return hashlib.blake2b(record, digest_size=16).digest()


def _state_and_calls(session_id: str) -> tuple[str, str]:
    return keys.state(session_id), keys.calls(session_id)


def _with_intents(session_id: str) -> tuple[str, str, str]:
    return keys.state(session_id), keys.calls(session_id), keys.intents(session_id)


def _answers_of(session_id: str) -> tuple[str, str]:
    return keys.delivered(session_id), keys.answering(session_id)


def _amounts(share: Share) -> Sequence[Argument]:
    """As the script reads them: "" for what has no limit."""
    if share is NO_SHARE:
        return ("", "", "")
    return ["" if each is None else each for each in (share.calls, share.completion_tokens, share.total_tokens)]


def _number(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _require_state(session_id: str, snapshot: Any) -> SessionState:
    state = None if snapshot is None else parse_state(snapshot)
    if state is None:
        raise NotFound(f"there is no session {session_id}")
    return state
