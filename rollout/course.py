"""The course of one attempt on a node: its stages in order, and how each failure ends it."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec

from contract.attempts import AttemptId, Failure, FailureRecord, Status, Superseded, TakenRollout, Verdict
from contract.client import hold_seconds
from contract.errors import (
    HeldBack,
    NoAnswer,
    RequestRefused,
    ResourceConflict,
    ResourceNotFound,
    ServiceError,
    ServiceUnavailable,
)
from contract.tasks import Task
from reconstruct.roles import RoleRule, encode_rule
from rollout.attempts import RETRIED, RolloutFailed, runtime_name
from rollout.evaluation import Evaluation
from rollout.evaluators.base import Run, shorten
from rollout.harnesses.catalogue import find_definition
from rollout.harnesses.definition import Harness
from rollout.harnesses.limits import Limits, read_window
from rollout.harnesses.prepared import UnknownBaseUrl
from rollout.logs import AttemptLogs
from rollout.offer import WorkingKinds
from rollout.runtimes.base import DiskFull, NoRoom, Runtime, RuntimeFailed
from rollout.sessions import OpenSession, Sessions, describe_model, find_first_model
from rollout.stages import Budget, Permit, Stage, within
from rollout.steps import (
    HarnessRun,
    NodeContext,
    carry_out,
    check_run,
    install_harness,
    remove,
)
from rollout.work import WorkUnavailable

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
                await self._conclude(verdict)
        except Superseded as superseded:
            log.info("rollout %s is no longer this node's: %s", self.attempt.session_id, superseded)

    async def _reach_verdict(self) -> Verdict | None:
        """The stored verdict; None if the rollout waits for its next attempt."""
        if self._taken.resumed:
            return self._taken.state.verdict
        try:
            with self._translate_errors():
                verdict = await self._attempt()
        except RolloutFailed as failed:
            # It may quote what the agent wrote, at any length and in any encoding.
            failure = FailureRecord(failed.failure, shorten(failed.message), failed.look or self._logs.place())
            log.warning("rollout %s: %s: %s", self.attempt.session_id, failure.failure, failure.message)
            if await self._give_up(failure):
                return None
            verdict = Verdict("timeout" if failure.failure in TIMEOUTS else "failed", failure=failure)
        await self._insist(lambda now: self._parts.work.conclude(self.attempt, verdict, now))
        return verdict

    async def _give_up(self, failure: FailureRecord) -> bool:
        """Whether the rollout is queued again."""
        retry, spared = failure.failure in RETRIED, await self._doubt_runtime(failure.failure)
        again = await self._insist(lambda now: self._parts.work.give_up(self.attempt, failure, now, retry=retry, spared=spared))
        if again:
            # If this fails, the next attempt deletes it.
            with suppress(ServiceError):
                await self._parts.sessions.delete(self.attempt.session_id)
        return again

    async def _doubt_runtime(self, failure: Failure) -> bool:
        """Whether the attempt failed because its kind of runtime does not work on this node now: then it does not count."""
        node_failed = failure is Failure.NODE_FAILED
        if not node_failed and (failure is not Failure.BAD_RUNTIME or self.begun):
            return False
        return await self._offer.doubt(self.kind, node_failed=node_failed)

    async def _conclude(self, verdict: Verdict) -> None:
        """Close the session with the verdict, then end the rollout. Both may be repeated, also by another node."""
        session_id = self.attempt.session_id
        await self._insist(lambda _: close_member(self._parts.sessions, self._task, self.attempt.index, session_id, verdict))
        await self._insist(lambda now: self._parts.work.finish(self.attempt, now))

    async def _attempt(self) -> Verdict:
        # The stack is outside the budget, which must not interrupt the removal of runtimes.
        async with AsyncExitStack() as stack, within(self._task.budgets.total, Failure.TOTAL_TIMEOUT) as budget:
            stack.callback(self._ahead.leave)
            stack.callback(self._reserved.leave)
            self._logs.make()
            await self._forget_earlier_attempts()
            harness = await self._prepare(stack, budget)
            await self._advance("ready", budget)
            running = await stack.enter_async_context(_enter(self._parts.stages.run, budget))
            return await self._run_and_evaluate(harness, running, stack, budget)

    async def _forget_earlier_attempts(self) -> None:
        for number in range(1, self.attempt.attempt):
            await self._parts.sessions.delete(AttemptId(self.attempt.task_id, self.attempt.index, number).session_id)

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
        parts, session_id = self._parts, self.attempt.session_id
        # Without an engine the first call would fail and cost the attempt.
        await self._wait_for_service(budget, parts.sessions.check_ready)
        model, limits = await self._find_model(harness.harness, opened, budget)
        done = await harness.run(parts.url, opened, model, limits)
        # It helps people and nothing depends on it.
        with suppress(ServiceError):
            await parts.sessions.store_log(session_id, join_output(done.stdout, done.stderr))
        calls = await self._wait_for_service(budget, lambda: parts.sessions.list_calls(session_id))
        session = await self._wait_for_service(budget, lambda: parts.sessions.load(session_id))
        check_run(harness, done, calls, session)
        exit_code = None if done.timed_out else done.exit_code
        return Run(session_id, exit_code, done.timed_out, done.stdout, done.stderr, calls)

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
        """Open the session and mark the rollout as running. If the rollout was lost meanwhile, delete the session: its new owner looked for
        it before it existed."""
        session_id = self.attempt.session_id
        sessions, lost = self._parts.sessions, False

        async def open_once() -> OpenSession:
            nonlocal lost
            try:
                return await self._open_member(definition.roles)
            except ServiceUnavailable:
                lost = True
                raise
            except ResourceConflict:
                if not lost:
                    raise
                # It was created, but the answer with its key was lost.
                await sessions.delete(session_id)
                raise NoAnswer(f"the answer to the creation of {session_id} was lost") from None

        opened = await self._wait_for_service(budget, open_once)
        try:
            await self._advance("running", budget, session_id=session_id, logs=self._logs.place())
        except Superseded:
            with suppress(ServiceError):
                await sessions.delete(session_id)
            raise
        return opened

    async def _open_member(self, roles: Sequence[RoleRule]) -> OpenSession:
        """Wait while the service holds the session back. Raises `Superseded` if the rollout gave way: where every slot is taken by rollouts
        that are held back, none that would complete a group gets one, and trainers would wait for ever."""
        attempt, parts = self.attempt, self._parts
        while True:
            try:
                return await open_member(parts.sessions, self._task, attempt.index, attempt.session_id, roles, wait=False)
            except HeldBack as held:
                if await self._insist(lambda now: parts.work.give_way(attempt, now)):
                    raise Superseded("it gave way to rollouts of groups that have begun") from held
                await asyncio.sleep(hold_seconds(held))

    async def _evaluate(self, run: Run, evaluation: Evaluation | None, left: Runtime, budget: Budget) -> Verdict:
        status: Literal["timeout", "completed"] = "timeout" if run.timed_out else "completed"
        failure = self._record_timeout() if run.timed_out else None
        if evaluation is None:
            return Verdict(status, failure=failure)
        await self._advance("evaluating", budget, calls=len(run.calls), exit_code=run.exit_code)
        with budget.pause():
            await evaluation.wait()
        async with within(self._task.budgets.evaluation, Failure.EVALUATOR_TIMEOUT):
            score = await evaluation.score(run, left)
        verdict = Verdict(status, score.reward, score.per_call, score.per_branch, score.feedback, score.metadata, failure)
        await self._post(verdict, budget)
        return verdict

    async def _post(self, verdict: Verdict, budget: Budget) -> None:
        """Post the reward. Raises `RolloutFailed` if the store or the service refuses it: the session could never be closed with such a
        verdict."""
        try:
            msgspec.msgpack.encode(verdict)
            await self._wait_for_service(budget, lambda: post_reward(self._parts.sessions, self.attempt.session_id, verdict))
        except (ResourceNotFound, ResourceConflict):
            # Deleted or closed by someone else, which is handled when it is to be closed.
            pass
        except (RequestRefused, OverflowError, TypeError, ValueError) as error:
            raise RolloutFailed(Failure.BAD_REWARD, f"the evaluator's score is refused: {error}") from error

    def _decide_timeout(self) -> Verdict:
        reward = self._task.agent_timeout_reward if self._task.on_agent_timeout == "reward" else None
        return Verdict("timeout", reward, failure=self._record_timeout())

    def _record_timeout(self) -> FailureRecord:
        message = f"the agent's budget of {self._task.budgets.agent:g} s ran out"
        return FailureRecord(Failure.AGENT_TIMEOUT, message, self._logs.place("agent.err"))

    async def _advance(self, status: Status, budget: Budget, **fields: Any) -> None:
        with budget.pause():
            await self._insist(lambda now: self._parts.work.advance(self.attempt, status, now, fields))

    async def _wait_for_service(self, budget: Budget, act: Callable[[], Awaitable[T]]) -> T:
        """Repeat `act` while the service does not answer: an outage must not cost an attempt. Raises `ServiceError` for its answers."""
        with budget.pause():
            while True:
                try:
                    return await act()
                except (ServiceUnavailable, HeldBack) as error:
                    log.warning("rollout %s waits: %s", self.attempt.session_id, error)
                await asyncio.sleep(LONGEST_PAUSE_SECONDS)

    async def _insist(self, act: Callable[[float], Awaitable[T]]) -> T:
        """Repeat `act`, called with the store's time, while the store or the service fails: giving up would lose the rollout's work.
        Raises `Superseded` once another node has the rollout."""
        pause = SHORTEST_PAUSE_SECONDS
        while True:
            try:
                return await act(await self._parts.work.now())
            except (WorkUnavailable, ServiceError) as error:
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


# Rollouts as sessions of their group.


async def open_member(
    sessions: Sessions, task: Task, index: int, session_id: str, roles: Sequence[RoleRule] = (), *, wait: bool = True
) -> OpenSession:
    """Open a session in the task's group, with the `roles` of the harness's definition. While the service holds new sessions back, `wait`
    or raise `HeldBack`. Raises `ServiceError`."""
    return await sessions.create(
        session_id,
        wait=wait,
        role_rules=[encode_rule(rule) for rule in roles] or None,
        **task.session_fields(index),
    )


async def close_member(
    sessions: Sessions, task: Task, index: int, session_id: str, verdict: Verdict, *, wait: bool = True
) -> None:
    """Close the session with the verdict, unless the service refuses that for good. May be repeated. Raises `ServiceError`.

    A rollout that failed before it had a session gets an empty one, so that its group does not wait for it; while the service holds new
    sessions back, `wait` or raise `HeldBack`. The session of a successful rollout can only be missing because someone deleted it."""
    try:
        try:
            await _close(sessions, session_id, verdict)
        except ResourceNotFound:
            if not verdict.usable and verdict.status != "completed":
                # Nothing runs in it, and what it would replay may be gone.
                await open_member(sessions, replace(task, fork=None), index, session_id, wait=wait)
                await _close(sessions, session_id, verdict)
        except ResourceConflict as error:
            # Closed by someone else, as idle or by hand, which decided what a trainer gets.
            log.warning("session %s keeps its own status: %s", session_id, error)
    except RequestRefused as error:
        # Every caller would be refused.
        log.error("session %s cannot be closed and is left as it is: %s", session_id, error)


def join_output(stdout: bytes, stderr: bytes) -> str:
    """The end of what an agent printed."""
    parts = [("", stdout), ("\n[stderr]\n", stderr)]
    return "".join(title + _read_end(output) for title, output in parts if output)


def _read_end(output: bytes) -> str:
    text = output[-OUTPUT_BYTES:].decode("utf-8", "replace")
    return text if len(output) <= OUTPUT_BYTES else f"[… the end of {len(output)} bytes …]\n{text}"


async def post_reward(sessions: Sessions, session_id: str, verdict: Verdict) -> None:
    """Post what closing the session does not take: all but the bare reward. May be repeated. Raises `ServiceError`."""
    if verdict.reward is not None and (verdict.per_call or verdict.per_branch or verdict.feedback or verdict.metadata):
        metadata = {**verdict.metadata, **({"feedback": verdict.feedback} if verdict.feedback else {})}
        await sessions.reward(
            session_id, verdict.reward, per_call=verdict.per_call, per_branch=verdict.per_branch, metadata=metadata
        )


async def _close(sessions: Sessions, session_id: str, verdict: Verdict) -> None:
    error = None if verdict.failure is None else f"{verdict.failure.failure}: {verdict.failure.message}"
    await post_reward(sessions, session_id, verdict)
    await sessions.close_session(session_id, verdict.status, reward=verdict.reward, error=error)
