"""Which sessions may be opened while the trainers are behind.

With `max_undelivered_groups` set, the session that would begin one group too many is refused until a group was leased. Sessions
of a group that is there already are let in, or it would never be whole.
"""

from __future__ import annotations

import asyncio
import time

from proxy.api.closing import group_ref, policy_of
from proxy.errors import Backpressure
from proxy.services import Services
from proxy.store.base import SessionInfo


async def open_session(services: Services, info: SessionInfo) -> bool:
    """False when another session has its id. Raises `Backpressure`."""
    limit = services.settings.max_undelivered_groups
    if not limit:
        return await services.sessions.create(info)
    policy = policy_of(services.settings)
    admission = await services.delivery.admit(group_ref(info), info.session_id, limit, policy, time.time())
    if not admission.granted:
        services.metrics.held_back()
        raise Backpressure(
            f"{admission.undelivered} groups wait for a trainer, of at most {limit}: try again when one was leased"
        )
    created = False
    try:
        created = await services.sessions.create(info)
    finally:
        if admission.noted and not created:
            await asyncio.shield(services.delivery.dismiss(info.session_id))
    return created
