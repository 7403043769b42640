"""One attempt on a node, from its taking to its end: the stages in order, and what becomes of a failure in any of them."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Literal, TypeVar

from reconstruct.roles import RoleRule
from rollout.attempts import (
    RETRIED,
    AttemptId,
    Failure,
    FailureRecord,
    RolloutFailed,
    Status,
    Superseded,
    Verdict,
    runtime_name,
)
from rollout.evaluation import Evaluation
from rollout.evaluators.base import Run
from rollout.harnesses.catalogue import find_definition
from rollout.harnesses.definition import Harness
from rollout.runtimes.base import DiskFull, Runtime, RuntimeFailed
from rollout.sessions import NoAnswer, NoSession, OpenSession, SessionConflict, SessionFailed, SessionRefused, Sessions
from rollout.stages import Budget, Permit, Stage, within
from rollout.steps import (
    AttemptLogs,
    HarnessRun,
    NodeParts,
    carry_out,
    install_harness,
    put_skills,
    remove,
    run_agent,
)
from rollout.store.base import StoreUnavailable, Taken, encode
from rollout.task import Task

log = logging.getLogger(__name__)

T = TypeVar("T")
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
TIMEOUTS = (Failure.TOTAL_TIMEOUT, Failure.PREPARE_TIMEOUT)


class Course:
    """`go` brings the attempt to its end. Cancelled, it leaves no runtime behind and tells nobody: whoever cancels knows why.

    `ahead` is the node's permit to have it taken, given back when its run has ended; `reserved` its CPUs and memory, given back with its
    runtimes."""

    def __init__(self, taken: Taken, ahead: Permit, reserved: Permit, parts: NodeParts) -> None:
        self.attempt: AttemptId = taken.attempt
        self.begun = False
        """Whether the harness may have been started; before that the rollout can be put back."""
        self._taken = taken
        self._task = taken.task
        self._ahead = ahead
        self._reserved = reserved
        self._parts = parts
        self._logs = AttemptLogs(parts.name, parts.logs, taken.attempt)

    async def go(self) -> None:
        try:
            verdict = await self._verdict()
            if verdict is not None:
                await self._conclude(verdict)
        except Superseded:
            log.info("rollout %s is no longer this node's", self.attempt.session_id)

    async def _verdict(self) -> Verdict | None:
        """What is concluded; None when the rollout waits for its next attempt."""
        if self._taken.resumed:
            return self._taken.state.verdict
        try:
            with self._foreseen():
                verdict = await self._attempt()
        except RolloutFailed as failed:
            failure = FailureRecord(failed.failure, failed.message, failed.look or self._logs.place())
            log.warning("rollout %s: %s: %s", self.attempt.session_id, failure.failure, failure.message)
            if await self._queued_again(failure):
                return None
            verdict = Verdict("timeout" if failure.failure in TIMEOUTS else "failed", failure=failure)
        await self._insist(lambda now: self._parts.work.conclude(self.attempt, verdict, now))
        return verdict

    async def _queued_again(self, failure: FailureRecord) -> bool:
        retry = failure.failure in RETRIED
        again = await self._insist(lambda now: self._parts.work.give_up(self.attempt, failure, now, retry=retry))
        if again:
            # The next attempt does it too, where this node cannot.
            with suppress(SessionFailed):
                await self._parts.sessions.delete(self.attempt.session_id)
        return again

    async def _conclude(self, verdict: Verdict) -> None:
        """The session is closed with the verdict, then the rollout ends. Both may be repeated, by another node too."""
        session_id = self.attempt.session_id
        await self._insist(lambda _: close_member(self._parts.sessions, self._task, self.attempt.index, session_id, verdict))
        await self._insist(lambda now: self._parts.work.finish(self.attempt, now))

    # The stages

    async def _attempt(self) -> Verdict:
        # Runtimes are removed outside of the budget: its end must not break that off.
        async with AsyncExitStack() as stack, within(self._task.budgets.total, Failure.TOTAL_TIMEOUT) as budget:
            stack.callback(self._ahead.leave)
            stack.callback(self._reserved.leave)
            self._logs.make()
            await self._forget_earlier_attempts()
            harness = await self._prepared(stack, budget)
            await self._advance("ready", budget)
            running = await stack.enter_async_context(_turn(self._parts.stages.run, budget))
            return await self._run_and_evaluated(harness, running, stack, budget)

    async def _forget_earlier_attempts(self) -> None:
        for number in range(1, self.attempt.attempt):
            await self._parts.sessions.delete(AttemptId(self.attempt.task_id, self.attempt.index, number).session_id)

    async def _prepared(self, stack: AsyncExitStack, budget: Budget) -> HarnessRun:
        task = self._task
        async with _turn(self._parts.stages.prepare, budget), within(task.budgets.prepare, Failure.PREPARE_TIMEOUT):
            kind, route, node = self._parts.kinds[task.runtime.kind], self._parts.route, self._parts.name
            definition = find_definition(task.harness)
            name = runtime_name(node, self.attempt, "i")
            installed = await install_harness(kind, task, definition, name, route, self._logs)
            runtime = kind.make(installed.spec, runtime_name(node, self.attempt, "r"), route)
            stack.push_async_callback(remove, runtime)
            await runtime.start()
            await carry_out(task.prepare, runtime, task.environment, self._logs)
            harness = HarnessRun(definition, task, runtime, self._logs, installed.failure)
            await harness.install()
            await put_skills(harness)
            return harness

    async def _run_and_evaluated(self, harness: HarnessRun, running: Permit, stack: AsyncExitStack, budget: Budget) -> Verdict:
        spec = self._task.evaluator
        evaluation = Evaluation(self._parts, self._task, spec, self.attempt, self._logs) if spec else None
        if evaluation is not None:
            evaluation.begin()
            stack.push_async_callback(evaluation.drop)
        self.begun = True
        opened = await self._opened(harness.harness, budget)
        run = await run_agent(self._parts, harness, opened, self.attempt, lambda act: self._patiently(budget, act))
        if run.timed_out and self._task.on_agent_timeout != "evaluate":
            return self._agent_timed_out()
        # The run slot is kept until there is room: a node that cannot evaluate must not run ahead.
        async with _turn(self._parts.stages.evaluate, budget):
            running.leave()
            self._ahead.leave()
            return await self._evaluated(run, evaluation, harness.runtime, budget)

    async def _opened(self, definition: Harness, budget: Budget) -> OpenSession:
        """Its session, and the rollout is running. A session that came to be too late is taken away: whoever has the rollout by now
        looked for it before it was there."""
        session_id = self.attempt.session_id
        sessions, lost = self._parts.sessions, False

        async def open_it() -> OpenSession:
            nonlocal lost
            try:
                return await open_member(sessions, self._task, self.attempt.index, session_id, definition.roles)
            except NoAnswer:
                lost = True
                raise
            except SessionConflict:
                if not lost:
                    raise
                # It was made, and the answer that told its key did not come.
                await sessions.delete(session_id)
                raise NoAnswer(f"the answer to the making of {session_id} was lost") from None

        opened = await self._patiently(budget, open_it)
        try:
            await self._advance("running", budget, session_id=session_id, logs=self._logs.place())
        except Superseded:
            with suppress(SessionFailed):
                await sessions.delete(session_id)
            raise
        return opened

    async def _evaluated(self, run: Run, evaluation: Evaluation | None, left: Runtime, budget: Budget) -> Verdict:
        status: Literal["timeout", "completed"] = "timeout" if run.timed_out else "completed"
        failure = self._out_of_budget() if run.timed_out else None
        if evaluation is None:
            return Verdict(status, failure=failure)
        await self._advance("evaluating", budget, calls=len(run.calls), exit_code=run.exit_code)
        with budget.waiting():
            await evaluation.warmed()
        async with within(self._task.budgets.evaluation, Failure.EVALUATOR_TIMEOUT):
            score = await evaluation.score(run, left)
        verdict = Verdict(status, score.reward, score.per_call, score.per_branch, score.feedback, score.metadata, failure)
        await self._accepted(verdict, budget)
        return verdict

    async def _accepted(self, verdict: Verdict, budget: Budget) -> None:
        """Raises `RolloutFailed` for what the store or the service does not take: it must not stand as the verdict, with which the
        session could never be closed."""
        try:
            encode(verdict)
            await self._patiently(budget, lambda: post_reward(self._parts.sessions, self.attempt.session_id, verdict))
        except (NoSession, SessionConflict):
            # Deleted or closed by somebody else: what that means is decided when it is to be closed.
            pass
        except (SessionRefused, OverflowError, TypeError, ValueError) as error:
            raise RolloutFailed(Failure.BAD_REWARD, f"what the evaluator gave is refused: {error}") from error

    def _agent_timed_out(self) -> Verdict:
        reward = self._task.agent_timeout_reward if self._task.on_agent_timeout == "reward" else None
        return Verdict("timeout", reward, failure=self._out_of_budget())

    def _out_of_budget(self) -> FailureRecord:
        message = f"the agent's budget of {self._task.budgets.agent:g} s ran out"
        return FailureRecord(Failure.AGENT_TIMEOUT, message, self._logs.place("agent.err"))

    # What the stages are made of

    async def _advance(self, status: Status, budget: Budget, **fields: Any) -> None:
        with budget.waiting():
            await self._insist(lambda now: self._parts.work.advance(self.attempt, status, now, fields))

    async def _patiently(self, budget: Budget, act: Callable[[], Awaitable[T]]) -> T:
        """What `act` gives, tried again for as long as the service does not answer: an attempt is not its to use up. Raises
        `SessionFailed` for what it answers."""
        with budget.waiting():
            while True:
                try:
                    return await act()
                except NoAnswer as error:
                    log.warning("rollout %s waits: %s", self.attempt.session_id, error)
                await asyncio.sleep(LONGEST_PAUSE_SECONDS)

    async def _insist(self, act: Callable[[float], Awaitable[T]]) -> T:
        """What `act` gives at the store's time, tried again for as long as the store or the service is away: to stop here would lose
        the rollout's work. Raises `Superseded` once another node has it."""
        pause = SHORTEST_PAUSE_SECONDS
        while True:
            try:
                return await act(await self._parts.work.now())
            except (StoreUnavailable, SessionFailed) as error:
                log.warning("rollout %s waits: %s", self.attempt.session_id, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    @contextmanager
    def _foreseen(self) -> Iterator[None]:
        """Everything that an attempt can break on, as `RolloutFailed`."""
        try:
            yield
        except (RolloutFailed, Superseded):
            raise
        except SessionFailed as error:
            raise RolloutFailed(Failure.SERVICE_FAILED, str(error)) from error
        except DiskFull as error:
            raise RolloutFailed(Failure.NODE_FAILED, str(error)) from error
        except RuntimeFailed as error:
            raise RolloutFailed(Failure.BAD_RUNTIME, str(error)) from error
        except OSError as error:
            what = "the node's disk is full" if error.errno == errno.ENOSPC else "the node failed"
            raise RolloutFailed(Failure.NODE_FAILED, f"{what}: {error}") from error
        except Exception as error:
            log.exception("rollout %s broke on an error that nobody foresaw", self.attempt.session_id)
            raise RolloutFailed(Failure.NODE_FAILED, f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def _turn(stage: Stage, budget: Budget) -> AsyncIterator[Permit]:
    """A place in the stage, for which it waits without its budget running."""
    with budget.waiting():
        permit = await stage.enter()
    try:
        yield permit
    finally:
        permit.leave()


# A verdict into its session: what a trainer gets of a rollout, and how its group learns of one that gives nothing.


async def open_member(
    sessions: Sessions, task: Task, index: int, session_id: str, roles: Sequence[RoleRule] = ()
) -> OpenSession:
    """A new session that is a member of the task's group; `roles` are those of its harness's definition. Waits while the service holds
    new sessions back. Raises `SessionFailed`."""
    return await sessions.create(
        session_id,
        task_id=task.task_id,
        group_id=task.task_id,
        group_size=task.num_samples,
        metadata={**task.metadata, "rollout": index, "harness": task.harness.name},
        sampling=task.sampling or None,
        group=task.group,
        replacements=False,
        echo_policy=task.echo_policy,
        budgets=task.budgets.of_session,
        roles=roles,
    )


async def close_member(sessions: Sessions, task: Task, index: int, session_id: str, verdict: Verdict) -> None:
    """Returns when the session is closed with the verdict, or the service will never take that; it may be repeated. Raises
    `SessionFailed`.

    A rollout that failed before it had a session gets an empty one: its group must not wait for it. A session of a rollout that did
    well is gone only because somebody deleted it."""
    try:
        await _close_or_open(sessions, task, index, session_id, verdict)
    except SessionRefused as error:
        # It would be refused for ever, whoever asked.
        log.error("session %s cannot be closed and is left as it is: %s", session_id, error)


async def post_reward(sessions: Sessions, session_id: str, verdict: Verdict) -> None:
    """What of the verdict goes beyond the one number that closing takes; it may be repeated. Raises `SessionFailed`."""
    if verdict.reward is not None and (verdict.per_call or verdict.per_branch or verdict.feedback or verdict.metadata):
        metadata = {**verdict.metadata, **({"feedback": verdict.feedback} if verdict.feedback else {})}
        await sessions.reward(
            session_id, verdict.reward, per_call=verdict.per_call, per_branch=verdict.per_branch, metadata=metadata
        )


async def _close_or_open(sessions: Sessions, task: Task, index: int, session_id: str, verdict: Verdict) -> None:
    try:
        await _close(sessions, session_id, verdict)
    except SessionConflict as error:
        # Closed by somebody else, as an idle one or by hand: what a trainer gets of it was decided there.
        log.warning("session %s keeps its own status: %s", session_id, error)
    except NoSession:
        if verdict.usable or verdict.status == "completed":
            return
        await open_member(sessions, task, index, session_id)
        await _close(sessions, session_id, verdict)


async def _close(sessions: Sessions, session_id: str, verdict: Verdict) -> None:
    await post_reward(sessions, session_id, verdict)
    error = None if verdict.failure is None else f"{verdict.failure.failure}: {verdict.failure.message}"
    await sessions.close_session(session_id, verdict.status, reward=verdict.reward, error=error)
