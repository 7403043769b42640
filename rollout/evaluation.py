"""The evaluation of a run: a fresh runtime made ready while the agent still works, what the agent left carried over, and a score."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Sequence
from pathlib import PurePosixPath

from rollout.attempts import AttemptId, Failure, RolloutFailed, runtime_name
from rollout.evaluators import catalogue
from rollout.evaluators.base import BadReward, Case, EvaluationFailed, EvaluationTimedOut, Run, Score, parse_score
from rollout.runtimes.base import Runtime, RuntimeFailed
from rollout.sessions import SessionFailed
from rollout.stages import within
from rollout.steps import AttemptLogs, NodeParts, carry_out, remove
from rollout.task import EvaluatorSpec, Task

COLLECTED_BYTES = 1 << 30
WORKDIR, ROOT = ".", "/"


class Evaluation:
    """`begin` it beside the agent's run, then `score` that run; `drop` removes whatever it made."""

    def __init__(self, parts: NodeParts, task: Task, spec: EvaluatorSpec, attempt: AttemptId, logs: AttemptLogs) -> None:
        self._parts = parts
        self._task = task
        self._spec = spec
        self._attempt = attempt
        self._logs = logs
        self._evaluator = catalogue.load(spec.kind)
        self._runtime: Runtime | None = None
        self._warming: asyncio.Task[Runtime] | None = None

    def begin(self) -> None:
        """Start to make the fresh runtime ready, if one is wanted."""
        if self._evaluator.needs_runtime and self._spec.fresh_runtime is not False:
            self._warming = asyncio.create_task(self._warmed())

    async def warmed(self) -> None:
        """Returns when the fresh runtime is there, or cannot be made, which `score` then says."""
        if self._warming is not None:
            await asyncio.wait([self._warming])

    async def drop(self) -> None:
        if self._warming is not None:
            if not self._warming.cancelling():
                self._warming.cancel()
            await asyncio.wait([self._warming])
            if not self._warming.cancelled():
                # Looked at, whoever needed it or not: one that nobody asks for is reported as forgotten.
                self._warming.exception()
        if self._runtime is not None:
            await remove(self._runtime)

    async def score(self, run: Run, left: Runtime) -> Score:
        """Raises `RolloutFailed` when there is no finite reward. `left` is the runtime in which the agent worked."""
        try:
            runtime = await self._carried_over(left)
            return parse_score(await self._evaluator.evaluate(self._case(run, runtime)), f"what {self._spec.kind} gave")
        except BadReward as error:
            raise RolloutFailed(Failure.BAD_REWARD, str(error), self._logs.place("evaluate.out")) from error
        except EvaluationTimedOut as error:
            raise RolloutFailed(Failure.EVALUATOR_TIMEOUT, str(error), self._logs.place("evaluate.err")) from error
        except EvaluationFailed as error:
            raise RolloutFailed(Failure.EVALUATOR_FAILED, str(error), self._logs.place("evaluate.err")) from error
        except (RolloutFailed, RuntimeFailed, SessionFailed, OSError):
            raise
        except Exception as error:
            # Of an evaluator that somebody wrote: it would do so again in every attempt.
            message = f"{self._spec.kind} raised {type(error).__name__}: {error}"
            raise RolloutFailed(Failure.EVALUATOR_FAILED, message, self._logs.place("evaluate.err")) from error

    def _case(self, run: Run, runtime: Runtime | None) -> Case:
        return Case(
            task=self._task,
            options=self._spec.options,
            run=run,
            runtime=runtime,
            logs=self._logs.of("evaluate"),
            seconds=self._task.budgets.evaluation,
            ask=self._parts.judge.ask,
        )

    async def _warmed(self) -> Runtime:
        spec = self._spec.runtime or self._task.runtime
        async with (
            self._parts.stages.prepare.entered(),
            within(self._task.budgets.prepare, Failure.PREPARE_TIMEOUT),
        ):
            name = runtime_name(self._parts.name, self._attempt, "e")
            self._runtime = runtime = self._parts.kinds[spec.kind].make(spec, name, self._parts.route)
            await runtime.start()
            await carry_out(self._spec.prepare, runtime, self._task.environment, self._logs.named("evaluation"))
            return runtime

    async def _carried_over(self, left: Runtime) -> Runtime | None:
        if not self._evaluator.needs_runtime:
            return None
        if self._warming is None:
            return left
        runtime = await self._warming
        below, elsewhere = split_paths(self._spec.collect, left.workdir)
        archives = [
            (folder, await left.download(paths, bound_bytes=COLLECTED_BYTES))
            for folder, paths in ((WORKDIR, below), (ROOT, elsewhere))
            if paths
        ]
        # What the agent left takes CPUs and memory that the tests may need.
        await remove(left)
        for folder, archive in archives:
            await runtime.unpack(folder, archive)
        return runtime


def split_paths(paths: Sequence[str], workdir: str) -> tuple[list[str], list[str]]:
    """Those below the workdir, which go into the workdir of another runtime, and the others, which go where they were."""
    below: list[str] = []
    elsewhere: list[str] = []
    for path in paths:
        whole = PurePosixPath(posixpath.normpath(posixpath.join(workdir, path)))
        (below if whole.is_relative_to(workdir) else elsewhere).append(path)
    return below, elsewhere
