"""Sessions for archives: read out record by record, and restored.

A session is restored in parts. Until the last one it is `restoring`: it takes no calls, and neither trainers nor exports see it as
closed. The last part sets its state in one script. Every part may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import msgspec

from contract.sessions import SettledFields
from proxy.errors import Conflict, NotFound
from proxy.store import keys
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.keys import pack, pack_versioned, parse_hash
from proxy.store.sessions import SessionStore, digest
from proxy.store.states import Intent, SessionInfo, SessionState, pack_info

_spell = msgspec.msgpack.Encoder(order="deterministic").encode
"""Equal for what is equal, also for metadata with a NaN, which Python's own comparison takes for another one."""

NO_KEY = b""
"""The key hash of a restored session: no key opens it."""

SHOWN = tuple(each.name for each in fields(SettledFields))

Records = Sequence[tuple[str, bytes]]


class ArchiveStore:
    def __init__(self, connection: StoreConnection, sessions: SessionStore) -> None:
        self._redis = connection
        self._sessions = sessions

    async def load_named_records(self, session_id: str, start: int, stop: int) -> list[tuple[str, bytes]]:
        """(call id, record); indexes as in LRANGE. A record that differs from the committed one is named by its number, as in rows."""
        records = await self._sessions.load_records(session_id, start, stop)
        index = parse_hash(await self._redis.execute("HGETALL", keys.index(session_id)))
        names = {committed: call_id.decode() for call_id, committed in index.items()}
        return [(names.get(digest(record), f"record-{start + at}"), record) for at, record in enumerate(records)]

    async def restore(self, info: SessionInfo, start: int, records: Records) -> None:
        """Adds the records, numbered from `start`, and creates the session when there is none.

        Raises `Conflict` when the session of that id is another one, is open, or holds other records.
        """
        found = await self._sessions.load(info.session_id)
        if found is not None and _spell(_strip(found.info)) != _spell(_strip(info)):
            raise Conflict(f"another session has the id {info.session_id}", param="session_id")
        if found is None:
            await self._sessions.listing.add(info)
        args: list[Argument] = [_pack(info), repr(info.created_at), start]
        for call_id, record in records:
            args += (call_id, digest(record), record)
        parts = (keys.state(info.session_id), keys.calls(info.session_id), keys.index(info.session_id))
        outcome, detail = await self._redis.run(Script.read("restore", "_session"), parts, args)
        if outcome == b"gap":
            raise Conflict(f"session {info.session_id} has {detail} calls: none can be added at {start}", param="start")
        if outcome == b"conflict":
            raise Conflict(f"session {info.session_id} exists already, and {detail.decode()}")

    async def finish(
        self,
        state: SessionState,
        delivered: Sequence[str],
        intents: Sequence[Intent],
        leased_at: float | None,
        log: str = "",
    ) -> bool:
        """Gives the session its state, marks and log; False when it had them before. `leased_at` fixes its reward.

        Raises `Conflict` when a closed session of that id differs, or records are missing.
        """
        session_id = state.info.session_id
        packed_log = log.encode("utf-8", "replace")
        args: list[Argument] = [_pack(state.info), state.calls, packed_log, *_fields(state, leased_at), "", *delivered, ""]
        for intent in intents:
            args += (intent.call_id, pack_versioned(intent))
        outcome, *detail = await self._redis.run(Script.read("restored", "_session"), keys.session(session_id), args)
        if outcome == b"conflict":
            raise Conflict(f"session {session_id} cannot be finished: {detail[0].decode()}")
        if outcome == b"missing":
            raise NotFound(f"there is no session {session_id}")
        if outcome == b"closed":
            await self._compare(state, delivered, intents)
        return bool(outcome == b"ok")

    async def _compare(self, state: SessionState, delivered: Sequence[str], intents: Sequence[Intent]) -> None:
        session_id = state.info.session_id
        found = await self._sessions.load(session_id)
        if found is None:
            raise NotFound(f"there is no session {session_id}")
        if _spell(_normalize(found)) != _spell(_normalize(state)):
            raise Conflict(f"session {session_id} exists already with another state")
        if await self._sessions.load_delivered(session_id) != set(delivered):
            raise Conflict(f"session {session_id} exists already, and other replies of it were delivered")
        if await self._sessions.load_intents(session_id) != sorted(intents, key=lambda intent: intent.started_at):
            raise Conflict(f"session {session_id} exists already, and other calls of it have no result")


def _fields(state: SessionState, leased_at: float | None) -> list[Argument]:
    """Names and values of the session's hash, spelled as in `close` and `set_reward`."""
    fields: dict[str, Argument | None] = {
        "status": state.status,
        "updated_at": repr(state.updated_at),
        "per_call": pack(state.per_call),
        "per_branch": pack(state.per_branch),
        "reward_metadata": pack(state.reward_metadata),
        "reward": None if state.reward is None else repr(float(state.reward)),
        "error": state.error,
        "flag": state.flag,
        "note": state.note,
        "closed_at": None if state.closed_at is None else repr(state.closed_at),
        "leased": None if leased_at is None else repr(leased_at),
        "unserved": None if state.unserved is None else pack_versioned(state.unserved),
        "scored": repr(state.scored) if state.scored else None,
    }
    return [part for name, value in fields.items() if value is not None for part in (name, value)]


def _pack(info: SessionInfo) -> bytes:
    return pack_info(_strip(info))


def _strip(info: SessionInfo) -> SessionInfo:
    """What an archive holds of it: without the key, and without what is not shown. The importing service decides on groups, and its calls
    have their roles."""
    needs = tuple(name for name in info.needs if name != "roles")
    return SessionInfo(info.session_id, NO_KEY, info.created_at, **{name: getattr(info, name) for name in SHOWN}, needs=needs)


def _normalize(state: SessionState) -> SessionState:
    """Without what may differ: the same reward may have been set again, and what is restored was never scored or judged here."""
    plain = replace(state, scored=False, verdicts={})
    return replace(
        plain, info=replace(_strip(plain.info), needs=()), updated_at=0.0, unserved=None, replayed_at=None, accounting=None
    )
