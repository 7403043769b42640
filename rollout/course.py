"""The course of one attempt on a node: its stages in order, and how each failure ends it."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Literal, TypeVar

from contract.attempts import AttemptId, Failure, FailureRecord, Status, Superseded, TakenRollout, Verdict
from contract.client import hold_seconds
from contract.errors import HeldBack, RequestRefused, ServiceError, ServiceUnavailable
from rollout.attempts import RETRIED, RolloutFailed, runtime_name
from rollout.attempts_client import OpenSession
from rollout.evaluation import Evaluation
from rollout.evaluators.base import Run, shorten
from rollout.harnesses.catalogue import find_definition
from rollout.harnesses.definition import Harness
from rollout.harnesses.limits import Limits, read_window
from rollout.harnesses.prepared import UnknownBaseUrl
from rollout.judge import describe_model, find_first_model
from rollout.logs import AttemptLogs
from rollout.offer import WorkingKinds
from rollout.runtimes.base import DiskFull, NoRoom, Runtime, RuntimeFailed
from rollout.stages import Budget, Permit, Stage, within
from rollout.steps import (
    HarnessRun,
    NodeContext,
    carry_out,
    check_run,
    install_harness,
    remove,
)

log = logging.getLogger(__name__)

OUTPUT_BYTES = 30_000
"""Of the end of an agent's stdout, and of its stderr, that the session's page shows."""

T = TypeVar("T")
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
TIMEOUTS = (Failure.TOTAL_TIMEOUT, Failure.PREPARE_TIMEOUT)


class Course:
    """`go` runs the attempt to its end. When cancelled it removes its runtimes and reports nothing: the canceller knows why.

    `ahead` is the node's permit to have taken the rollout, given back when the run ends; `reserved` is its CPUs and memory, given back
    with its runtimes; `offer` learns whether its kind of runtime works."""

    def __init__(self, taken: TakenRollout, ahead: Permit, reserved: Permit, parts: NodeContext, offer: WorkingKinds) -> None:
        self.attempt: AttemptId = taken.attempt
        self.begun = False
        """Whether the harness may have started; until then the rollout can be put back."""
        self._taken = taken
        self._task = taken.task
        self._ahead = ahead
        self._reserved = reserved
        self._parts = parts
        self._offer = offer
        self._logs = AttemptLogs(parts.name, parts.logs, taken.attempt)

    @property
    def kind(self) -> str:
        """Of its runtime."""
        return self._task.runtime.kind

    async def go(self) -> None:
        try:
            verdict = await self._reach_verdict()
            if verdict is not None:
                await self._finish(verdict)
        except Superseded as superseded:
            log.info("rollout %s is no longer this node's: %s", self.attempt.session_id, superseded)

    async def _reach_verdict(self) -> Verdict | None:
        """The stored verdict, or the attempt's; None if the rollout waits for its next attempt."""
        if self._taken.resumed:
            return self._taken.state.verdict
        try:
            with self._translate_errors():
                return await self._attempt()
        except RolloutFailed as failed:
            # It may quote what the agent wrote, at any length and in any encoding.
            failure = FailureRecord(failed.failure, shorten(failed.message), failed.look or self._logs.place())
            log.warning("rollout %s: %s: %s", self.attempt.session_id, failure.failure, failure.message)
            if await self._give_up(failure):
                return None
            return Verdict("timeout" if failure.failure in TIMEOUTS else "failed", failure=failure)

    async def _give_up(self, failure: FailureRecord) -> bool:
        """Whether the rollout is queued again."""
        spared = await self._doubt_runtime(failure.failure)
        if failure.failure not in RETRIED:
            return False
        return await self._insist(lambda: self._parts.attempts.give_up(self.attempt, failure, spared=spared))

    async def _doubt_runtime(self, failure: Failure) -> bool:
        """Whether the attempt failed because its kind of runtime does not work on this node now: then it does not count."""
        node_failed = failure is Failure.NODE_FAILED
        if not node_failed and (failure is not Failure.BAD_RUNTIME or self.begun):
            return False
        return await self._offer.doubt(self.kind, node_failed=node_failed)

    async def _finish(self, verdict: Verdict) -> None:
        """End the rollout, and its session, with the verdict; a reward that the service refuses is the evaluator's failure."""
        try:
            await self._insist(lambda: self._parts.attempts.finish(self.attempt, verdict))
        except RequestRefused as error:
            message = shorten(f"the evaluator's score is refused: {error}")
            failure = FailureRecord(Failure.BAD_REWARD, message, self._logs.place())
            log.warning("rollout %s: %s: %s", self.attempt.session_id, failure.failure, failure.message)
            await self._insist(lambda: self._parts.attempts.finish(self.attempt, Verdict("failed", failure=failure)))

    async def _attempt(self) -> Verdict:
        # The stack is outside the budget, which must not interrupt the removal of runtimes.
        async with AsyncExitStack() as stack, within(self._task.budgets.total, Failure.TOTAL_TIMEOUT) as budget:
            stack.callback(self._ahead.leave)
            stack.callback(self._reserved.leave)
            self._logs.make()
            harness = await self._prepare(stack, budget)
            await self._report("ready", budget)
            running = await stack.enter_async_context(_enter(self._parts.stages.run, budget))
            return await self._run_and_evaluate(harness, running, stack, budget)

    async def _prepare(self, stack: AsyncExitStack, budget: Budget) -> HarnessRun:
        task = self._task
        async with _enter(self._parts.stages.prepare, budget), within(task.budgets.prepare, Failure.PREPARE_TIMEOUT):
            kind, proxy, prefix = self._parts.kinds[self.kind], self._parts.proxy, self._parts.prefix
            definition = find_definition(task.harness)
            name = runtime_name(prefix, self.attempt, "i")
            installed = await install_harness(kind, task, definition, name, proxy, self._logs)
            runtime = kind.make(installed.spec, runtime_name(prefix, self.attempt, "r"), proxy)
            stack.push_async_callback(remove, runtime)
            await runtime.start()
            await carry_out(task.prepare, runtime, task.environment, self._logs)
            harness = HarnessRun(definition, task, runtime, self._logs, installed.failure)
            await harness.install()
            await harness.put_skills()
            return harness

    async def _run_and_evaluate(self, harness: HarnessRun, running: Permit, stack: AsyncExitStack, budget: Budget) -> Verdict:
        spec = self._task.evaluator
        evaluation = Evaluation(self._parts, self._task, spec, self.attempt, self._logs) if spec else None
        if evaluation is not None:
            evaluation.begin()
            stack.push_async_callback(evaluation.drop)
        self.begun = True
        self._offer.trust(self.kind)
        opened = await self._open_session(harness.harness, budget)
        run = await self._run_agent(harness, opened, budget)
        if run.timed_out and self._task.on_agent_timeout != "evaluate":
            return self._decide_timeout()
        # Keep the run slot until there is one to evaluate in: a node must not run ahead of its evaluations.
        async with _enter(self._parts.stages.evaluate, budget):
            running.leave()
            self._ahead.leave()
            return await self._evaluate(run, evaluation, harness.runtime, budget)

    async def _run_agent(self, harness: HarnessRun, opened: OpenSession, budget: Budget) -> Run:
        """Raises `RolloutFailed` if the run cannot be scored."""
        parts, attempt = self._parts, self.attempt
        # Without an engine the first call would fail and cost the attempt.
        await self._wait_for_service(budget, parts.attempts.check_ready)
        model, limits = await self._find_model(harness.harness, opened, budget)
        done = await harness.run(parts.url, opened, model, limits)
        # It helps people and nothing depends on it.
        with suppress(ServiceError):
            await parts.attempts.store_log(attempt, join_output(done.stdout, done.stderr))
        calls = await self._wait_for_service(budget, lambda: parts.attempts.list_calls(attempt))
        session = await self._wait_for_service(budget, lambda: parts.attempts.load_session(attempt))
        check_run(harness, done, calls, session)
        exit_code = None if done.timed_out else done.exit_code
        return Run(attempt.session_id, exit_code, done.timed_out, done.stdout, done.stderr, calls)

    async def _find_model(self, definition: Harness, opened: OpenSession, budget: Budget) -> tuple[str, Limits]:
        """The model that the harness asks for, and the limits of its calls."""
        url, name = self._parts.url, self._task.model or ""
        card: Mapping[str, Any] = {}
        if name and definition.takes_limits:
            card = await self._wait_for_service(budget, lambda: describe_model(url, opened, name))
        elif not name and (definition.takes_model or definition.takes_limits):
            card = await self._wait_for_service(budget, lambda: find_first_model(url, opened))
        window = read_window(card)
        if window is None and definition.takes_limits:
            self._parts.unknown_windows.note(definition.name, name or card.get("id", ""))
        sampled = (self._task.sampling.get("max_tokens"), self._task.budgets.max_completion_tokens)
        return name or card.get("id", ""), Limits(window, tuple(most for most in sampled if most is not None))

    async def _open_session(self, definition: Harness, budget: Budget) -> OpenSession:
        """Open the session, which marks the rollout as running; wait while the service holds it back. Raises `Superseded` if the rollout
        gave way: where every slot is taken by rollouts that are held back, none that would complete a group gets one, and trainers would
        wait for ever."""
        attempt, attempts, logs = self.attempt, self._parts.attempts, self._logs.place()
        while True:
            try:
                return await self._wait_for_service(budget, lambda: attempts.open(attempt, definition.roles, logs))
            except HeldBack as held:
                with budget.pause():
                    if await self._insist(lambda: attempts.give_way(attempt)):
                        raise Superseded("it gave way to rollouts of groups that have begun") from held
                    await asyncio.sleep(hold_seconds(held))

    async def _evaluate(self, run: Run, evaluation: Evaluation | None, left: Runtime, budget: Budget) -> Verdict:
        status: Literal["timeout", "completed"] = "timeout" if run.timed_out else "completed"
        failure = self._record_timeout() if run.timed_out else None
        if evaluation is None:
            return Verdict(status, failure=failure)
        await self._report("evaluating", budget, calls=len(run.calls), exit_code=run.exit_code)
        with budget.pause():
            await evaluation.wait()
        async with within(self._task.budgets.evaluation, Failure.EVALUATOR_TIMEOUT):
            score = await evaluation.score(run, left)
        return Verdict(status, score.reward, score.per_call, score.per_branch, score.feedback, score.metadata, failure)

    def _decide_timeout(self) -> Verdict:
        reward = self._task.agent_timeout_reward if self._task.on_agent_timeout == "reward" else None
        return Verdict("timeout", reward, failure=self._record_timeout())

    def _record_timeout(self) -> FailureRecord:
        message = f"the agent's budget of {self._task.budgets.agent:g} s ran out"
        return FailureRecord(Failure.AGENT_TIMEOUT, message, self._logs.place("agent.err"))

    async def _report(self, status: Status, budget: Budget, **fields: Any) -> None:
        with budget.pause():
            await self._insist(lambda: self._parts.attempts.report(self.attempt, status, **fields))

    async def _wait_for_service(self, budget: Budget, act: Callable[[], Awaitable[T]]) -> T:
        """Repeat `act` while the service does not answer: an outage must not cost an attempt. Raises `ServiceError` for its answers."""
        with budget.pause():
            while True:
                try:
                    return await act()
                except ServiceUnavailable as error:
                    log.warning("rollout %s waits: %s", self.attempt.session_id, error)
                await asyncio.sleep(LONGEST_PAUSE_SECONDS)

    async def _insist(self, act: Callable[[], Awaitable[T]]) -> T:
        """Repeat `act` while the service fails: giving up would lose the rollout's work. Raises `Superseded` once the node no longer has
        the rollout, and `RequestRefused` for what the service will never take."""
        pause = SHORTEST_PAUSE_SECONDS
        while True:
            try:
                return await act()
            except RequestRefused:
                raise
            except ServiceError as error:
                log.warning("rollout %s waits: %s", self.attempt.session_id, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise every error of an attempt as `RolloutFailed`."""
        try:
            yield
        except (RolloutFailed, Superseded):
            raise
        except (ServiceError, UnknownBaseUrl) as error:
            raise RolloutFailed(Failure.SERVICE_FAILED, str(error)) from error
        except (DiskFull, NoRoom) as error:
            raise RolloutFailed(Failure.NODE_FAILED, str(error)) from error
        except RuntimeFailed as error:
            raise RolloutFailed(Failure.BAD_RUNTIME, str(error)) from error
        except OSError as error:
            what = "the node's disk is full" if error.errno == errno.ENOSPC else "the node failed"
            raise RolloutFailed(Failure.NODE_FAILED, f"{what}: {error}") from error
        except Exception as error:
            log.exception("rollout %s failed on an unexpected error", self.attempt.session_id)
            raise RolloutFailed(Failure.NODE_FAILED, f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def _enter(stage: Stage, budget: Budget) -> AsyncIterator[Permit]:
    """A place in the stage; the budget does not run while waiting for it."""
    with budget.pause():
        permit = await stage.enter()
    try:
        yield permit
    finally:
        permit.leave()


def join_output(stdout: bytes, stderr: bytes) -> str:
    """The end of what an agent printed."""
    parts = [("", stdout), ("\n[stderr]\n", stderr)]
    return "".join(title + _read_end(output) for title, output in parts if output)


def _read_end(output: bytes) -> str:
    text = output[-OUTPUT_BYTES:].decode("utf-8", "replace")
    return text if len(output) <= OUTPUT_BYTES else f"[… the end of {len(output)} bytes …]\n{text}"
