"""`create_app`: wiring only. Store, pool, updater, trees and metrics are made here and handed to the two sides of the service.

The harness side is plain ASGI (`proxy.call.door`), the control side FastAPI (`proxy.api`); the lifespan opens and closes what both
share. `settings.redis` must be set: an embedded server is started by whoever starts the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import cache

from fastapi import APIRouter, FastAPI

from proxy.api import archive, batches, engines, sessions, weights
from proxy.api.closing import expire_idle, policy_of, sweep, sweep_seconds
from proxy.api.description.catalogue import OPERATIONS
from proxy.api.description.operation import Operation
from proxy.api.openapi import description
from proxy.api.requests import install_error_handlers
from proxy.api.sessions import reclaim_places
from proxy.auth import Tokens
from proxy.call.door import Harness
from proxy.call.http import Application, BodyRoom, CallRate, CallSlots
from proxy.call.inflight import Inflight, Peers
from proxy.call.observe import harness_of
from proxy.call.tree import SessionTrees
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.pool.pool import EnginePool
from proxy.engine.weights.keeper import WeightMetrics
from proxy.engine.weights.push import WeightUpdater
from proxy.errors import StoreUnavailable
from proxy.metrics import Metrics
from proxy.retention import Retention
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.archive import RedisArchiveStore
from proxy.store.connection import StoreConnection
from proxy.store.delivery import RedisDeliveryStore
from proxy.store.service import RedisClock, RedisEngineStore, RedisPeerStore, RedisRetentionStore, RedisWeightStore
from proxy.store.sessions import RedisSessionStore
from proxy.ui.router import ui_router
from proxy.ui.shown import Ui

log = logging.getLogger(__name__)

ABOUT = (
    "Harnesses call a model under `/s/{session_id}/…` with the key of their session; trainers lease batches and push weights; whoever "
    "runs harnesses opens and closes sessions, or submits tasks. Bodies and answers are JSON. Errors of the control side are "
    '`{"error": {"code", "message", "param"?}}`, those of model calls have the shape of their dialect.'
)


@dataclass(frozen=True, slots=True)
class Addition:
    """What another package brings into the served app: routes of the control side, and what runs for as long as the app does."""

    router: APIRouter
    running: Callable[[], AbstractAsyncContextManager[None]]
    operations: Sequence[Operation] = ()
    """What the description of the service says of the routes."""


Adding = Callable[[Services, Application], Addition]
"""Makes one, of what the process holds and the control side itself."""


def create_app(settings: Settings, *adding: Adding) -> Harness:
    """The ASGI application of one process."""
    if settings.redis is None:
        raise ValueError("create_app needs settings.redis; start EmbeddedRedis first and put its URL there")
    store = StoreConnection.to(settings, settings.redis)
    services = build_services(settings, store)
    # No pages that load scripts from elsewhere and ask for a token.
    control = FastAPI(title="Verbatim", docs_url=None, redoc_url=None)
    harness = harness_of(services, control)
    additions = [add(services, control) for add in adding]
    control.router.lifespan_context = lambda _: _lifespan(services, store, harness, additions)
    control.state.services = services
    control.state.ui = Ui(services)
    install_error_handlers(control)
    for router in (control_router(), ui_router()):
        # As they are. To include a router builds each of its routes again, which would be half of the start of the app.
        control.routes.extend(router.routes)
    for addition in additions:
        control.include_router(addition.router)
    operations = [*OPERATIONS, *(operation for addition in additions for operation in addition.operations)]
    control.openapi = harness.description = cache(lambda: description(control, operations, ABOUT))  # type: ignore[method-assign]
    return harness


def build_services(settings: Settings, store: StoreConnection) -> Services:
    """What one process holds, not yet started."""
    engines, metrics = RedisEngineStore(store), Metrics()
    pool = EnginePool(settings, engines, observer=metrics)
    process, inflight = uuid.uuid4().hex, Inflight()
    sessions, weights = RedisSessionStore(store, process), RedisWeightStore(store)
    services = Services(
        settings=settings,
        tokens=Tokens(settings.given_tokens),
        slots=CallSlots(settings.max_calls, settings.max_calls_per_session),
        rate=CallRate(settings.calls_per_second),
        body_room=BodyRoom(settings.body_room_bytes, settings.body_room_per_session_bytes),
        sessions=sessions,
        delivery=RedisDeliveryStore(store),
        weights=weights,
        engines=engines,
        clock=RedisClock(store),
        archive=RedisArchiveStore(store, sessions),
        pool=pool,
        renderer=LocalRenderer(settings.renderer, settings.renderer_options),
        updater=WeightUpdater(pool, weights, settings, WeightMetrics(metrics.registry, lambda: pool.replicas)),
        trees=SessionTrees(sessions, settings.session_cache, settings.session_cache_bytes, settings.volatile_lines),
        inflight=inflight,
        peers=Peers(process, RedisPeerStore(store), sessions, inflight, settings.close_wait_seconds),
        metrics=metrics,
    )
    metrics.watch_engines(lambda: [*pool.replicas, *pool.draining], pool.seats.depths)
    metrics.watch(lambda: len(services.inflight))
    return services


@contextlib.asynccontextmanager
async def _lifespan(
    services: Services, store: StoreConnection, harness: Harness, additions: list[Addition]
) -> AsyncIterator[None]:
    services.peers.start()
    preparing = asyncio.create_task(services.renderer.prepare())
    await services.pool.start()
    sweeper = asyncio.create_task(_sweep_forever(services))
    # Beside the sweep, which must not wait while an archive is written.
    retention = asyncio.create_task(Retention(services, RedisRetentionStore(store)).run())
    try:
        async with AsyncExitStack() as stack:
            for addition in additions:
                await stack.enter_async_context(addition.running())
            yield
    finally:
        preparing.cancel()
        sweeper.cancel()
        retention.cancel()
        # The server has waited drain_seconds for answers to go out; what is still under way is cut and recorded.
        await services.inflight.drain(0)
        await harness.settle()
        await services.peers.stop()
        await services.updater.stop()
        await services.pool.stop()
        await store.close()


async def _sweep_forever(services: Services) -> None:
    """Finish what processes that died left half closed, close what nobody uses any more, give up what nobody completes."""
    services.metrics.swept("sessions")
    while True:
        await asyncio.sleep(sweep_seconds(services.settings))
        try:
            await sweep(services)
            await expire_idle(services)
            await reclaim_places(services)
            settings = services.settings
            await services.delivery.tend(policy_of(settings), settings.group_timeout_seconds, await services.clock.now())
            services.metrics.swept("sessions")
        except StoreUnavailable as error:
            log.warning("the sweep of sessions waits: %s", error.message)
        except Exception:
            # It would end for good, and nobody would see that sessions are left half closed.
            log.exception("the sweep of sessions failed and is tried again")


# The control side as one router: `app.include_router(control_router())` after `app.state.services = services`.


def control_router() -> APIRouter:
    """Sessions, batches, weights, engines and health. Its errors need `proxy.api.requests.install_error_handlers(app)`."""
    router = APIRouter()
    for part in (
        *(sessions.router, archive.router, batches.dead_letters_router, batches.router),
        *(weights.router, engines.router, engines.health_router),
    ):
        # As they are. To include a router builds each of its routes again, which takes milliseconds per route.
        router.routes.extend(part.routes)
    return router
