"""Which sessions may be opened while the trainers are behind.

With `max_undelivered_groups` set, the session that would begin one group too many is refused until a group was leased; with
`admission_staleness`, the one whose group would be too old by the time it is leased, until there are newer weights or fewer groups.
Sessions of a group that is there already are let in, or it would never be whole. All that is counted lies in the store, so that all
processes decide alike.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from proxy.api.closing import SWEEP_AGE_SECONDS, group_ref, policy_of
from proxy.api.version_lines import DEFAULT, current_versions
from proxy.errors import Backpressure
from proxy.services import Services
from proxy.store.delivery_store import Admission, Freshness
from proxy.store.packing import StoredValueError
from proxy.store.session_store import SessionInfo

LOOK_SECONDS = 0.5
"""How often a session that is held asks again."""


async def open_session(services: Services, info: SessionInfo, hung_up: Callable[[], Awaitable[bool]]) -> bool:
    """False when another session has its id. Held for at most `admission_hold_seconds`, then raises `Backpressure`; one that no trainer
    gets is let in at once."""
    settings = services.settings
    if not info.trained or (not settings.max_undelivered_groups and settings.admission_staleness is None):
        return await services.sessions.create(info)
    admission = await _admitted(services, info, hung_up)
    created = False
    try:
        created = await services.sessions.create(info)
    finally:
        if admission.noted and not created:
            await asyncio.shield(services.delivery.dismiss(info.session_id))
    return created


async def reclaim_places(services: Services, *, older_than_seconds: float = SWEEP_AGE_SECONDS, limit: int = 100) -> int:
    """Free what processes hold that died between letting a session in and opening it; how many places. Raises `StoreUnavailable`."""
    reclaimed = 0
    for session_id in await services.delivery.unseen(await services.clock.now() - older_than_seconds, limit):
        if await _is_there(services, session_id):
            await services.delivery.seen(session_id)
        else:
            await services.delivery.dismiss(session_id)
            reclaimed += 1
    return reclaimed


async def _is_there(services: Services, session_id: str) -> bool:
    try:
        return await services.sessions.load(session_id) is not None
    except StoredValueError:
        # Unreadable is not absent, and must not keep the others from being looked at.
        return True


async def versions_ahead(services: Services) -> int | None:
    """How many versions will probably have come when a group that is begun now is leased; None unless that is limited."""
    per_version = services.settings.groups_per_version
    if services.settings.admission_staleness is None or per_version is None:
        return None
    versions = await current_versions(services)
    return await services.delivery.versions_ahead(versions.pop(DEFAULT), per_version, versions)


async def _admitted(services: Services, info: SessionInfo, hung_up: Callable[[], Awaitable[bool]]) -> Admission:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + services.settings.admission_hold_seconds
    admission = await _ask(services, info, again=False)
    while not admission.granted:
        left = deadline - loop.time()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(services.stopping.wait(), min(left, LOOK_SECONDS))
        # Whoever has hung up would leave an opened group behind that nobody fills.
        if left <= 0 or services.stopping.is_set() or await hung_up():
            services.metrics.held_back()
            raise Backpressure(_why(services, admission))
        admission = await _ask(services, info, again=True)
    return admission


async def _ask(services: Services, info: SessionInfo, *, again: bool) -> Admission:
    settings, freshness = services.settings, None
    if settings.admission_staleness is not None and settings.groups_per_version is not None:
        versions = await current_versions(services)
        version = versions.pop(DEFAULT)
        freshness = Freshness(version, settings.admission_staleness, settings.groups_per_version, versions)
    group, limit, policy = group_ref(info), settings.max_undelivered_groups, policy_of(settings)
    return await services.delivery.admit(
        group, info.session_id, limit, policy, await services.clock.now(), freshness, again=again
    )


def _why(services: Services, admission: Admission) -> str:
    limit, ahead = services.settings.max_undelivered_groups, admission.versions_ahead
    if limit and admission.undelivered >= limit:
        return f"{admission.undelivered} groups wait for a trainer, of at most {limit}: try again when one was leased"
    return (
        f"a group begun now would probably be {ahead} versions behind when it is leased, of at most "
        f"{services.settings.admission_staleness}: try again when there are newer weights"
    )
