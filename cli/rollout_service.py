"""The rollout service inside the served app: its control routes, and its sweeper in every worker process."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from contract.tasks import Task
from proxy.app import Addition
from proxy.errors import RequestError
from proxy.services import Services
from proxy.store.connection import StoreConnection, load_scripts
from proxy.store.tasks.keys import PACKAGE
from proxy.store.tasks.tasks import TaskStore
from proxy.store.tasks.work import WorkStore
from proxy.tasks.attempts_router import build_attempt_router
from proxy.tasks.metrics import RolloutNumbers
from proxy.tasks.router import build_task_router
from proxy.tasks.sweeper import TIMEOUT_SECONDS, Callbacks, RolloutSettings, Sweeper
from proxy.tasks.takes import Takes
from proxy.tasks.views import render_rollout, render_summary, render_task
from rollout.evaluators import catalogue as evaluators
from rollout.harnesses import catalogue as harnesses
from rollout.runtimes import catalogue as runtimes
from rollout.task_body import BadTask, Known, read_task

KNOWN = Known(runtimes.list_names, runtimes.load, evaluators.list_names, evaluators.load)


def add_rollouts(known: Known, services: Services) -> Addition:
    """An `Adding` for `create_app`, once `known` is bound."""
    # Another install may take this one's place while the process runs.
    load_scripts(PACKAGE)
    harnesses.load_built_in()
    runtimes.plugins().load_all()
    evaluators.plugins().load_all()
    connection = StoreConnection.to(services.settings, services.settings.redis)
    store = TaskStore(connection)
    numbers = RolloutNumbers(store)
    services.metrics.registry.register(numbers)
    takes = Takes(connection, services.stopping)
    router = build_task_router(store, partial(_read_task, known), services)
    router.routes.extend(build_attempt_router(connection, takes, services).routes)
    return Addition(router, partial(_run, services, connection, store, numbers, takes), ShownTasks(store))


def _read_task(known: Known, raw: bytes) -> tuple[Task, bytes]:
    try:
        return read_task(raw, known)
    except BadTask as error:
        raise RequestError(error.message, param=error.param) from error


@contextlib.asynccontextmanager
async def _run(
    services: Services, connection: StoreConnection, store: TaskStore, numbers: RolloutNumbers, takes: Takes
) -> AsyncIterator[None]:
    callbacks = Callbacks(store, partial(services.outbound.post, seconds=TIMEOUT_SECONDS))
    name, work = f"server-{uuid.uuid4().hex}", WorkStore(connection)
    sweeper = Sweeper(name, store, work, services, callbacks, numbers, RolloutSettings(), takes.may_recover)
    running = [asyncio.create_task(sweeper.run()), asyncio.create_task(takes.run())]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await connection.close()


class ShownTasks:
    """The tasks as the service's pages show them (`proxy.ui.shown.Tasks`)."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store

    async def list_tasks(
        self, *, status: str | None, limit: int, cursor: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        states, following = await self._store.list_tasks(status=status, limit=limit, cursor=cursor)
        return [render_summary(state) | {"run": state.task.run} for state in states], following

    async def load_task(self, task_id: str) -> dict[str, Any]:
        return render_task(await self._store.load(task_id))

    async def load_rollouts(self, task_id: str) -> list[dict[str, Any]]:
        return [render_rollout(state) for state in await self._store.load_rollouts(task_id)]
