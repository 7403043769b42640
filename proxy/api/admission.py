"""Admission: which sessions may open while trainers lag behind.

With `undelivered_groups` set, a session that would begin one group too many is refused until a group is leased. With
`staleness` set, a session whose group would be too stale by the time it is leased is refused until newer weights arrive or
fewer groups wait. Sessions that join an existing group are always admitted: otherwise the group could never become complete. All counts
live in the store, so every process decides alike.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from proxy.api.closing import SWEEP_AGE_SECONDS, build_group_defaults, group_ref
from proxy.errors import Backpressure
from proxy.services import Services
from proxy.store.delivery import Admission, Freshness
from proxy.store.keys import StoredValueError
from proxy.store.states import SessionInfo

RETRY_SECONDS = 0.5
"""How often a held session asks for admission again."""
DEFAULT_POLICY = ""


async def open_session(services: Services, info: SessionInfo, hung_up: Callable[[], Awaitable[bool]]) -> bool:
    """False if the id is taken. Holds the session for at most `hold_seconds`, then raises `Backpressure`. A session that is not
    trained is admitted at once."""
    limits = services.settings.admission
    if not info.trained or (not limits.undelivered_groups and limits.staleness is None):
        return await services.sessions.create(info)
    admission = await _wait_for_admission(services, info, hung_up)
    created = False
    try:
        created = await services.sessions.create(info)
    finally:
        if admission.noted and not created:
            await asyncio.shield(services.delivery.dismiss(info.session_id))
    return created


async def reclaim_places(services: Services, *, older_than_seconds: float = SWEEP_AGE_SECONDS, limit: int = 100) -> int:
    """Free the places of sessions whose process died between admitting and creating them. Returns the number of places. Raises
    `StoreUnavailable`."""
    reclaimed = 0
    for session_id in await services.delivery.find_unconfirmed(await services.clock.now() - older_than_seconds, limit):
        if await _exists(services, session_id):
            await services.delivery.confirm(session_id)
        else:
            await services.delivery.dismiss(session_id)
            reclaimed += 1
    return reclaimed


async def estimate_versions_ahead(services: Services) -> int | None:
    """How many versions behind a group begun now would probably be when it is leased. None without a limit on staleness."""
    if (taken := services.settings.admission.groups_per_version) is None:
        return None
    versions = await load_current_versions(services)
    return await services.delivery.count_versions_ahead(versions.pop(DEFAULT_POLICY), taken, versions)


async def load_current_versions(services: Services) -> dict[str, int]:
    """The current weight version of each policy, the default one first: every policy that has engines, or rows in undelivered groups."""
    rows_of, engines_of = await services.delivery.list_policies(), services.pool.policy_names
    names = [DEFAULT_POLICY, *sorted({*rows_of, *engines_of} - {DEFAULT_POLICY})]
    states = await asyncio.gather(*(services.weights.current(name) for name in names))
    return {name: state.version for name, state in zip(names, states, strict=True)}


async def _exists(services: Services, session_id: str) -> bool:
    try:
        return await services.sessions.load(session_id) is not None
    except StoredValueError:
        # It exists but is unreadable; raising here would keep the remaining places from being reclaimed.
        return True


async def _wait_for_admission(services: Services, info: SessionInfo, hung_up: Callable[[], Awaitable[bool]]) -> Admission:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + services.settings.admission.hold_seconds
    admission = await _ask(services, info, again=False)
    while not admission.granted:
        left = deadline - loop.time()
        if left > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(services.stopping.wait(), min(left, RETRY_SECONDS))
        # Admitting a caller that has hung up would begin a group that never fills.
        if left <= 0 or services.stopping.is_set() or await hung_up():
            services.metrics.count_held_back()
            raise Backpressure(_explain_refusal(services, admission))
        admission = await _ask(services, info, again=True)
    return admission


async def _ask(services: Services, info: SessionInfo, *, again: bool) -> Admission:
    limits, freshness = services.settings.admission, None
    if limits.staleness is not None and limits.groups_per_version is not None:
        versions = await load_current_versions(services)
        version = versions.pop(DEFAULT_POLICY)
        freshness = Freshness(version, limits.staleness, limits.groups_per_version, versions)
    group, defaults, now = group_ref(info), build_group_defaults(services.settings), await services.clock.now()
    return await services.delivery.admit(
        group, info.session_id, limits.undelivered_groups, defaults, now, freshness, again=again
    )


def _explain_refusal(services: Services, admission: Admission) -> str:
    limits, ahead = services.settings.admission, admission.versions_ahead
    if (limit := limits.undelivered_groups) and admission.undelivered >= limit:
        return f"{admission.undelivered} groups wait for a trainer, the limit is {limit}: retry after a group is leased"
    return (
        f"a group begun now would probably be {ahead} versions behind when it is leased, the limit is "
        f"{limits.staleness}: retry when there are newer weights"
    )
