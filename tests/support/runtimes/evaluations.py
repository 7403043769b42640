"""One evaluation as a node would ask for it, with a runtime in which some files lie."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.tasks import EvaluatorSpec, HarnessSpec, Task
from rollout.evaluators.base import Ask, Case, Run, Score
from rollout.evaluators.catalogue import load
from rollout.runtimes.base import Logs, Runtime
from tests.support.runtimes.plain_runtime import PlainRuntime

RUN = Run("t1.0.1", exit_code=0, timed_out=False, stdout=b"Done.\n", stderr=b"", calls=())
TASK = Task("Make the tests pass.", HarnessSpec("pi"), task_id="t1", metadata={"source": "tests"})


async def nobody_asks(model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> str:
    raise AssertionError("no judge was asked for")


def case_of(
    runtime: Runtime | None,
    options: Mapping[str, Any],
    folder: Path,
    *,
    task: Task = TASK,
    run: Run = RUN,
    ask: Ask = nobody_asks,
    seconds: float = 120.0,
) -> Case:
    return Case(task, options, run, runtime, Logs(folder / "stdout.log", folder / "stderr.log"), seconds, ask)


async def evaluated(
    name: str, options: Mapping[str, Any], folder: Path, files: Mapping[str, str | bytes] | None = None, **case: Any
) -> Score:
    """What the evaluator gives for `files`, checked as at submission first."""
    task = replace(case.pop("task", TASK), evaluator=EvaluatorSpec(name, options))
    load(name).check(EvaluatorSpec(name, options), task)
    runtime = PlainRuntime(folder)
    await runtime.start()
    for path, content in (files or {}).items():
        await runtime.upload(path, content.encode() if isinstance(content, str) else content)
    return await load(name).evaluate(case_of(runtime, options, folder, task=task, **case))


def check(name: str, options: Mapping[str, Any], task: Task = TASK) -> None:
    load(name).check(EvaluatorSpec(name, options), task)


@asynccontextmanager
async def plain_runtime(folder: Path, stand_ins: Sequence[str] = (), workdir: str = "") -> AsyncIterator[PlainRuntime]:
    runtime = PlainRuntime(folder, stand_ins, workdir)
    await runtime.start()
    yield runtime
    await runtime.stop()
