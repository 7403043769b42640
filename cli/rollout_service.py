"""The rollout service inside the served app: its control routes, and its sweeper in every worker process."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from functools import partial

import httpx

from cli.rollout_store import RolloutConnection
from proxy.api.requests import JsonBody, require_admin, require_node
from proxy.app import Addition
from proxy.auth import tokens_in
from proxy.call.http import Application
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.connection import StoreConnection
from rollout.api import build_task_router
from rollout.evaluators import catalogue as evaluators
from rollout.metrics import RolloutNumbers
from rollout.runtimes import catalogue as runtimes
from rollout.sessions import Sessions
from rollout.store.tasks import TaskStore
from rollout.store.work import WorkStore
from rollout.sweeper import Callbacks, RolloutSettings, Sweeper
from rollout.task import TaskBody
from rollout.task_body import Known

KNOWN = Known(runtimes.list_names, runtimes.load, evaluators.names, evaluators.load)
OWN_URL = "http://127.0.0.1"
"""Base URL of requests that the process makes to its own control side, in memory."""


def add_rollouts(known: Known, services: Services, control: Application) -> Addition:
    """An `Adding` for `create_app`, once `known` is bound."""
    settings = services.settings
    connection = StoreConnection.to(settings, settings.redis)
    store = TaskStore(RolloutConnection(connection))
    router = build_task_router(
        store,
        known,
        admin=require_admin,
        node=require_node,
        read_body=JsonBody(TaskBody).read_raw,
        keepalive_seconds=settings.keepalive_seconds,
        stopping=services.stopping,
    )
    numbers = RolloutNumbers(store)
    services.metrics.registry.register(numbers)
    return Addition(router, partial(_run, settings, connection, store, numbers, control))


@contextlib.asynccontextmanager
async def _run(
    settings: Settings, connection: StoreConnection, store: TaskStore, numbers: RolloutNumbers, control: Application
) -> AsyncIterator[None]:
    inside = httpx.ASGITransport(control, raise_app_exceptions=False)
    sessions = Sessions(OWN_URL, partial(read_admin_token, settings), transport=inside)
    callbacks, work = Callbacks(store), WorkStore(RolloutConnection(connection))
    sweeper = Sweeper(f"server-{uuid.uuid4().hex}", store, work, sessions, callbacks, numbers, RolloutSettings())
    sweeping = asyncio.create_task(sweeper.run())
    try:
        yield
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])
        await callbacks.close()
        await sessions.close()
        await connection.close()


def read_admin_token(settings: Settings) -> str:
    """A currently valid admin token; "" if the service is open to its machine. Read for every request: the file may change."""
    given = [token for token in (settings.admin_token, *settings.admin_tokens) if token]
    if given:
        return given[0].get_secret_value()
    found = tokens_in(settings.admin_token_file) if settings.admin_token_file else []
    return found[0] if found else ""
