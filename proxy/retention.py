"""Retention: closed sessions leave the store, oldest first, when they are old or the store is too large.

A session may go when it is closed and no trainer will get it any more: its group was acknowledged or dropped, or it is in no group
and none waits for it. Open and leased sessions stay whatever their age, and so do those whose group may still be delivered, dead
letters included. With an archive configured, a session is deleted once the archive holds it. One process at a time clears, under a
lock in the store and one on the archive's folder. If it dies between archiving and deleting, the next one only deletes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module

from contract.attempts import ENDED
from proxy import rows
from proxy.api.archive import intents_as_wire, list_images
from proxy.api.closing import delete_session
from proxy.api.sessions import session_as_wire, unserved_as_wire
from proxy.archive.folder import ArchiveError, ArchiveWriter, FolderBusy, KnownSessions
from proxy.archive.tables import ArchivedSession
from proxy.errors import Conflict, NotFound, StoreUnavailable
from proxy.services import Services
from proxy.store import keys
from proxy.store.service import RetentionStore
from proxy.store.states import SessionState
from reconstruct.errors import ReconstructError
from reconstruct.trajectory import encode_accounting, encode_row

log = logging.getLogger(__name__)

LEAST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 900.0
"""Between two looks, a tenth of `seconds` within these. Each look that finds something writes a part of the archive, and parts
should be few."""
LOCK_SECONDS = 120.0
LOOKED_AT = 64
"""Sessions loaded at a time."""
CLEARED_AT_ONCE = 512
"""About how many sessions are archived before they are deleted."""
MAX_NAMED = 5
"""Most sessions that one log line names."""


@dataclass(slots=True)
class Cleared:
    """The outcome of one round."""

    archived: int = 0
    deleted: int = 0
    ids: list[str] = field(default_factory=list)


class Retention:
    def __init__(self, services: Services, store: RetentionStore) -> None:
        self._services = services
        self._settings = services.settings
        self._store = store
        self._owner = uuid.uuid4().hex
        self._known = KnownSessions()
        if self._settings.retention.archive_dir is not None:
            # Before the first call: loading the library while calls are served stopped every one of them for 220 ms.
            import_module("pyarrow.parquet")

    async def run(self) -> None:
        """Clears again and again until cancelled; returns at once when no limit is set."""
        if self._settings.retention.seconds is None and self._settings.retention.bytes is None:
            return
        self._services.metrics.note_sweep("retention")
        pause = min(max(LEAST_PAUSE_SECONDS, (self._settings.retention.seconds or math.inf) / 10), LONGEST_PAUSE_SECONDS)
        while True:
            await asyncio.sleep(pause)
            try:
                await self.run_once()
                self._services.metrics.note_sweep("retention")
            except StoreUnavailable as error:
                log.warning("retention waits: %s", error.message)
            except FolderBusy as error:
                log.info("retention waits: %s", error)
            except (ArchiveError, OSError) as error:
                log.error("retention deletes nothing, because the archive cannot be written: %s", error)
            except Exception:
                # Otherwise retention would end for good, and the store would grow unnoticed.
                log.exception("retention failed and is retried")

    async def run_once(self) -> Cleared:
        """Archives and deletes due sessions; does nothing while another process does. Raises StoreUnavailable, ArchiveError, OSError."""
        cleared = Cleared()
        if not await self._store.lock(self._owner, LOCK_SECONDS):
            return cleared
        try:
            async for batch in self._find_due():
                if not await self._clear(batch, cleared):
                    break
        finally:
            await self._store.unlock(self._owner)
        if cleared.deleted:
            log.info("retention: %d sessions archived, %d deleted", cleared.archived, cleared.deleted)
        return cleared

    async def _find_due(self) -> AsyncIterator[list[SessionState]]:
        """Batches of sessions that may and should go, oldest first."""
        limit = self._settings.retention.bytes
        excess = 0 if limit is None else await self._store.measure_memory() - limit
        closed_before = await self._services.clock.now() - (self._settings.retention.seconds or float("inf"))
        cursor, batch = None, []
        while members := await self._store.list_oldest(cursor, LOOKED_AT):
            cursor = members[-1]
            for state in await self._load_free(members):
                is_old = state.closed_at is not None and state.closed_at < closed_before
                if excess <= 0 and not is_old:
                    continue
                excess -= await self._measure(state) if excess > 0 else 0
                batch.append(state)
            if len(batch) >= CLEARED_AT_ONCE:
                yield batch
                batch = []
            if excess <= 0 and keys.parse_member(cursor)[1] >= closed_before:
                break
        if batch:
            yield batch

    async def _measure(self, state: SessionState) -> int:
        """Bytes that go with the session, images that others have too among them."""
        images = await self._services.media.sizes(state.info.session_id, state.info.created_at)
        return await self._store.measure_session(state.info.session_id) + sum(images.values())

    async def _load_free(self, members: list[str]) -> list[SessionState]:
        """Those of the listing's `members` that are closed and that no trainer will get."""
        states = await asyncio.gather(*(self._services.sessions.load(keys.parse_member(member)[0]) for member in members))
        closed = [
            state
            for state, member in zip(states, members, strict=True)
            if state and state.status in ENDED and member == keys.listing_member(state.info.created_at, state.info.session_id)
        ]
        return await self._keep_free(closed)

    async def _keep_free(self, states: list[SessionState]) -> list[SessionState]:
        if not states:
            return []
        standings = await self._services.delivery.load_standings([state.info.session_id for state in states])
        return [state for state, standing in zip(states, standings, strict=True) if await self._is_free(state, standing)]

    async def _is_free(self, state: SessionState, standing: str) -> bool:
        """Whether no trainer will get the closed session, and no fork replays it. A session without a group id that is unusable, or whose
        reward never came, waits for no other; a named group may still wait for its other members, or for this one."""
        if await self._services.sessions.find_forks(state.info.session_id, await self._services.clock.now()):
            return False
        if standing in ("acked", "dropped"):
            return True
        if standing not in ("none", "filling"):
            return False
        # In no group, but leased before: it was restored from an archive.
        restored = standing == "none" and await self._services.sessions.is_leased(state.info.session_id)
        return state.info.group_id is None or restored

    async def _clear(self, batch: list[SessionState], cleared: Cleared) -> bool:
        """Archives and deletes the batch; False when the lock was lost meanwhile: then nothing more may be done."""
        states = await self._fix_rewards(batch)
        folder = self._settings.retention.archive_dir
        if folder is not None:
            writer = ArchiveWriter(folder, known=self._known)
            await asyncio.to_thread(writer.__enter__)
            try:
                if not await self._archive(writer, states, cleared):
                    return False
            finally:
                writer.__exit__(None, None, None)
            states = self._leave_outdated(writer, states)
        for state in states:
            if not await self._renew_lock():
                return False
            await self._delete(state, cleared)
        return True

    async def _renew_lock(self) -> bool:
        """False when it expired and another process holds it."""
        return await self._store.lock(self._owner, LOCK_SECONDS)

    async def _fix_rewards(self, batch: list[SessionState]) -> list[SessionState]:
        """Those of the batch that may still go once their reward can no longer change, as they stand then."""
        marked = await asyncio.gather(*(self._services.sessions.mark_leased(state.info.session_id) for state in batch))
        return await self._keep_free([state for state in marked if state is not None and state.status in ENDED])

    async def _archive(self, writer: ArchiveWriter, states: list[SessionState], cleared: Cleared) -> bool:
        """Writes the sessions to the archive; False when another process may be writing them by now."""
        for state in states:
            if writer.holds((state.info.session_id, state.info.created_at)):
                continue
            writer.add(await collect(self._services, state))
            if not await self._renew_lock():
                return False
            if writer.full:
                await self._flush(writer, cleared)
        await self._flush(writer, cleared)
        return True

    def _leave_outdated(self, writer: ArchiveWriter, states: list[SessionState]) -> list[SessionState]:
        """Those that the archive holds with the rewards and scores that they have. The others would lose theirs: `verbatim export` may
        have written them to the same folder before they were rewarded or scored."""
        outdated = [state.info.session_id for state in states if writer.is_outdated(session_as_wire(state))]
        if outdated:
            log.error(
                "retention keeps %d sessions, which %s holds with other rewards or scores: move that folder away, and they are archived "
                "anew (%s)",
                len(outdated),
                writer.folder,
                ", ".join(outdated[:MAX_NAMED]),
            )
        return [state for state in states if state.info.session_id not in outdated]

    async def _flush(self, writer: ArchiveWriter, cleared: Cleared) -> None:
        """Writes the waiting part to its end even when the service stops: no other writer may get the folder before."""
        writing = asyncio.create_task(asyncio.to_thread(writer.flush))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise
        cleared.archived += writing.result()
        self._services.metrics.count_archived(writing.result())

    async def _delete(self, state: SessionState, cleared: Cleared) -> None:
        session_id = state.info.session_id
        try:
            await delete_session(self._services, session_id)
        except (NotFound, Conflict) as error:
            log.info("retention keeps session %s: %s", session_id, error.message)
            return
        self._services.metrics.count_deleted()
        cleared.deleted += 1
        cleared.ids.append(session_id)


async def collect(services: Services, state: SessionState, builder: str = "merged") -> ArchivedSession:
    """The closed session with everything an archive holds. If its records contradict each other it has no trajectories, but a `problem`."""
    session_id = state.info.session_id
    records, delivered, intents, log_text = await asyncio.gather(
        services.archive.load_named_records(session_id, 0, -1),
        services.sessions.load_delivered(session_id),
        services.sessions.load_intents(session_id),
        services.sessions.load_log(session_id),
    )
    plain = [record for _, record in records]
    scores = await services.scores.load(session_id) if state.scored else None
    media = await services.media.load(await list_images(services, state.info, plain))
    whole = ArchivedSession(
        session_as_wire(state),
        records,
        sorted(delivered),
        intents_as_wire(intents),
        log=log_text,
        scores=await services.scores.load_packed(session_id) if state.scored else {},
        media=media,
        unserved=unserved_as_wire(state),
    )
    try:
        build = partial(rows.build_rows, services.settings, state, plain, intents, delivered, builder, scores=scores)
        built = await asyncio.to_thread(build)
    except ReconstructError as error:
        log.error("session %s has no usable trajectories: %s", session_id, error)
        return replace(whole, problem=str(error))
    trajectories = [encode_row(row, arrays="bytes") for row in built.rows]
    return replace(whole, trajectories=trajectories, accounting=encode_accounting(built.accounting))
