"""What a node does where something breaks, comes too late, or is more than the service takes: over the real service and Redis."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import socket
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from contract.attempts import AttemptId, Failure
from contract.errors import NoAnswer
from contract.sessions import Unserved
from contract.tasks import EvaluatorSpec, Exec, HarnessSpec, RuntimeSpec
from proxy.call.writer import FailureNotes
from proxy.errors import BudgetExhausted, EngineFailed, StoreUnavailable
from proxy.store.tasks import keys
from rollout.attempts import RETRIED, RolloutFailed
from rollout.evaluation import Evaluation
from rollout.evaluators import catalogue
from rollout.evaluators.base import Score
from rollout.harnesses.catalogue import load
from rollout.harnesses.definition import Harness, parse
from rollout.logs import AttemptLogs
from rollout.runtimes.base import Executed, Runtime
from rollout.runtimes.command_runtime import CommandRuntime
from rollout.stages import Slots, Stage, within
from rollout.steps import check_run, remove
from tests.support.engine.scripted_engine import Fail, Reply, Say, ScriptedEngine
from tests.support.runtimes.rollout_nodes import (
    ASK,
    SECONDS,
    WatchedNode,
    World,
    a_task,
    failure_of,
    reward_of,
    serving_world,
    unsandboxed,
)
from tests.support.service.running_service import TRAINER


def session_ids(world: World) -> set[str]:
    return {session["session_id"] for session in world.service.request("GET", "/sessions").json()["sessions"]}


async def test_a_node_goes_on_with_others_when_it_cannot_read_a_task(world: World) -> None:
    """It was submitted by a newer build."""
    unreadable = await world.submit(a_task("unreadable", priority=90))
    key = keys.task(unreadable.task_id)
    await world.connection.execute("HSET", key, "body", b"\x92\x63\xc0")
    readable = await world.submit(a_task("readable"))
    async with world.node():
        (state,) = await world.ended(readable)
    assert state.status == "completed", state.verdict


async def test_taking_as_the_drain_begins_costs_a_rollout_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    task = await world.submit(a_task(on_lost_node="fail", max_attempts=1))
    answered, gate = asyncio.Event(), asyncio.Event()
    async with world.node("first") as first:
        take = first._parts.attempts.take

        async def slow(*args: Any) -> Any:
            taken = await take(*args)
            if taken is not None:
                answered.set()
                await gate.wait()
            return taken

        monkeypatch.setattr(first._parts.attempts, "take", slow)
        await answered.wait()
        first.drain()
        await asyncio.sleep(0)
        gate.set()
        async with world.node("second"):
            (state,) = await world.ended(task)
    assert (state.status, state.node, state.failures) == ("completed", "second", ())


async def test_a_rollout_whose_node_is_stopped_goes_on_elsewhere_and_has_lost_no_attempt(world: World) -> None:
    task = await world.submit(a_task(instruction=f"{ASK}\ntest -e {world.folder}/go || sleep 600", max_attempts=1))
    async with world.node("first"):

        async def asked() -> bool:
            return [state.status for state in await world.tasks.load_rollouts("t")] == ["running"]

        await world.until(asked, "it runs")
    (world.folder / "go").touch()
    async with world.node("second"):
        (state,) = await world.ended(task)
    assert (state.status, state.node) == ("completed", "second"), state.verdict
    assert [failure.failure for failure in state.failures] == [Failure.NODE_LOST]


async def test_a_session_that_was_opened_too_late_is_taken_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    task = await world.submit(a_task())
    asked, gate = asyncio.Event(), asyncio.Event()
    async with world.node("first") as first:
        opens = first._parts.attempts.open

        async def slow(*args: Any, **fields: Any) -> Any:
            asked.set()
            await gate.wait()
            return await opens(*args, **fields)

        monkeypatch.setattr(first._parts.attempts, "open", slow)
        await asked.wait()
        await first.vanish()
        await world.let_leases_run_out()
        async with world.node("second"):
            (state,) = await world.ended(task)
        gate.set()
        await world.until(lambda: not courses(first), "the first has seen that it is no longer its own")
    assert (state.status, state.session_id) == ("completed", "t.0.2")
    assert session_ids(world) == {"t.0.2"}


def courses(node: WatchedNode) -> int:
    return len(node._courses)


def too_large(case: Any) -> dict[str, Any]:
    return {"reward": 1.0, "metadata": {"count": 2**70}}


async def test_a_score_that_cannot_be_kept_is_no_reward(world: World) -> None:
    scored = EvaluatorSpec("python", {"entry": f"{__name__}:too_large"}, fresh_runtime=False)
    (state,) = await world.run(a_task(evaluator=scored))
    assert (failure_of(state).failure, state.attempt) == (Failure.BAD_REWARD, 1), failure_of(state).message


def quoting_a_file_name(case: Any) -> float:
    raise ValueError("no reward for " + os.fsdecode(b"caf\xe9.txt") + " " * 2**20)


async def test_a_failure_is_kept_whatever_its_message_quotes_of_the_agents(world: World) -> None:
    """The name is no UTF-8, as the agent's files may be called."""
    scored = EvaluatorSpec("python", {"entry": f"{__name__}:quoting_a_file_name"}, fresh_runtime=False)
    task = await world.submit(a_task(evaluator=scored))
    async with world.node():
        (state,) = await asyncio.wait_for(world.ended(task), SECONDS)
    assert (failure_of(state).failure, state.attempt) == (Failure.EVALUATOR_FAILED, 1)
    assert "no reward for caf?.txt" in failure_of(state).message and len(failure_of(state).message) < 2**16


@pytest.mark.parametrize(
    "error",
    [
        KeyError("score"),
        TimeoutError("no answer"),
        socket.gaierror(-2, "no such host"),
        FileNotFoundError(2, "no rules"),
        asyncio.CancelledError("a task of its own"),
        SystemExit(2),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_broken_evaluator_is_not_the_nodes_failure(
    world: World, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def evaluate(case: Any) -> Any:
        raise error

    monkeypatch.setattr(catalogue, "load", lambda name: SimpleNamespace(name=name, needs_runtime=False, evaluate=evaluate))
    (state,) = await world.run(a_task())
    assert (failure_of(state).failure, state.attempt) == (Failure.EVALUATOR_FAILED, 1)
    assert type(error).__name__ in failure_of(state).message


async def test_an_evaluator_without_room_on_its_node_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count()

    async def evaluate(case: Any) -> Any:
        if next(asked) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return Score(1.0)

    monkeypatch.setattr(catalogue, "load", lambda name: SimpleNamespace(name=name, needs_runtime=False, evaluate=evaluate))
    (state,) = await world.run(a_task())
    assert ([failure.failure for failure in state.failures], state.status) == ([Failure.NODE_FAILED], "completed")


async def test_an_unreachable_fresh_runtime_is_not_the_evaluators_fault(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    warm, asked = Evaluation._warm, count()

    async def fail_once(self: Evaluation) -> Runtime:
        if next(asked) == 0:
            raise ConnectionRefusedError("no daemon")
        return await warm(self)

    monkeypatch.setattr(Evaluation, "_warm", fail_once)
    scored = EvaluatorSpec("command", {"command": "true"}, runtime=unsandboxed())
    (state,) = await world.run(a_task(evaluator=scored))
    assert ([failure.failure for failure in state.failures], state.status) == ([Failure.NODE_FAILED], "completed")


async def test_a_rollout_ends_also_when_the_service_will_never_take_its_session(world: World) -> None:
    """The metadata is no JSON: it came from a client that did not check it."""
    (state,) = await world.run(a_task(prepare=(Exec("exit 3"),), metadata={"score": float("nan")}))
    assert (state.status, failure_of(state).failure) == ("failed", Failure.PREPARE_FAILED)


async def test_what_is_collected_outside_of_the_workdir_comes_to_where_it_was(world: World) -> None:
    left = world.folder / "left.txt"
    again = f"test -s {left} && test -s said.txt && ! test -e .{left}"
    scored = EvaluatorSpec("command", {"command": again}, collect=("said.txt", str(left)), runtime=unsandboxed())
    (state,) = await world.run(a_task(instruction=f"{ASK}\necho left > {left}", evaluator=scored))
    assert reward_of(state) == 1.0, state.verdict


FAILS = "echo '<testsuite><testcase name=\"a\"><failure/></testcase></testsuite>' > report.xml"


@pytest.mark.parametrize(
    ("spec", "left"),
    [
        (EvaluatorSpec("command", {"command": "! test -s checks/t", "files": {"checks/t": "t"}}), "checks/a checks ."),
        (EvaluatorSpec("command", {"command": "exit 1", "remove": ["checks"]}, fresh_runtime=False), "checks/a checks"),
        (EvaluatorSpec("pytest", {"command": FAILS}), "report.xml/a report.xml ."),
    ],
    ids=["files", "remove", "report"],
)
async def test_no_agent_escapes_its_reward_by_what_may_not_be_written(world: World, spec: EvaluatorSpec, left: str) -> None:
    first, *closed = left.split()
    made = f"mkdir -p {PurePosixPath(first).parent}\ntouch {first}\nchmod 500 {' '.join(closed)}"
    ask = ASK.replace(sys.executable, "/usr/bin/python3")
    (state,) = await world.run(
        a_task(instruction=f"{ask}\n{made}", evaluator=spec, runtime=RuntimeSpec(memory_mb=256, cpus=0.1))
    )
    assert (state.status, state.attempt) == ("completed", 1), (state.verdict, state.failures)
    assert reward_of(state) == 0.0


async def test_what_an_agents_own_tar_adds_to_what_is_collected_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container it is root, and may put a program of its own in place of `tar`. The list says what its work may consist of."""

    async def download(self: Any, paths: Any, *, bound_bytes: int) -> bytes:
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w:gz") as archive:
            for name in ("said.txt", "conftest.py"):
                member = tarfile.TarInfo(name)
                member.size = 11
                archive.addfile(member, io.BytesIO(b"hello world"))
        return whole.getvalue()

    monkeypatch.setattr(CommandRuntime, "download", download)
    scored = EvaluatorSpec("command", {"command": "test -s said.txt"}, collect=("./said.txt",), runtime=unsandboxed())
    forged = await world.submit(a_task("forged", evaluator=scored))
    whole = await world.submit(a_task("whole", evaluator=replace(scored, collect=("said.txt", "."))))
    async with world.node():
        (refused,), (taken,) = await world.ended(forged), await world.ended(whole)
    assert (refused.verdict.failure.failure, refused.attempt) == (Failure.EVALUATOR_FAILED, 1), refused.verdict.failure.message
    assert "'conftest.py'" in refused.verdict.failure.message
    assert taken.verdict.reward == 1.0


class SlowRuntime:
    """Takes as long to remove as it is told."""

    def __init__(self) -> None:
        self.may, self.begun, self.gone = asyncio.Event(), asyncio.Event(), False

    async def stop(self) -> None:
        self.begun.set()
        await self.may.wait()
        self.gone = True


async def test_a_runtime_that_is_being_removed_is_removed_whoever_cancels_it() -> None:
    runtime: Any = SlowRuntime()
    removing = asyncio.create_task(remove(runtime))
    await runtime.begun.wait()
    removing.cancel()
    await asyncio.sleep(0)
    assert not removing.done()
    runtime.may.set()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert runtime.gone


async def test_a_runtime_that_cannot_be_removed_changes_nothing_of_the_rollout(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def stop(self) -> None:
            raise OSError("the daemon is gone")

    runtime: Any = Broken()
    with caplog.at_level(logging.ERROR):
        await remove(runtime)
    assert "could not be removed" in caplog.text


async def test_a_budget_does_not_run_while_its_rollout_waits_for_a_place() -> None:
    from rollout.course import _enter

    stage = Stage(1)
    held = await stage.enter()
    asyncio.get_running_loop().call_later(0.2, held.leave)
    async with within(0.05, Failure.TOTAL_TIMEOUT) as budget, _enter(stage, budget):
        assert stage.busy == 1
    with pytest.raises(RolloutFailed) as failed:
        async with within(0.05, Failure.TOTAL_TIMEOUT) as budget:
            with budget.pause():
                await asyncio.sleep(0.1)
            await asyncio.Event().wait()
    assert failed.value.failure is Failure.TOTAL_TIMEOUT


async def test_a_trainer_does_not_wait_for_a_group_of_which_a_rollout_failed_for_good(world: World) -> None:
    fails = f'case "$OPENAI_BASE_URL" in *t.0.1*) exit 3;; esac\n{ASK}'
    states = await world.run(a_task(instruction=fails, num_samples=3))
    assert [state.status for state in states] == ["failed", "completed", "completed"]
    (letter,) = world.service.request("GET", "/batches/dead").json()["dead_letters"]
    assert (letter["group_id"], sorted(letter["session_ids"])) == ("t", ["t.0.1", "t.1.1", "t.2.1"])
    assert letter["reason"] == "incomplete: 2 of 3 members usable, 1 failed, and they are not replaced"


async def test_a_judge_is_asked_also_while_trainers_are_behind(engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> None:
    """The one group that may be undelivered waits for this very verdict."""
    replies = iter([Say("hello world"), Say('{"score": 10}')])
    engine.script = lambda generation, index: next(replies)
    async with serving_world(redis_url, engine.url, tmp_path, admission={"undelivered_groups": 1}) as world:
        (state,) = await world.run(a_task(evaluator=JUDGED))
    assert reward_of(state) == 1.0, state.verdict


JUDGED = EvaluatorSpec("llm_judge", {"rubric": "10 for a greeting", "model": "policy"}, fresh_runtime=False)


async def test_a_judge_whose_engine_fails_a_call_is_asked_again(world: World, engine: ScriptedEngine) -> None:
    """The agent's work is done: it must not be lost to a replica that restarts."""
    replies: Iterator[Reply] = iter([Say("hello world"), Fail(), Fail(), Say('{"score": 10}')])
    engine.script = lambda generation, index: next(replies)
    (state,) = await world.run(a_task(evaluator=JUDGED))
    assert (state.status, state.attempt, state.failures) == ("completed", 1, ())
    assert reward_of(state) == 1.0


async def test_an_evaluator_whose_judge_refuses_the_question_is_not_tried_again(world: World, engine: ScriptedEngine) -> None:
    """Such as one that is too long: the next attempt of the agent would end there, too."""
    asked = count()
    engine.script = lambda generation, index: Fail(status=400, message="too long") if next(asked) else Say("hello world")
    (state,) = await world.run(a_task(evaluator=JUDGED))
    assert (failure_of(state).failure, state.attempt) == (Failure.EVALUATOR_FAILED, 1), state.failures
    assert "too long" in failure_of(state).message


async def test_a_group_that_has_begun_is_completed_by_a_node_whose_only_slot_is_wanted_by_another(
    engine: ScriptedEngine, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers are behind, so the more urgent task is held back. It kept the slot, and the group stayed incomplete for ever."""
    monkeypatch.setattr("proxy.store.tasks.work.HOLD_SECONDS", 1.0)
    monkeypatch.setattr("contract.client.LONGEST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("rollout.node.LOOK_SECONDS", 0.2)
    monkeypatch.setattr("proxy.tasks.takes.LOOK_SECONDS", 0.2)
    gate = tmp_path / "gate"
    async with serving_world(redis_url, engine.url, tmp_path, admission={"undelivered_groups": 1}) as world:
        begun = await world.submit(a_task("begun", f"{ASK}\nuntil test -e {gate}; do sleep 0.1; done", num_samples=2))
        async with world.node(slots=Slots(prepare=1, ready=0, run=1, evaluate=1)):
            await world.until(lambda: session_ids(world) == {"begun.0.1"}, "its group has begun")
            urgent = await world.submit(a_task("urgent", priority=90, max_attempts=1))
            gate.touch()
            states = await world.ended(begun)
            assert world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).status_code == 200
            (held,) = await world.ended(urgent)
    assert [(state.status, state.attempt) for state in states] == [("completed", 1)] * 2
    assert (held.status, held.attempt, held.failures) == ("completed", 2, ()), held.verdict


SERVED = {"call_id": "a", "status": "finished", "started_at": 2.0}
DIED = {"call_id": "b", "status": "dangling", "started_at": 3.0}


def judge_run(
    folder: Path, done: Executed, calls: list[Any], session: Any = None, harness: Harness | None = None
) -> Failure | None:
    """Why the run of an agent that ended so is a failed attempt; None: it is scored."""
    run: Any = SimpleNamespace(harness=harness or load("pi"), logs=AttemptLogs("n", folder, AttemptId("t", 0, 1)))
    try:
        check_run(run, done, calls, session or {})
    except RolloutFailed as failed:
        return failed.failure
    return None


@pytest.mark.parametrize("exit_code", [0, 1, 130])
def test_an_agent_that_its_sessions_budget_ended_is_scored_however_it_took_that(tmp_path: Path, exit_code: int) -> None:
    """What it did until then is what the policy did; another attempt would end there, too."""
    refused = {"call_id": "b", "at": 3.0, "code": BudgetExhausted.code, "message": "the budget is spent"}
    assert judge_run(tmp_path, Executed(exit_code, b"", b""), [SERVED], {"unserved": refused}) is None


def test_an_agent_that_exits_with_its_code_for_finished_work_is_scored_if_the_last_reply_ended_it(tmp_path: Path) -> None:
    definition = parse({"dialect": "chat", "argv": ["agent"], "finished_exit_codes": [1]}, "mine")
    state = {"role": "main", "status": "finished", "delivered": True, "invalid_tool_call": False, "started_at": 2.0}
    ends = {**state, "call_id": "a", "finish_reason": "stop", "reply": {"content": "Done."}}
    acts = {**ends, "call_id": "b", "finish_reason": "tool_calls", "started_at": 3.0}
    unserved = {"unserved": {"call_id": "c", "at": 3.0, "code": EngineFailed.code, "message": "it broke"}}
    for exit_code, calls, session, failure in (
        (1, [ends], {}, None),
        (1, [ends, acts], {}, Failure.HARNESS_FAILED),
        (2, [ends], {}, Failure.HARNESS_FAILED),
        (137, [ends], {}, Failure.HARNESS_CRASHED),
        (1, [ends], unserved, Failure.SERVICE_FAILED),
        (0, [ends, {**ends, "call_id": "d", "role": "side", "started_at": 4.0}], unserved, Failure.SERVICE_FAILED),
    ):
        assert judge_run(tmp_path, Executed(exit_code, b"", b""), calls, session, definition) is failure


@pytest.mark.parametrize("exit_code", [0, 1])
def test_an_agent_whose_last_call_the_service_died_in_is_tried_again(tmp_path: Path, exit_code: int) -> None:
    """What it does then, giving up well or badly, is nothing that the policy did."""
    assert judge_run(tmp_path, Executed(exit_code, b"", b""), [SERVED, DIED]) is Failure.SERVICE_FAILED
    assert Failure.SERVICE_FAILED in RETRIED
    again = {"call_id": "c", "status": "finished", "started_at": 4.0}
    assert judge_run(tmp_path, Executed(0, b"", b""), [SERVED, again, DIED]) is None


def test_an_agent_that_is_stopped_in_a_call_that_hangs_ran_out_of_its_own_budget(tmp_path: Path) -> None:
    unserved = {"at": 4.0, "call_id": "b", "code": "engine_failed", "message": "it hung"}
    assert judge_run(tmp_path, Executed(143, b"", b"", timed_out=True), [DIED], {"unserved": unserved}) is None


@pytest.mark.parametrize("fails_after", [0, 1])
async def test_an_agent_whose_last_call_failed_is_tried_again(world: World, engine: ScriptedEngine, fails_after: int) -> None:
    """It ends well all the same, and there is no record of that call."""
    asked = count()
    engine.script = lambda generation, index: Fail() if next(asked) == fails_after else Say("hello world")
    (state,) = await world.run(a_task(instruction=f"{ASK}\n{ASK}\ntrue" if fails_after else f"{ASK}\ntrue"))
    (failure,) = state.failures
    assert (failure.failure, state.status, state.attempt) == (Failure.SERVICE_FAILED, "completed", 2)
    assert "engine_failed" in failure.message


async def test_a_call_that_the_store_failed_is_noted_once_that_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.call.writer._LATER_SECONDS", 0.01)
    noted: list[Unserved] = []
    away = count(-3)

    class Store:
        async def note_unserved(self, session_id: str, unserved: Unserved) -> None:
            if next(away) < 0:
                raise StoreUnavailable("away")
            noted.append(unserved)

    turn: Any = SimpleNamespace(scope=SimpleNamespace(cancelled=False), call_id="c", session_id="s")
    afterwork = FailureNotes(Store(), asyncio.Event())  # type: ignore[arg-type]
    for error in (EngineFailed("broke"), StoreUnavailable("away")):
        turn.session_id = error.code
        await afterwork.note_unserved(turn, error)
    async with asyncio.timeout(SECONDS):
        while len(noted) < 2:
            await asyncio.sleep(0.01)
    assert {unserved.code for unserved in noted} == {"engine_failed", "store_unavailable"}
    turn.scope.cancelled = True
    await afterwork.note_unserved(turn, EngineFailed("the harness hung up"))
    await afterwork.settle()
    assert len(noted) == 2


async def test_of_calls_that_the_store_failed_the_last_of_a_session_is_noted_by_one_task_also_in_a_service_that_stops() -> None:
    noted: list[str] = []

    class Store:
        async def note_unserved(self, session_id: str, unserved: Unserved) -> None:
            noted.append(unserved.message)

    turn: Any = SimpleNamespace(scope=SimpleNamespace(cancelled=False), call_id="c", session_id="s")
    stopping = asyncio.Event()
    afterwork = FailureNotes(Store(), stopping)  # type: ignore[arg-type]
    stopping.set()
    for message in ("first", "second", "third"):
        await afterwork.note_unserved(turn, StoreUnavailable(message))
    await afterwork.settle()
    assert noted == ["third"]


async def test_an_agent_that_asked_again_after_a_failure_is_scored(world: World, engine: ScriptedEngine) -> None:
    asked = count()
    engine.script = lambda generation, index: Say("hello world") if next(asked) else Fail()
    (state,) = await world.run(a_task(instruction=f"{ASK}\n{ASK}"))
    assert (state.status, state.attempt, state.calls) == ("completed", 1, 1)


async def test_a_service_that_is_away_for_long_uses_up_no_attempt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is away when the session is to be opened (which it has opened all the same), when its calls are looked at, and when the verdict is
    told (which it has heard); each time for longer than requests are repeated."""
    monkeypatch.setattr("rollout.course.LONGEST_PAUSE_SECONDS", 0.05)
    task = await world.submit(a_task(max_attempts=1))
    away = dict.fromkeys(("open", "list_calls", "finish"), 3)
    async with world.node() as node:
        for name in away:
            attempts = node._parts.attempts
            monkeypatch.setattr(attempts, name, unanswered(getattr(attempts, name), away, name))
        (state,) = await world.ended(task)
    assert (state.status, state.attempt, state.failures) == ("completed", 1, ())
    assert (away["open"], away["list_calls"]) == (0, 0) and away["finish"] < 3


async def test_a_rollout_waits_for_its_model_and_uses_up_no_attempt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of models is refused for a while, then empty, then whole."""
    monkeypatch.setattr("rollout.course.LONGEST_PAUSE_SECONDS", 0.05)
    send = httpx.AsyncClient.send
    answers = [httpx.Response(503), httpx.Response(429), httpx.Response(200, json={"data": []})]

    async def asked(self: httpx.AsyncClient, request: httpx.Request, **more: Any) -> httpx.Response:
        if request.url.path.endswith("/v1/models") and answers:
            return answers.pop(0)
        return await send(self, request, **more)

    monkeypatch.setattr(httpx.AsyncClient, "send", asked)
    env = {"OPENAI_BASE_URL": "{openai}", "OPENAI_API_KEY": "{api_key}"}
    argv = ["sh", "-c", f"test $0 = policy && {ASK}", "{model}", "{prompt}"]
    definition = {"description": "asks", "dialect": "chat", "argv": argv, "env": env}
    (state,) = await world.run(replace(a_task(max_attempts=1), harness=HarnessSpec("asks", definition)))
    assert (state.status, state.attempt, state.failures, answers) == ("completed", 1, (), []), state.verdict


def unanswered(act: Any, away: dict[str, int], name: str) -> Any:
    async def asked(*args: Any, **fields: Any) -> Any:
        if away[name]:
            away[name] -= 1
            await act(*args, **fields)
            raise NoAnswer(f"{name}: no answer")
        return await act(*args, **fields)

    return asked
