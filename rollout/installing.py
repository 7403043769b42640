"""The runtime of a task with its harness in it, where the kind of runtime can install one once for many."""

from __future__ import annotations

from rollout.attempt_logs import AttemptLogs
from rollout.harnesses.definition import Harness
from rollout.runtimes.base import Install, Installed, Route, RuntimeKind
from rollout.task import Task


async def with_harness(
    kind: RuntimeKind, task: Task, harness: Harness, name: str, route: Route, logs: AttemptLogs
) -> Installed:
    """The task's spec, with the harness in it or not: `HarnessRun.install` looks, once the prepare steps are done. `name` is that of
    a runtime which is there for the install alone. Raises `RuntimeFailed`."""
    if harness.takes_command or not (task.harness.install and harness.install):
        return Installed(task.runtime)
    return await kind.installed(task.runtime, Install(harness.argv[0], harness.install), name, route, logs.of("install"))
