"""`create_app` wires one process: it builds the store, pool, updater, trees and metrics and hands them to the two sides of the service.

The harness side is plain ASGI (`proxy.call.door`), the control side FastAPI (`proxy.api`); the lifespan opens and closes what both share.
`settings.redis` must be set: the caller starts the embedded server if there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import cache, partial

from fastapi import APIRouter, FastAPI
from fastapi.concurrency import run_in_threadpool

from proxy.api import (
    archive,
    batches,
    calls,
    dead_letters,
    engines,
    groups,
    media,
    projects,
    run,
    runs,
    scores,
    sessions,
    weights,
)
from proxy.api.admission import reclaim_places
from proxy.api.closing import build_group_defaults, choose_sweep_interval, close_idle, fill_group, finish_announced
from proxy.api.openapi import build_document
from proxy.api.requests import install_error_handlers
from proxy.auth import Tokens, is_loopback
from proxy.call.cache import SessionCache
from proxy.call.door import HarnessApp
from proxy.call.http import BodyRoom, CallRate, CallSlots
from proxy.call.images import ImageCache, ImageHook
from proxy.call.lookahead import LookaheadHook
from proxy.call.peers import Peers
from proxy.call.replay import ForkHook, Replays
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.pool.pool import EnginePool
from proxy.engine.weights.keeper import WeightMetrics
from proxy.engine.weights.push import WeightUpdater
from proxy.errors import StoreUnavailable
from proxy.limits import USUAL, ProcessLimits
from proxy.memory import find_session_bytes
from proxy.metrics import Metrics
from proxy.outbound import Outbound
from proxy.projects import Projects
from proxy.retention import Retention
from proxy.scoring.hook import ScoreHook
from proxy.scoring.scorers import Scorer, select
from proxy.scoring.scoring import Scoring
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.archive import ArchiveStore
from proxy.store.connection import StoreConnection, load_scripts
from proxy.store.delivery import DeliveryStore
from proxy.store.media import MediaStore
from proxy.store.projects import ProjectStore
from proxy.store.score_jobs import ScoreJobStore
from proxy.store.scores import ScoreStore
from proxy.store.service import EngineStore, LogOuts, PeerStore, RedisClock, RetentionStore, WeightStore
from proxy.store.sessions import SessionStore
from proxy.timeline import Inflight
from proxy.ui.rendering import static_version, templates
from proxy.ui.router import ui_router
from proxy.ui.shown import Tasks, Ui

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addition:
    """What another package adds to the app: control routes, a context that is open while the app runs, and tasks to show."""

    router: APIRouter
    running: Callable[[], AbstractAsyncContextManager[None]]
    tasks: Tasks | None = None


Adding = Callable[[Services], Addition]
"""Builds an addition from the process's services."""


def create_app(settings: Settings, *adding: Adding, limits: ProcessLimits = USUAL) -> HarnessApp:
    """The ASGI application of one process."""
    _read_install()
    store = StoreConnection.to(settings, settings.redis, limits.redis_timeout_seconds)
    services = build_services(settings, store, limits)
    # FastAPI's own documentation pages load scripts from elsewhere and ask for a token.
    control = FastAPI(title="Verbatim", docs_url=None, redoc_url=None)
    harness = HarnessApp(services, control)
    additions = [add(services) for add in adding]
    control.router.lifespan_context = lambda _: _lifespan(services, store, harness, additions)
    control.state.services = services
    control.state.ui = Ui(services, next((addition.tasks for addition in additions if addition.tasks), None))
    install_error_handlers(control)
    for router in (build_control_router(), ui_router(), *(addition.router for addition in additions)):
        # include_router would build every route a second time, which takes half of the time to create the app.
        control.routes.extend(router.routes)
    control.openapi = harness.description = cache(partial(build_document, control))  # type: ignore[method-assign]
    return harness


def _read_install() -> None:
    """Read now what is otherwise read at its first use: another install may take this one's place while the process runs."""
    load_scripts()
    static_version()
    templates()


def build_control_router() -> APIRouter:
    """Sessions, batches, weights, engines and health. Its errors need `proxy.api.requests.install_error_handlers(app)`."""
    router = APIRouter()
    for part in (sessions, calls, scores, media, archive, projects, groups, dead_letters, batches, weights, run, runs, engines):
        router.routes.extend(part.router.routes)
    router.routes.extend(engines.health_router.routes)
    return router


def build_services(settings: Settings, store: StoreConnection, limits: ProcessLimits = USUAL) -> Services:
    """What one process shares between its two sides, not yet started."""
    engines, metrics = EngineStore(store), Metrics()
    renderer = LocalRenderer(settings.renderer, settings.renderer_options)
    pool = EnginePool(settings, engines, metrics=metrics, renderer=renderer, limits=limits)
    process, inflight = uuid.uuid4().hex, Inflight()
    sessions, weights, media = SessionStore(store, process), WeightStore(store), MediaStore(store)
    outbound = Outbound(settings.outbound_allow, on_loopback=is_loopback(settings.host))
    sessions_bytes = find_session_bytes(1) if settings.session_cache_bytes is None else settings.session_cache_bytes
    cache = SessionCache(
        sessions, limits.session_cache, sessions_bytes, settings.volatile_lines, limits.images, memo=limits.session_memo
    )
    services = Services(
        settings=settings,
        limits=limits,
        tokens=Tokens(settings.tokens),
        slots=CallSlots(settings.call_limits.at_once, settings.call_limits.per_session),
        rate=CallRate(settings.call_limits.per_second),
        body_room=BodyRoom(limits.body_room_bytes, limits.body_room_per_session_bytes),
        sessions=sessions,
        delivery=DeliveryStore(store),
        weights=weights,
        engines=engines,
        clock=RedisClock(store),
        archive=ArchiveStore(store, sessions),
        media=media,
        scores=ScoreStore(store),
        pool=pool,
        renderer=renderer,
        updater=WeightUpdater(pool, weights, settings, WeightMetrics(metrics.registry, lambda: pool.replicas)),
        cache=cache,
        inflight=inflight,
        peers=Peers(process, PeerStore(store), sessions, inflight, settings.close_wait_seconds),
        metrics=metrics,
        log_outs=LogOuts(store),
        projects=Projects(ProjectStore(store)),
        outbound=outbound,
        hooks=(
            ForkHook(Replays(pool, sessions, cache, metrics)),
            LookaheadHook(pool, outbound),
            ImageHook(ImageCache(media, limits.image_cache_bytes), pool.kinds),
            ScoreHook(select(settings.scorers, Scorer), lambda: services.scoring),
        ),
    )
    services.scoring = Scoring(services, ScoreJobStore(store), fill_group)
    metrics.watch_engines(lambda: [*pool.replicas, *pool.draining], pool.seats.depths)
    metrics.watch(lambda: len(services.inflight))
    metrics.watch_sessions(services.cache)
    return services


@contextlib.asynccontextmanager
async def _lifespan(
    services: Services, store: StoreConnection, harness: HarnessApp, additions: list[Addition]
) -> AsyncIterator[None]:
    # Starlette loads the backend of its tasks when it is first needed: at a request that would take 100 ms longer, and all beside it.
    await run_in_threadpool(load_scripts)
    services.peers.start()
    preparing = asyncio.create_task(services.renderer.prepare())
    await services.pool.start()
    sweeper = asyncio.create_task(_sweep_forever(services))
    watch = asyncio.create_task(_watch_store(services))
    # Separate from the sweep, which must not wait while an archive is written.
    retention = asyncio.create_task(Retention(services, RetentionStore(store)).run())
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(services.scoring.running())
            for addition in additions:
                await stack.enter_async_context(addition.running())
            yield
    finally:
        for task in (preparing, sweeper, watch, retention):
            task.cancel()
        # The server has waited drain_seconds for answers to be sent; calls still in flight are cut and recorded.
        await services.inflight.drain(0)
        await harness.settle()
        await services.peers.stop()
        await services.updater.stop()
        await services.pool.stop()
        await store.close()


async def _watch_store(services: Services) -> None:
    """Say what is wrong with the store once, when it begins: an operator may act before nothing can be recorded."""
    known: set[str] = set()
    while True:
        try:
            found = await services.sessions.ping()
        except StoreUnavailable as error:
            found = [error.message]
        # Without numbers, which change.
        told = {re.sub(r"\d+", "", each): each for each in found}
        for each in told.keys() - known:
            log.warning("%s", told[each])
        known = set(told)
        await asyncio.sleep(choose_sweep_interval(services.settings))


async def _sweep_forever(services: Services) -> None:
    """Finish the closes of dead processes, close idle sessions, reclaim places and give up incomplete groups."""
    services.metrics.note_sweep("sessions")
    while True:
        await asyncio.sleep(choose_sweep_interval(services.settings))
        try:
            await finish_announced(services)
            await close_idle(services)
            await reclaim_places(services)
            settings = services.settings
            await services.delivery.tend(
                build_group_defaults(settings), settings.group.timeout_seconds, await services.clock.now()
            )
            services.metrics.note_sweep("sessions")
        except StoreUnavailable as error:
            log.warning("the sweep of sessions is postponed: %s", error.message)
        except Exception:
            # Otherwise the task would end for good and sessions would silently stay half closed.
            log.exception("the sweep of sessions failed and will be retried")
