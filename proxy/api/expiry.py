"""Sessions that nobody uses any more are closed as timeout, by one process each, so that their groups need not wait for ever."""

from __future__ import annotations

import logging

from proxy.api.closing import CLOSED, close_session
from proxy.errors import StoreUnavailable, VerbatimError
from proxy.services import Services
from proxy.settings import Settings

log = logging.getLogger(__name__)

LEFT_CLOSING_SECONDS = 60.0
"""A session that is closing for so long was left by whoever began to close it: what finishes announced closes did not."""
SWEEP_SECONDS = 10.0


def sweep_seconds(settings: Settings) -> float:
    """How often to look: so that a short idle time is kept to."""
    idle_seconds = settings.session_idle_seconds
    return min(SWEEP_SECONDS, max(0.5, idle_seconds / 2)) if idle_seconds else SWEEP_SECONDS


async def expire_idle(services: Services, limit: int = 100) -> int:
    """Close sessions that were idle for `session_idle_seconds`; how many. Raises `StoreUnavailable`."""
    idle_seconds = services.settings.session_idle_seconds
    if not idle_seconds:
        return 0
    expired = 0
    for session_id in await services.sessions.unclosed(await services.clock.now() - idle_seconds, limit):
        try:
            expired += await _expire(services, session_id, idle_seconds)
        except StoreUnavailable:
            raise
        except VerbatimError as error:
            log.warning("session %s: somebody else closed it: %s", session_id, error.message)
    return expired


async def _expire(services: Services, session_id: str, idle_seconds: float) -> bool:
    """Close the session if it is idle indeed; otherwise note since when it is not."""
    state = await services.sessions.load(session_id)
    if state is None or state.status in CLOSED:
        await services.sessions.seen(session_id, None)
        return False
    now = await services.clock.now()
    intents = await services.sessions.intents(session_id)
    active_at = now if await services.peers.in_flight(intents) else state.updated_at
    idle_since = now - idle_seconds
    if active_at > idle_since:
        await services.sessions.seen(session_id, active_at)
        return False
    closing_since = min(idle_since, now - LEFT_CLOSING_SECONDS)
    if not await services.sessions.expire(session_id, idle_since, closing_since, len(intents)):
        return False
    log.info("session %s is closed: it was idle for %g s", session_id, idle_seconds)
    await close_session(services, session_id, "timeout", None, f"no call for {idle_seconds:g} seconds")
    services.metrics.expired()
    return True
