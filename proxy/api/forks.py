"""Opening forks: find the session to replay, check the pivot, and keep the session as long as forks of it exist.

An archived session is restored to the store first. It is never delivered again, and retention takes it out once its forks are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from contract.sessions import Fork, Unserved
from proxy.api import closing
from proxy.archive.folder import MANIFEST, ArchiveReader
from proxy.archive.tables import ArchivedSession
from proxy.call.recording import RecordedRequest, Recording
from proxy.errors import EngineUnavailable, NotFound, RequestError
from proxy.services import Services
from proxy.store.states import Intent, SessionState

ReadState = Callable[[Mapping[str, Any]], SessionState]
"""The state of a session from its wire form."""


async def check(services: Services, origin_id: str, until: str | int | None) -> None:
    """Raises what `prepare` would, but for the id of the new session; keeps and restores nothing."""
    origin = await services.sessions.load(origin_id)
    if origin is None or origin.status == "restoring":
        archived = await _find_archived(services, origin_id)
        records = [record for _, record in archived.records]
        fork = Fork(origin_id, archived.state["created_at"], len(records))
        stored = [(b"", b"")] * len(records)
        recording = await asyncio.to_thread(Recording, fork, records, stored, archived.delivered)
    else:
        recording = await services.cache.load_recording(Fork(origin_id, origin.info.created_at, origin.calls))
    await _choose_pivot(services, recording, until)


async def prepare(services: Services, session_id: str, origin_id: str, until: str | int | None, read_state: ReadState) -> Fork:
    """What the new session `session_id` replays; its origin is kept for it from here on. Raises NotFound for a session or call that there
    is not, Conflict for one whose records are gone, RequestError for a pivot that none can sample from."""
    if origin_id == session_id:
        raise RequestError(f"session '{session_id}' cannot replay itself", param="replay.session_id")
    origin = await services.sessions.load(origin_id)
    if origin is None or origin.status == "restoring":
        origin = await _restore(services, origin_id, session_id, read_state)
    fork = Fork(origin_id, origin.info.created_at, origin.calls)
    recording = await services.cache.load_recording(fork)
    if session_id in recording.sessions:
        raise RequestError(
            f"session '{origin_id}' replays calls of a session '{session_id}': they could not be told from the new one's; "
            "choose another session_id",
            param="session_id",
        )
    pivot = await _choose_pivot(services, recording, until)
    fork = replace(fork, until=None if pivot is None else pivot.first.call_id)
    if not await services.sessions.pin(session_id, fork, await services.clock.now()):
        raise NotFound(f"session '{origin_id}' was deleted meanwhile", param="replay.session_id")
    return fork


async def keep_origin(services: Services, session_id: str, fork: Fork) -> None:
    """Keeps the origin of a fork that exists now, however long it waited for its admission. Raises NotFound, and the fork is gone, if the
    origin was deleted meanwhile."""
    if not await services.sessions.pin(session_id, fork, await services.clock.now()):
        await closing.delete_session(services, session_id)
        raise NotFound(f"session '{fork.session_id}' was deleted meanwhile", param="replay.session_id")


async def _choose_pivot(services: Services, recording: Recording, until: str | int | None) -> RecordedRequest | None:
    """The first request that is not replayed; None: all are. Raises NotFound and RequestError where none can sample from there."""
    pivot = await _find_pivot(services, recording, until)
    sampler = pivot or (recording.requests[-1] if recording.requests else None)
    if sampler is not None:
        _check_model(services, recording, sampler)
    return pivot


async def _find_pivot(services: Services, recording: Recording, until: str | int | None) -> RecordedRequest | None:
    origin_id, requests = recording.fork.session_id, recording.requests
    if isinstance(until, str):
        pivot = next((each for each in requests if any(call.call_id == until for call in each.calls)), None)
        if pivot is None and until not in recording.refused:
            raise await _explain_missing(services, origin_id, until)
    elif until is not None and until > len(requests):
        raise RequestError(
            f"session '{origin_id}' has {len(requests)} recorded requests that can be replayed, not {until}",
            param="replay.until",
        )
    else:
        pivot = None if until is None or until == len(requests) else requests[until]
    call_id = until if isinstance(until, str) else "" if pivot is None else pivot.first.call_id
    if reason := recording.refused.get(call_id):
        raise RequestError(
            f"call '{call_id}' of session '{origin_id}' is quarantined ({reason}): the model cannot sample from there; choose another",
            param="replay.until",
        )
    return pivot


async def _explain_missing(services: Services, origin_id: str, call_id: str) -> RequestError:
    intents = await services.sessions.load_intents(origin_id)
    if call_id not in {intent.call_id for intent in intents}:
        return NotFound(f"session '{origin_id}' has no call '{call_id}'", param="replay.until")
    under_way = call_id in await services.peers.in_flight(intents)
    state = "still in flight" if under_way else "dangling: its process died, and its request is not recorded"
    return RequestError(f"call '{call_id}' of session '{origin_id}' is {state}", param="replay.until")


def _check_model(services: Services, recording: Recording, sampler: RecordedRequest) -> None:
    """Raise RequestError if the model that is to sample from the pivot is not served, or by another policy than recorded."""
    origin_id, model = recording.fork.session_id, recording.find_model(sampler.first)
    # Engines that were not reached yet may turn out to serve it.
    with contextlib.suppress(EngineUnavailable):
        try:
            policy = services.pool.find_policy(model)
        except NotFound as error:
            raise RequestError(
                f"session '{origin_id}' was sampled by the model '{model}', which no engine serves: {error.message}",
                param="replay.session_id",
            ) from error
        if policy != sampler.first.policy:
            raise RequestError(
                f"session '{origin_id}' was sampled by the policy '{sampler.first.policy}', but '{model}' is now of '{policy}'",
                param="replay.session_id",
            )


async def _restore(services: Services, session_id: str, fork_id: str, read_state: ReadState) -> SessionState:
    """The session from the service's archive, kept for the fork before retention can see it. May be repeated, also at the same time.
    Raises NotFound."""
    found = await _find_archived(services, session_id)
    state = replace(read_state(found.state), unserved=msgspec.convert(found.unserved, Unserved | None))
    intents = msgspec.convert(list(found.intents), list[Intent])
    now = await services.clock.now()
    await services.archive.restore(state.info, 0, found.records)
    if found.media:
        await services.media.restore(session_id, state.info.created_at, found.media)
    await services.sessions.pin(fork_id, Fork(session_id, state.info.created_at, state.calls), now)
    await services.archive.finish(state, found.delivered, intents, now, found.log)
    return await closing.load_session(services, session_id)


async def _find_archived(services: Services, session_id: str) -> ArchivedSession:
    """Raises NotFound."""
    folder = services.settings.retention.archive_dir
    found = await asyncio.to_thread(_read_archived, folder, session_id) if folder is not None else None
    if found is None:
        where = "in the store" if folder is None else "in the store or the archive"
        raise NotFound(
            f"there is no session '{session_id}' {where}, or it is being imported; `verbatim import` restores one that was exported",
            param="replay.session_id",
        )
    return found


def _read_archived(folder: Path, session_id: str) -> ArchivedSession | None:
    return ArchiveReader(folder).find(session_id) if (folder / MANIFEST).exists() else None
