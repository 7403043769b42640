"""The rollout service in the served app: its routes on the control side, and its sweeper beside them, in every worker."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from functools import partial

import httpx
from fastapi import Request

from cli.rollout_store import RolloutConnection
from cli.task_operations import TASKS
from proxy.api.access import admin_only, node_only
from proxy.api.bodies import read_body
from proxy.app import Addition
from proxy.asgi import Application
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.connection import StoreConnection
from proxy.structure import check_depth
from proxy.token_file import tokens_in
from rollout.api import task_router
from rollout.callbacks import Callbacks
from rollout.evaluators import catalogue as evaluators
from rollout.metrics import RolloutNumbers
from rollout.runtimes import catalogue as runtimes
from rollout.sessions import Sessions
from rollout.settings import RolloutSettings
from rollout.store.tasks import RedisTaskStore
from rollout.store.work import RedisWorkStore
from rollout.sweeper import Sweeper
from rollout.task_wire import Known

KNOWN = Known(runtimes.names, runtimes.load, evaluators.names, evaluators.kind)
OWN_URL = "http://127.0.0.1"
"""Under which the application is asked from inside its own process; no connection is made."""


def rollouts(known: Known, services: Services, control: Application) -> Addition:
    """For `create_app`, once `known` is given."""
    settings = services.settings
    assert settings.redis is not None, "create_app has one"
    wire = StoreConnection.to(settings, settings.redis)
    store = RedisTaskStore(RolloutConnection(wire))
    router = task_router(
        store,
        known,
        admin=admin_only,
        node=node_only,
        read_body=_body,
        keepalive_seconds=settings.keepalive_seconds,
        stopping=services.stopping,
    )
    numbers = RolloutNumbers(store)
    services.metrics.registry.register(numbers)
    return Addition(router, partial(_running, settings, wire, store, numbers, control), TASKS)


@contextlib.asynccontextmanager
async def _running(
    settings: Settings, wire: StoreConnection, store: RedisTaskStore, numbers: RolloutNumbers, control: Application
) -> AsyncIterator[None]:
    inside = httpx.ASGITransport(control, raise_app_exceptions=False)
    sessions = Sessions(OWN_URL, partial(admin_secret, settings), transport=inside)
    callbacks, work = Callbacks(store), RedisWorkStore(RolloutConnection(wire))
    sweeper = Sweeper(f"server-{uuid.uuid4().hex}", store, work, sessions, callbacks, numbers, RolloutSettings())
    sweeping = asyncio.create_task(sweeper.run())
    try:
        yield
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])
        await callbacks.close()
        await sessions.close()
        await wire.close()


def admin_secret(settings: Settings) -> str:
    """A token that opens the admin side now; "" for a service that is open to its machine."""
    given = [token for token in (settings.admin_token, *settings.admin_tokens) if token]
    if given:
        return given[0].get_secret_value()
    # Asked for every request: the file may have changed since.
    found = tokens_in(settings.admin_token_file) if settings.admin_token_file else []
    return found[0] if found else ""


async def _body(request: Request) -> bytes:
    raw = await read_body(request, request.app.state.services.settings.max_body_bytes)
    check_depth(raw)
    return raw
