"""What a generation's own node needs, tried before anything is started: its kinds of runtimes, and every harness once in one.

A harness that is not there, or cannot be installed, would fail each attempt of each line for the same cause."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import uuid4

from cli.generation.attempts import Input
from cli.node import kinds_here
from cli.refusal import Refusal
from rollout.attempts import AttemptId, RolloutFailed
from rollout.harnesses.catalogue import find_definition
from rollout.runtimes.base import Route, RuntimeFailed, RuntimeKind
from rollout.steps import AttemptLogs, HarnessRun, install_harness, remove
from rollout.task import Task

NOWHERE = Route("127.0.0.1", 9)
"""No model is called."""


async def try_harnesses(inputs: Sequence[Input], kinds: Sequence[str], logs: Path, says: Callable[[str], object]) -> None:
    """Returns when the machine has the kinds of runtimes, and in one of each the harnesses of the lines. Not tried are those that run a
    command of the task's own, and those of lines whose prepare steps may bring them. Raises `Refusal` for what is missing."""
    here = await kinds_here(list(kinds))
    tried = set()
    for given in inputs:
        task = given.parsed()
        place = (repr(task.harness), task.runtime.kind)
        if place not in tried and not task.prepare and not find_definition(task.harness).takes_command:
            tried.add(place)
            says(f"looking for {task.harness.name} in a runtime of kind {task.runtime.kind}")
            try:
                await _try(task, here[task.runtime.kind], logs)
            except (RolloutFailed, RuntimeFailed) as error:
                raise Refusal(f"line {given.number}: {error}{_elsewhere(task)}") from error


def _elsewhere(task: Task) -> str:
    """What to do where the machine has the harness and a sandbox on it does not see it."""
    found = shutil.which(find_definition(task.harness).argv[0])
    if found is None or task.runtime.kind != "local":
        return ""
    return f"; this machine has {found}: name what it needs in VERBATIM_LOCAL_READABLE, and its folder in VERBATIM_LOCAL_PATH"


async def _try(task: Task, kind: RuntimeKind, folder: Path) -> None:
    name = f"trial-{uuid4().hex[:12]}"
    logs = AttemptLogs("generate", folder, AttemptId(name, 0, 1))
    logs.make()
    definition = find_definition(task.harness)
    installed = await install_harness(kind, task, definition, f"{name}-i", NOWHERE, logs)
    runtime = kind.make(installed.spec, f"{name}-r", NOWHERE)
    await runtime.start()
    try:
        await HarnessRun(definition, task, runtime, logs, installed.failure).install()
    finally:
        await remove(runtime)
