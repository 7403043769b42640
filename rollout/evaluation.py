"""The evaluation of a run: a fresh runtime made ready while the agent works, the agent's files carried over, and a score."""

from __future__ import annotations

import asyncio
import errno
import posixpath
from collections.abc import Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from contract.attempts import AttemptId, Failure
from contract.errors import RequestRefused, ServiceError
from contract.tasks import EvaluatorSpec, Task
from rollout.attempts import RolloutFailed, runtime_name
from rollout.evaluators import catalogue
from rollout.evaluators.base import BadReward, Case, EvaluationFailed, EvaluationTimedOut, Run, Score, parse_score
from rollout.evaluators.collected import name_of
from rollout.logs import AttemptLogs
from rollout.runtimes.base import Runtime, RuntimeFailed
from rollout.runtimes.files import iterate_entries
from rollout.stages import within
from rollout.steps import NodeContext, carry_out, remove

COLLECTED_BYTES = 1 << 30
NODE_ERRNOS = frozenset(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS", "EIO", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN")
)
"""Errors of the system that say that the node lacks something, whatever was evaluated."""
WORKDIR, ROOT = ".", "/"


class Evaluation:
    """`begin` before the agent runs, then `score` its run; `drop` removes the fresh runtime."""

    def __init__(self, parts: NodeContext, task: Task, spec: EvaluatorSpec, attempt: AttemptId, logs: AttemptLogs) -> None:
        self._parts = parts
        self._task = task
        self._spec = spec
        self._attempt = attempt
        self._logs = logs
        self._evaluator = catalogue.load(spec.kind)
        self._runtime: Runtime | None = None
        self._warming: asyncio.Task[Runtime] | None = None

    def begin(self) -> None:
        """Start making the fresh runtime, if the task wants one."""
        if self._evaluator.needs_runtime and self._spec.fresh_runtime is not False:
            self._warming = asyncio.create_task(self._warm())

    async def wait(self) -> None:
        """Returns when the fresh runtime is ready, or cannot be made, which `score` then raises."""
        if self._warming is not None:
            await asyncio.wait([self._warming])

    async def drop(self) -> None:
        if self._warming is not None:
            if not self._warming.cancelling():
                self._warming.cancel()
            await asyncio.wait([self._warming])
            if not self._warming.cancelled():
                # Retrieve it, or asyncio reports it as never retrieved.
                self._warming.exception()
        if self._runtime is not None:
            await remove(self._runtime)

    async def score(self, run: Run, left: Runtime) -> Score:
        """Raises `RolloutFailed` if there is no finite reward. `left` is the agent's runtime."""
        try:
            runtime = await self._carry_over(left)
            return parse_score(await self._evaluate(self._build_case(run, runtime)), f"what {self._spec.kind} gave")
        except BadReward as error:
            raise RolloutFailed(Failure.BAD_REWARD, str(error), self._logs.place("evaluate.out")) from error
        except EvaluationTimedOut as error:
            raise RolloutFailed(Failure.EVALUATOR_TIMEOUT, str(error), self._logs.place("evaluate.err")) from error
        except (EvaluationFailed, RequestRefused) as error:
            raise RolloutFailed(Failure.EVALUATOR_FAILED, str(error), self._logs.place("evaluate.err")) from error

    async def _evaluate(self, case: Case) -> Any:
        """What an evaluator raises is its own failure, which every attempt would meet, unless the node cancels it or lacks something."""
        try:
            return await self._evaluator.evaluate(case)
        except (BadReward, EvaluationTimedOut, EvaluationFailed, RolloutFailed, RuntimeFailed, ServiceError):
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if _is_of_node(error):
                raise
            raise EvaluationFailed(f"{self._spec.kind} raised {type(error).__name__}: {error}") from error

    def _build_case(self, run: Run, runtime: Runtime | None) -> Case:
        return Case(
            task=self._task,
            options=self._spec.options,
            run=run,
            runtime=runtime,
            logs=self._logs.of("evaluate"),
            seconds=self._task.budgets.evaluation,
            ask=partial(self._parts.judge.ask, self._attempt),
        )

    async def _warm(self) -> Runtime:
        spec = self._spec.runtime or self._task.runtime
        async with (
            self._parts.stages.prepare.entered(),
            within(self._task.budgets.prepare, Failure.PREPARE_TIMEOUT),
        ):
            name = runtime_name(self._parts.prefix, self._attempt, "e")
            self._runtime = runtime = self._parts.kinds[spec.kind].make(spec, name, self._parts.proxy)
            await runtime.start()
            await carry_out(self._spec.prepare, runtime, self._task.environment, self._logs.prefixed("evaluation"))
            return runtime

    async def _carry_over(self, left: Runtime) -> Runtime | None:
        if not self._evaluator.needs_runtime:
            return None
        if self._warming is None:
            return left
        runtime = await self._warming
        below, elsewhere = split_paths(self._spec.collect, left.workdir)
        archives = []
        for folder, paths in ((WORKDIR, below), (ROOT, elsewhere)):
            if paths:
                archive = await left.download(paths, bound_bytes=COLLECTED_BYTES)
                await asyncio.to_thread(check_names, archive, [name_of(path, left.workdir) for path in paths])
                archives.append((folder, archive))
        # Frees CPUs and memory that the tests may need.
        await remove(left)
        for folder, archive in archives:
            await runtime.unpack(folder, archive)
        return runtime


def _is_of_node(error: BaseException) -> bool:
    """Whether it is the node that cancels the evaluation or lacks something. Many an evaluator's own error is an OSError, too, such as a
    time limit or a name that does not resolve, and a task of its own that it awaits may have been cancelled."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, OSError) and error.errno in NODE_ERRNOS


def check_names(archive: bytes, names: Sequence[str]) -> None:
    """Raises `EvaluationFailed` for an entry that is none of the `names` nor below one, as an agent's own `tar` may bring."""
    if "." in names:
        return
    for entry, _ in iterate_entries(archive):
        path = PurePosixPath(posixpath.normpath(entry.name).lstrip("/"))
        if not any(path.is_relative_to(name) for name in names):
            raise EvaluationFailed(f"the archive of {', '.join(names)} brings {entry.name!r}, too")


def split_paths(paths: Sequence[str], workdir: str) -> tuple[list[str], list[str]]:
    """(below the workdir, elsewhere): the first go into another runtime's workdir, the others where they were."""
    below: list[str] = []
    elsewhere: list[str] = []
    for path in paths:
        whole = PurePosixPath(posixpath.normpath(posixpath.join(workdir, path)))
        (below if whole.is_relative_to(workdir) else elsewhere).append(path)
    return below, elsewhere
