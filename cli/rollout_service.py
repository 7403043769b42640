"""The rollout service inside the served app: its control routes, and its sweeper in every worker process."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import httpx

from cli.rollout_store import RolloutConnection
from proxy import errors
from proxy.api import forks
from proxy.api.requests import JsonBody, require_admin, require_node
from proxy.app import Addition
from proxy.call.http import Application
from proxy.errors import NotFound
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.connection import StoreConnection
from rollout.api import build_task_router
from rollout.evaluators import catalogue as evaluators
from rollout.harnesses import catalogue as harnesses
from rollout.metrics import RolloutNumbers
from rollout.runtimes import catalogue as runtimes
from rollout.sessions import Sessions
from rollout.store import keys
from rollout.store.base import NoSuchTask, StoreUnavailable
from rollout.store.tasks import TaskStore
from rollout.store.work import WorkStore
from rollout.sweeper import TIMEOUT_SECONDS, Callbacks, RolloutSettings, Sweeper
from rollout.task import Fork, TaskBody
from rollout.task_body import BadTask, Known, render_rollout, render_summary, render_task

KNOWN = Known(runtimes.list_names, runtimes.load, evaluators.list_names, evaluators.load)
OWN_URL = "http://127.0.0.1"
"""Base URL of requests that the process makes to its own control side, in memory."""


def add_rollouts(known: Known, services: Services, control: Application) -> Addition:
    """An `Adding` for `create_app`, once `known` is bound."""
    # Another install may take this one's place while the process runs.
    keys.load_scripts()
    harnesses.load_built_in()
    runtimes.plugins().load_all()
    evaluators.plugins().load_all()
    settings = services.settings
    connection = StoreConnection.to(settings, settings.redis)
    store = TaskStore(RolloutConnection(connection))
    router = build_task_router(
        store,
        known,
        admin=require_admin,
        node=require_node,
        read_body=JsonBody(TaskBody).read_raw,
        check_fork=partial(check_fork, services),
        keepalive_seconds=settings.keepalive_seconds,
        stopping=services.stopping,
    )
    numbers = RolloutNumbers(store)
    services.metrics.registry.register(numbers)
    return Addition(router, partial(_run, services, connection, store, numbers, control), ShownTasks(store))


@contextlib.asynccontextmanager
async def _run(
    services: Services, connection: StoreConnection, store: TaskStore, numbers: RolloutNumbers, control: Application
) -> AsyncIterator[None]:
    inside = httpx.ASGITransport(control, raise_app_exceptions=False)
    sessions = Sessions(OWN_URL, partial(read_admin_token, services.settings), transport=inside)
    work = WorkStore(RolloutConnection(connection))
    callbacks = Callbacks(store, partial(services.outbound.post, seconds=TIMEOUT_SECONDS))
    sweeper = Sweeper(f"server-{uuid.uuid4().hex}", store, work, sessions, callbacks, numbers, RolloutSettings())
    sweeping = asyncio.create_task(sweeper.run())
    try:
        yield
    finally:
        sweeping.cancel()
        await asyncio.wait([sweeping])
        await sessions.close()
        await connection.close()


class ShownTasks:
    """The tasks as the service's pages show them (`proxy.ui.shown.Tasks`)."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store

    async def list_tasks(
        self, *, status: str | None, limit: int, cursor: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        with _translate_errors():
            states, following = await self._store.list_tasks(status=status, limit=limit, cursor=cursor)
            return [render_summary(state) for state in states], following

    async def load_task(self, task_id: str) -> dict[str, Any]:
        with _translate_errors():
            return render_task(await self._store.load(task_id))

    async def load_rollouts(self, task_id: str) -> list[dict[str, Any]]:
        with _translate_errors():
            return [render_rollout(state) for state in await self._store.load_rollouts(task_id)]


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise the rollout package's errors as the service's."""
    try:
        yield
    except NoSuchTask as error:
        raise NotFound(str(error)) from error
    except StoreUnavailable as error:
        raise errors.StoreUnavailable(str(error)) from error


async def check_fork(services: Services, fork: Fork) -> None:
    """Raise `BadTask` if no session can be opened that replays so."""
    try:
        await forks.check(services, fork.session_id, fork.until)
    except errors.RequestError as error:
        raise BadTask(f"fork: {error.message}", (error.param or "fork").replace("replay", "fork")) from error


def read_admin_token(settings: Settings) -> str:
    """A currently valid admin token; "" if the service is open to its machine. Read for every request: the file may change."""
    return next(iter(settings.admin_token.read()), "")
