"""Retention: closed sessions leave the store when they are old, or when the store is too large, oldest first.

What may go is closed, and no trainer will be given it any more: its group was acknowledged or dropped, or it is in none and none
waits for it. An open session, one that is leased, or one whose group may still be delivered (dead letters too) stays, whatever its
age. With an archive, a session is deleted once the archive holds it. One process at a time does this, under a lock in the store
and one on the archive's folder; one that dies between the two steps leaves sessions that are in both, and the next one only
deletes them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from proxy import rows
from proxy.api.archive import intents_as_wire
from proxy.api.closing import CLOSED, delete_session
from proxy.api.sessions import session_as_wire
from proxy.archive.folder import ArchiveError, ArchiveWriter, FolderBusy, KnownSessions
from proxy.archive.tables import ArchivedSession
from proxy.errors import Conflict, NotFound, StoreUnavailable
from proxy.services import Services
from proxy.store import keys
from proxy.store.service import RedisRetentionStore
from proxy.store.sessions import SessionState
from reconstruct.errors import ReconstructError
from reconstruct.trajectory import accounting_as_wire, as_wire

log = logging.getLogger(__name__)

LOCK_SECONDS = 120.0
LOOKED_AT = 64
"""Sessions looked at in one go."""
CLEARED_AT_ONCE = 512
"""About so many sessions are archived before they are deleted."""


@dataclass(slots=True)
class Cleared:
    """What one round did."""

    archived: int = 0
    deleted: int = 0
    ids: list[str] = field(default_factory=list)


class Retention:
    def __init__(self, services: Services, store: RedisRetentionStore) -> None:
        self._services = services
        self._settings = services.settings
        self._store = store
        self._owner = uuid.uuid4().hex
        self._known = KnownSessions()

    async def run(self) -> None:
        """Look every `retain_check_seconds`, until cancelled; returns at once when nothing limits what is kept."""
        if self._settings.retain_seconds is None and self._settings.retain_bytes is None:
            return
        self._services.metrics.swept("retention")
        while True:
            await asyncio.sleep(self._settings.retain_check_seconds)
            try:
                await self.once()
                self._services.metrics.swept("retention")
            except StoreUnavailable as error:
                log.warning("retention waits: %s", error.message)
            except FolderBusy as error:
                log.info("retention waits: %s", error)
            except (ArchiveError, OSError) as error:
                log.error("nothing is deleted, because the archive cannot be written: %s", error)
            except Exception:
                # It would end for good, and the store would grow unseen.
                log.exception("retention failed and is tried again")

    async def once(self) -> Cleared:
        """Archive and delete what is due; nothing when another process is at it. Raises StoreUnavailable, ArchiveError, OSError."""
        cleared = Cleared()
        if not await self._store.lock(self._owner, LOCK_SECONDS):
            return cleared
        try:
            async for batch in self._due():
                if not await self._clear(batch, cleared):
                    break
        finally:
            await self._store.unlock(self._owner)
        if cleared.deleted:
            log.info("retention: %d sessions archived, %d deleted", cleared.archived, cleared.deleted)
        return cleared

    async def _due(self) -> AsyncIterator[list[SessionState]]:
        """Sessions that may go and should, oldest first, a batch at a time."""
        excess = await self._excess_bytes()
        closed_before = await self._services.clock.now() - (self._settings.retain_seconds or float("inf"))
        cursor, batch = None, []
        while members := await self._store.oldest(cursor, LOOKED_AT):
            cursor = members[-1]
            for state in await self._free(members):
                assert state.closed_at is not None
                if excess <= 0 and state.closed_at >= closed_before:
                    continue
                excess -= await self._store.session_bytes(state.info.session_id) if excess > 0 else 0
                batch.append(state)
            if len(batch) >= CLEARED_AT_ONCE:
                yield batch
                batch = []
            if excess <= 0 and keys.listed_at(cursor) >= closed_before:
                break
        if batch:
            yield batch

    async def _excess_bytes(self) -> int:
        limit = self._settings.retain_bytes
        return 0 if limit is None else await self._store.used_bytes() - limit

    async def _free(self, members: list[str]) -> list[SessionState]:
        """Those of the listing's `members` that are closed and that no trainer will be given."""
        states = await asyncio.gather(*(self._services.sessions.load(keys.listed(member)) for member in members))
        closed = [
            state
            for state, member in zip(states, members, strict=True)
            if state and state.status in CLOSED and member == keys.listing_member(state.info.created_at, state.info.session_id)
        ]
        return [state for state, free in zip(closed, await self._may_go(closed), strict=True) if free]

    async def _may_go(self, states: list[SessionState]) -> list[bool]:
        if not states:
            return []
        standings = await self._store.standings([state.info.session_id for state in states])
        return [await self._is_free(state, standing) for state, standing in zip(states, standings, strict=True)]

    async def _is_free(self, state: SessionState, standing: str) -> bool:
        """Whether no trainer will be given the closed session. One without a group that is unusable, or whose reward never
        came, waits for nobody; a group that has a name may still be waiting for its others, or for it."""
        if standing in ("acked", "dropped"):
            return True
        if standing not in ("none", "filling"):
            return False
        # In no group, but given away before: it came back from an archive.
        came_back = standing == "none" and await self._store.is_leased(state.info.session_id)
        return state.info.group_id is None or came_back

    async def _clear(self, batch: list[SessionState], cleared: Cleared) -> bool:
        """Archive and delete these; False when the lock was lost on the way, and nothing more may be done."""
        fixed = await self._fixed(batch)
        folder = self._settings.archive_dir
        if folder is not None:
            writer = ArchiveWriter(folder, format=self._settings.archive_format, known=self._known)
            await asyncio.to_thread(writer.__enter__)
            try:
                if not await self._archive(writer, fixed, cleared):
                    return False
            finally:
                writer.__exit__(None, None, None)
        for state in fixed:
            if not await self._held():
                return False
            await self._delete(state, cleared)
        return True

    async def _held(self) -> bool:
        """Renews the lock; False when it ran out and another process has it."""
        return await self._store.lock(self._owner, LOCK_SECONDS)

    async def _fixed(self, batch: list[SessionState]) -> list[SessionState]:
        """Those of the batch that may still go now that their reward cannot change any more, as they stand."""
        marked = await asyncio.gather(*(self._services.sessions.mark_leased(state.info.session_id) for state in batch))
        standing = [state for state in marked if state is not None and state.status in CLOSED]
        return [state for state, free in zip(standing, await self._may_go(standing), strict=True) if free]

    async def _archive(self, writer: ArchiveWriter, states: list[SessionState], cleared: Cleared) -> bool:
        """The sessions are in the archive; False when another process may be writing them by now."""
        for state in states:
            if writer.holds((state.info.session_id, state.info.created_at)):
                continue
            writer.add(await collect(self._services, state))
            if not await self._held():
                return False
            if writer.full:
                await self._flush(writer, cleared)
        await self._flush(writer, cleared)
        return True

    async def _flush(self, writer: ArchiveWriter, cleared: Cleared) -> None:
        """Waits for the part also when the service stops: the folder must not be given to another writer before."""
        writing = asyncio.create_task(asyncio.to_thread(writer.flush))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise
        cleared.archived += writing.result()
        self._services.metrics.archived(writing.result())

    async def _delete(self, state: SessionState, cleared: Cleared) -> None:
        session_id = state.info.session_id
        try:
            await delete_session(self._services, session_id)
        except (NotFound, Conflict) as error:
            log.info("session %s stays: %s", session_id, error.message)
            return
        self._services.metrics.deleted()
        cleared.deleted += 1
        cleared.ids.append(session_id)


async def collect(services: Services, state: SessionState, builder: str = "merged") -> ArchivedSession:
    """The closed session, whole. One whose records contradict each other has no trajectories and says why."""
    session_id = state.info.session_id
    records, delivered, intents = await asyncio.gather(
        services.archive.named_records(session_id, 0, -1),
        services.sessions.delivered(session_id),
        services.sessions.intents(session_id),
    )
    whole = ArchivedSession(session_as_wire(state), records, sorted(delivered), intents_as_wire(intents))
    plain = [record for _, record in records]
    try:
        built = await asyncio.to_thread(rows.build_rows, services.settings, state, plain, intents, delivered, builder)
    except ReconstructError as error:
        log.error("session %s has no usable trajectories: %s", session_id, error)
        return ArchivedSession(whole.state, whole.records, whole.delivered, whole.intents, problem=str(error))
    trajectories = [as_wire(row, arrays="bytes") for row in built.rows]
    accounting = accounting_as_wire(built.accounting)
    return ArchivedSession(whole.state, whole.records, whole.delivered, whole.intents, trajectories, accounting)
