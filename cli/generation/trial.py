"""Checks what a generation's own node needs before anything starts: its kinds of runtimes, and every harness once in each.

A harness that is missing or cannot be installed would fail every attempt for the same reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import uuid4

from cli.generation.attempts import Input
from cli.node import find_kinds
from cli.refusal import Refusal
from rollout.attempts import AttemptId, RolloutFailed
from rollout.harnesses.catalogue import find_definition
from rollout.runtimes.base import ProxyAddress, RuntimeFailed, RuntimeKind
from rollout.steps import AttemptLogs, HarnessRun, install_harness, remove
from rollout.task import Task

NOWHERE = ProxyAddress("127.0.0.1", 9)
"""No model is called."""


async def try_harnesses(inputs: Sequence[Input], kinds: Sequence[str], logs: Path, say: Callable[[str], object]) -> None:
    """Install each input's harness in a runtime of its kind. Skipped are harnesses that run the task's own command, and inputs whose
    prepare steps may bring the harness. Raises `Refusal` that names what is missing."""
    found = await find_kinds(list(kinds))
    tried = set()
    for each in inputs:
        task = each.parse()
        key = (repr(task.harness), task.runtime.kind)
        if key in tried or task.prepare or find_definition(task.harness).takes_command:
            continue
        tried.add(key)
        say(f"looking for {task.harness.name} in a runtime of kind {task.runtime.kind}")
        try:
            await _try(task, found[task.runtime.kind], logs)
        except (RolloutFailed, RuntimeFailed) as error:
            raise Refusal(f"line {each.number}: {error}{_advise(task)}") from error


def _advise(task: Task) -> str:
    """What to do if the harness is on this machine but invisible in its sandbox."""
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
