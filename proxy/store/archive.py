"""Sessions out of the store and back into it, record by record as they are: what an archive is made of.

A session comes back in parts. Until the last one it is `restoring`: it takes no calls, and no trainer or export sees it as closed.
The last part makes it what it was, in one script. Every part may be repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from proxy.errors import Conflict, NotFound
from proxy.store import keys
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.keys import pack, pack_versioned
from proxy.store.sessions import Intent, RedisSessionStore, SessionInfo, SessionListing, SessionState

RESTORE = Script.read("restore", "_session")
RESTORED = Script.read("restored", "_session")

NO_KEY = b""
"""The key hash of a session that came back: no key opens it."""

Records = Sequence[tuple[str, bytes]]


class RedisArchiveStore:
    def __init__(self, connection: StoreConnection, sessions: RedisSessionStore) -> None:
        self._redis = connection
        self._sessions = sessions
        self._listing = SessionListing(connection, sessions.load)

    async def named_records(self, session_id: str, start: int, stop: int) -> list[tuple[str, bytes]]:
        """(call id, record), indexes as in LRANGE. A record that is not what was committed is called by its number, as it is
        where rows are built."""
        records = await self._sessions.records(session_id, start, stop)
        flat = await self._redis.execute("HGETALL", keys.index(session_id))
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        names = {digest: call_id.decode() for call_id, digest in pairs}
        return [(names.get(_digest(record), f"record-{start + at}"), record) for at, record in enumerate(records)]

    async def restore(self, info: SessionInfo, start: int, records: Records) -> None:
        """Put these records, the first of which has the number `start`, into the session, which is made when it is not there.

        Raises `Conflict` when a session of that id is another one, is open, or holds other records.
        """
        there = await self._sessions.load(info.session_id)
        if there is not None and _archived(there.info) != _archived(info):
            raise Conflict(f"there is another session {info.session_id} already", param="session_id")
        if there is None:
            await self._listing.add(info)
        args: list[Argument] = [_packed(info), repr(info.created_at), start]
        for call_id, record in records:
            args += (call_id, _digest(record), record)
        parts = (keys.state(info.session_id), keys.calls(info.session_id), keys.index(info.session_id))
        outcome, detail = await self._redis.run(RESTORE, parts, args)
        if outcome == b"gap":
            raise Conflict(f"session {info.session_id} has {detail} calls, so none can be added at {start}", param="start")
        if outcome == b"conflict":
            raise Conflict(f"session {info.session_id} is there already, and {detail.decode()}")

    async def finish(
        self, state: SessionState, delivered: Sequence[str], intents: Sequence[Intent], leased_at: float | None
    ) -> bool:
        """The session is what `state` says, with these marks; False when it was before. With `leased_at` its reward is fixed.

        Raises `Conflict` when a closed session of that id differs, or records are missing.
        """
        session_id = state.info.session_id
        args: list[Argument] = [_packed(state.info), state.calls, *_fields(state, leased_at), "", *delivered, ""]
        for intent in intents:
            args += (intent.call_id, pack_versioned(intent))
        outcome, *detail = await self._redis.run(RESTORED, _all_keys(session_id), args)
        if outcome == b"conflict":
            raise Conflict(f"session {session_id} cannot be finished: {detail[0].decode()}")
        if outcome == b"missing":
            raise NotFound(f"there is no session {session_id}")
        if outcome == b"closed":
            await self._compare(state, delivered, intents)
        return bool(outcome == b"ok")

    async def _compare(self, state: SessionState, delivered: Sequence[str], intents: Sequence[Intent]) -> None:
        session_id = state.info.session_id
        there = await self._sessions.load(session_id)
        if there is None:
            raise NotFound(f"there is no session {session_id}")
        if _comparable(there) != _comparable(state):
            raise Conflict(f"session {session_id} is there already, and its state is not the same")
        if await self._sessions.delivered(session_id) != set(delivered):
            raise Conflict(f"session {session_id} is there already, and other replies of it were delivered")
        if await self._sessions.intents(session_id) != sorted(intents, key=lambda intent: intent.started_at):
            raise Conflict(f"session {session_id} is there already, and other calls of it have no result")


def _fields(state: SessionState, leased_at: float | None) -> list[Argument]:
    """Names and values of the session's hash, spelt as `close` and `set_reward` spell them."""
    fields: dict[str, Argument | None] = {
        "status": state.status,
        "updated_at": repr(state.updated_at),
        "per_call": pack(state.per_call),
        "per_branch": pack(state.per_branch),
        "reward_metadata": pack(state.reward_metadata),
        "reward": None if state.reward is None else repr(float(state.reward)),
        "error": state.error,
        "closed_at": None if state.closed_at is None else repr(state.closed_at),
        "leased": None if leased_at is None else repr(leased_at),
    }
    return [part for name, value in fields.items() if value is not None for part in (name, value)]


def _packed(info: SessionInfo) -> bytes:
    return pack_versioned(_archived(info))


def _archived(info: SessionInfo) -> SessionInfo:
    """What an archive holds of it: not the key, and not its group's rule. A group that is imported is the service's to decide on. Its
    calls have their roles."""
    return replace(info, key_hash=NO_KEY, group_rule=None, role_rules=())


def _comparable(state: SessionState) -> SessionState:
    """Without what may differ: a reward of the same value may have been given again, and old archives do not tell who is
    trained, nor the echo policy."""
    info = replace(_archived(state.info), trained=True, echo_policy="strict")
    return replace(state, info=info, updated_at=0.0, unserved=None)


def _digest(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=16).digest()


def _all_keys(session_id: str) -> tuple[str, ...]:
    named = (keys.state, keys.calls, keys.index, keys.intents, keys.delivered)
    return tuple(key(session_id) for key in named)
