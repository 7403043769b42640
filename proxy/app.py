"""`create_app`: wiring only. Store, pool, updater, trees and metrics are made here and handed to the two sides of the service.

The harness side is plain ASGI (`proxy.harness`), the control side FastAPI (`proxy.api`); the lifespan opens and closes what both
share. `settings.redis` must be set: an embedded server is started by whoever starts the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI

from proxy.api.closing import sweep
from proxy.api.control import control_router
from proxy.api.errors import install_error_handlers
from proxy.engine.pool import EnginePool
from proxy.engine.updates import WeightUpdater
from proxy.errors import StoreUnavailable
from proxy.harness import Harness
from proxy.inflight import Inflight
from proxy.metrics import Metrics
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.connection import StoreConnection
from proxy.store.delivery import RedisDeliveryStore
from proxy.store.sessions import RedisSessionStore
from proxy.store.weights import RedisWeightStore
from proxy.trees import SessionTrees

log = logging.getLogger(__name__)

SWEEP_SECONDS = 10.0


def create_app(settings: Settings) -> Harness:
    """The ASGI application of one process."""
    if settings.redis is None:
        raise ValueError("create_app needs settings.redis; start EmbeddedRedis first and put its URL there")
    store = StoreConnection(settings.redis)
    services = build_services(settings, store)
    control = FastAPI(title="Verbatim")
    harness = Harness(services, control)
    control.router.lifespan_context = lambda _: _lifespan(services, store, harness)
    control.state.services = services
    install_error_handlers(control)
    control.include_router(control_router())
    return harness


def build_services(settings: Settings, store: StoreConnection) -> Services:
    """What one process holds, not yet started."""
    pool = EnginePool(settings)
    sessions, weights = RedisSessionStore(store), RedisWeightStore(store)
    services = Services(
        settings=settings,
        sessions=sessions,
        delivery=RedisDeliveryStore(store),
        weights=weights,
        pool=pool,
        updater=WeightUpdater(pool, weights, settings),
        trees=SessionTrees(sessions, settings.session_cache, settings.volatile_lines),
        inflight=Inflight(),
        metrics=Metrics(),
    )
    services.metrics.watch(lambda: len(services.inflight), lambda: _version(pool))
    return services


def _version(pool: EnginePool) -> float:
    return max((replica.weight_version or 0 for replica in pool.replicas), default=0)


@contextlib.asynccontextmanager
async def _lifespan(services: Services, store: StoreConnection, harness: Harness) -> AsyncIterator[None]:
    await services.pool.start()
    sweeper = asyncio.create_task(_sweep_forever(services))
    try:
        yield
    finally:
        sweeper.cancel()
        # The server has waited drain_seconds for answers to go out; what is still under way is cut and recorded.
        await services.inflight.drain(0)
        await harness.settle()
        await services.updater.stop()
        await services.pool.stop()
        await store.close()


async def _sweep_forever(services: Services) -> None:
    """Finish what processes that died left half closed."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        try:
            await sweep(services)
        except StoreUnavailable as error:
            log.warning("the sweep of half-closed sessions waits: %s", error.message)
