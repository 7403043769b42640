"""The end of a runtime, which is brought about whatever happens to the rollout meanwhile."""

from __future__ import annotations

import asyncio
import logging

from rollout.runtimes.base import Runtime

log = logging.getLogger(__name__)


async def removed(runtime: Runtime) -> None:
    """Returns when the runtime is gone; a cancellation is passed on only then. One that cannot be removed is logged and left to the
    sweep of the node's next start: what the rollout came to stays as it is."""
    stopping = asyncio.create_task(_stopped(runtime))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await asyncio.wait([stopping])
        raise


async def _stopped(runtime: Runtime) -> None:
    try:
        await runtime.stop()
    except Exception:
        log.exception("a runtime could not be removed")
