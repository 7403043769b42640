"""What breaks on a node's machine, and how a node ends, as those who submit tasks see it: over the real service and Redis."""

from __future__ import annotations

import asyncio
import base64
import io
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.attempts import Failure
from contract.tasks import EvaluatorSpec, Exec, HarnessSpec, RuntimeSpec
from rollout.runtimes.installs import PREFIX
from rollout.stages import Slots
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.runtimes.rollout_nodes import ASK, World, a_task, failure_of, reward_of, serving_world, unsandboxed
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.rollout_service import serving_tasks
from tests.support.service.running_service import ADMIN, TRAINER, RunningService, kept
from tests.support.service.scripted_service import Answer, ScriptedService, json_answer, serving
from tests.support.service.verbatim_process import environment


@pytest.mark.parametrize("install", [[], ["echo trying; exit 3"]], ids=["no way to install it", "the install fails"])
async def test_a_command_that_the_machine_lacks_is_named_and_not_tried_again(world: World, install: list[str]) -> None:
    definition: dict[str, Any] = {"description": "is not there", "dialect": "chat", "argv": ["no-such-agent", "{prompt}"]}
    harness = HarnessSpec("lacking", {**definition, "install": install})
    (state,) = await world.run(replace(a_task(), harness=harness))
    assert (state.status, state.attempt, failure_of(state).failure) == ("failed", 1, Failure.HARNESS_MISSING)
    assert "no-such-agent" in failure_of(state).message and reward_of(state) is None
    assert not install or "exit code 3: trying" in failure_of(state).message


async def test_a_harness_whose_dialect_the_service_lacks_fails_with_the_base_urls_there_are(world: World) -> None:
    definition = {"description": "speaks toy", "dialect": "toy", "argv": ["env"], "env": {"URL": "{base_url:toy}"}}
    (state,) = await world.run(replace(a_task(), harness=HarnessSpec("toys", definition)))
    assert failure_of(state).failure is Failure.SERVICE_FAILED
    assert "{base_url:toy}: the service has no such base URL" in failure_of(state).message


async def test_an_install_that_fails_once_for_all_and_again_for_the_rollout_is_told_with_both_reasons(world: World) -> None:
    """A rollout's own install often fails only for what its sandbox lacks: why the first one did is what helps."""
    line = f"[ ! -w {PREFIX} ] || {{ echo no network; exit 4; }}; echo read-only; exit 3"
    definition = {"description": "is not there", "dialect": "chat", "argv": ["no-such-agent", "{prompt}"], "install": [line]}
    tasks = [
        replace(a_task(name), harness=HarnessSpec("lacking", definition), runtime=RuntimeSpec(memory_mb=256, cpus=0.1))
        for name in ("first", "later")
    ]
    async with world.node():
        for task in tasks:
            (state,) = await world.ended(await world.submit(task))
            assert failure_of(state).failure == Failure.HARNESS_MISSING
            assert "exit code 3: read-only" in failure_of(state).message
            assert "exit code 4: no network" in failure_of(state).message


async def test_a_rollout_for_whose_logs_the_disk_is_full_is_tried_again_and_never_trained_on(world: World) -> None:
    """The logs of the first two attempts cannot be written, as on a disk without room; they cost one session each."""
    for attempt in (1, 2):
        folder = world.folder / "logs" / "t" / f"0.{attempt}"
        folder.mkdir(parents=True)
        (folder / "agent.out").symlink_to("/dev/full")
    (state,) = await world.run(a_task(instruction=f"{ASK}\necho said"))
    assert [failure.failure for failure in state.failures] == [Failure.NODE_FAILED] * 2
    assert all("No space left" in failure.message and failure.look for failure in state.failures)
    assert (state.status, state.attempt) == ("completed", 3)
    (group,) = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).json()["groups"]
    assert {row["session_id"] for row in group["trajectories"]} == {"t.0.3"}


async def test_a_rollout_waits_for_an_engine_instead_of_using_up_its_attempts(world: World, engine: ScriptedEngine) -> None:
    port = int(engine.url.rpartition(":")[2])
    engine.stop()
    with kept(port):
        await world.until(lambda: world.service.request("GET", "/readyz").status_code == 503, "the service misses its engine")
        task = await world.submit(a_task(max_attempts=1))

        async def begun() -> bool:
            return (await world.tasks.load_rollouts("t"))[0].status not in ("queued", "preparing", "ready")

        async with world.node():
            await world.until(begun, "it has its session")
            engine.start(port)
            (state,) = await world.ended(task)
    assert (state.status, state.attempt) == ("completed", 1), state.verdict


async def test_the_runtime_of_an_evaluation_is_made_ready_while_the_agent_works(world: World) -> None:
    """The agent ends only when that is done."""
    gate = world.folder / "gate"
    scored = EvaluatorSpec(
        "command", {"command": "grep -q hello said.txt"}, runtime=unsandboxed(), prepare=(Exec(f"touch {gate}"),)
    )
    (state,) = await world.run(a_task(instruction=f"{ASK}\nuntil [ -e {gate} ]; do sleep 0.1; done", evaluator=scored))
    assert (state.status, reward_of(state)) == ("completed", 1.0), state.verdict


def row_by_row(case: Any) -> dict[str, Any]:
    return {"reward": 0.5, "per_branch": {case.run.calls[-1]["call_id"]: 0.75}, "feedback": "half of it"}


async def test_rewards_of_single_rows_and_feedback_reach_the_trainer_and_those_who_look(world: World) -> None:
    scored = EvaluatorSpec("python", {"entry": f"{__name__}:row_by_row"}, fresh_runtime=False)
    (state,) = await world.run(a_task(evaluator=scored))
    assert (state.verdict.reward, state.verdict.feedback) == (0.5, "half of it")
    assert world.service.request("GET", "/sessions/t.0.1").json()["reward_metadata"] == {"feedback": "half of it"}
    (group,) = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).json()["groups"]
    assert [row["reward"] for row in group["trajectories"]] == [0.75]


async def test_a_tasks_model_sampling_and_metadata_hold_for_its_calls(world: World, engine: ScriptedEngine) -> None:
    """The agent asks for another temperature, and calls the model what it was told."""
    ask = ASK.replace('"model": "policy"', '"model": os.environ["GIVEN"], "temperature": 0.1')
    env = {"OPENAI_BASE_URL": "{openai}", "OPENAI_API_KEY": "{api_key}", "GIVEN": "{model}"}
    definition = {"description": "asks", "dialect": "chat", "argv": ["sh", "-c", ask, "{prompt}"], "env": env}
    task = a_task(
        model="policy", sampling={"temperature": 0.5, "max_tokens": 1, "seed": 7}, metadata={"row": 7}, evaluator=None
    )
    await world.submit(replace(task, harness=HarnessSpec("asks", definition)))
    async with world.node():
        (state,) = await world.ended(task)
    assert state.status == "completed", state.verdict
    assert [engine.last.sampling[name] for name in ("temperature", "max_tokens", "seed")] == [0.5, 1, 7]
    session = world.service.request("GET", "/sessions/t.0.1").json()
    assert session["metadata"] == {"row": 7, "rollout": 0, "harness": "asks"}
    (call,) = world.service.request("GET", "/sessions/t.0.1/calls").json()["calls"]
    assert (call["sampling"]["temperature"], len(call["completion_ids"])) == (0.5, 1)


async def test_a_frozen_model_of_the_pool_judges_the_policy(engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> None:
    """The judge sees the rubric and what the agent wrote; what it says itself is no trainer's."""
    scored = EvaluatorSpec("llm_judge", {"rubric": "Is it a greeting?", "model": "judge", "files": ["said.txt"]})
    with ScriptedEngine("qwen3", model="large", max_model_len=4096) as judge:
        judge.script = lambda generation, index: Say('It is one. {"reason": "well met", "score": 7.5}')
        pool = [engine.url, f"judge={judge.url}"]
        async with serving_world(redis_url, pool, tmp_path, frozen_models=["judge"]) as world:
            (state,) = await world.run(a_task(evaluator=scored))
            leased = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 9}).json()
        asked = judge.last.prompt
    assert (state.verdict.reward, state.verdict.feedback) == (0.75, "well met"), state.verdict
    assert "Is it a greeting?" in asked and "hello world" in asked
    (group,) = leased["groups"]
    assert [(row["session_id"], row["reward"]) for row in group["trajectories"]] == [("t.0.1", 0.75)]


async def test_a_service_elsewhere_is_sent_what_an_agent_did_and_gives_its_rows_their_reward(world: World) -> None:
    """The first time it is in trouble."""
    with serving(ScriptedService()) as elsewhere:
        answer = {"reward": 0.25, "feedback": "so so"}
        elsewhere.script("POST /score", Answer(status=503), json_answer(answer))
        options = {"url": f"{elsewhere.url}/score", "calls": "all", "files": ["said.txt"], "backoff_seconds": 0.1}
        task = await world.submit(a_task(evaluator=EvaluatorSpec("http", options, fresh_runtime=False)))
        async with world.node():
            (state,) = await world.ended(task)
        _, received = elsewhere.received
    assert (state.verdict.reward, state.verdict.feedback) == (0.25, "so so"), state.verdict
    (call,) = received.body["run"]["calls"]
    assert (received.body["session_id"], call["reply"]["content"]) == ("t.0.1", "hello world")
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(received.body["files"]))) as sent:
        held = sent.extractfile("said.txt")
        assert held.read() == b"hello world"
    (group,) = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).json()["groups"]
    assert [row["reward"] for row in group["trajectories"]] == [0.25]


async def test_the_environment_of_a_task_is_there_in_its_steps_and_for_its_agent(world: World) -> None:
    step, agent = Exec('echo "$GIVEN" > prepared'), f'{ASK}\ntest "$GIVEN $(cat prepared) $OWN" = "a  b a  b c"'
    task = a_task(instruction=agent, prepare=(step,), environment={"GIVEN": "a  b"})
    await world.submit(replace(task, harness=HarnessSpec("shell", env={"OWN": "c"})))
    async with world.node():
        (state,) = await world.ended(task)
    assert state.status == "completed", state.verdict


async def test_temporary_files_of_an_agent_have_a_place_where_it_is_told_to_put_them(world: World) -> None:
    """Gemini CLI could run no command: it makes a folder below TMPDIR for each, and TMPDIR was not there."""
    (state,) = await world.run(a_task(instruction=f'{ASK}\ncd "$(mktemp -d)" && test "$PWD" != "${{PWD#"$HOME"/}}"'))
    assert state.status == "completed", state.verdict


async def test_a_node_whose_evaluations_are_behind_begins_no_further_run(world: World) -> None:
    """One is evaluated, the next has ended and keeps its run slot, the third is ready and nothing else is taken."""
    gate, ran = world.folder / "gate", world.folder / "ran"
    scored = EvaluatorSpec("command", {"command": f"until [ -e {gate} ]; do sleep 0.1; done"}, fresh_runtime=False)
    task = await world.submit(a_task(num_samples=4, instruction=f"{ASK}\necho x >> {ran}", evaluator=scored))

    async def counted() -> bool:
        statuses = sorted(state.status for state in await world.tasks.load_rollouts("t"))
        return ran.exists() and ran.read_text() == "x\nx\n" and statuses == ["evaluating", "queued", "ready", "running"]

    async with world.node(slots=Slots(prepare=1, ready=1, run=1, evaluate=1)):
        await world.until(counted, "two have run, one of them is evaluated")
        await asyncio.sleep(0.3)
        assert await counted()
        gate.touch()
        states = await world.ended(task)
    assert [state.status for state in states] == ["completed"] * 4


@pytest.fixture
def task_service(engine: ScriptedEngine, redis_url: str) -> Iterator[RunningService]:
    with serving_tasks(redis_url, engine.url, engine_api="token") as service:
        yield service


async def test_a_node_told_to_end_takes_nothing_and_lets_what_runs_end(world: World, task_service: RunningService) -> None:
    """Before that it takes what asks for no other labels than its own."""
    gate = world.folder / "gate"
    ask = f"{ASK}\nuntil [ -e {gate} ]; do sleep 0.1; done"
    elsewhere = await world.submit(a_task("elsewhere", labels={"zone": "b"}, priority=90))
    running = await world.submit(a_task("running", instruction=ask, labels={"zone": "a", "disk": "fast"}))
    place = ["--url", task_service.url, "--data-dir", str(world.folder), "--name", "n"]
    variables = {
        "VERBATIM_ADMIN_TOKEN": ADMIN,
        "VERBATIM_LOCAL_DIR": str(world.folder / "runtimes"),
        "VERBATIM_LOCAL_SANDBOX": "none",
    }
    labels = ["--label", "zone=a", "--label", "disk=fast", "--label", "more=yes"]
    line = ["node", *place, *labels, "--runtime", "local", "--cpus", "8", "--memory-mb", "8192"]
    node = ForkedVerbatim(line, env=environment(**variables), stdin=subprocess.DEVNULL)
    try:

        async def begun() -> bool:
            return (await world.tasks.load_rollouts("running"))[0].status == "running"

        async def draining() -> bool:
            return [state.draining for state in await world.tasks.list_nodes()] == [True]

        await world.until(begun, "it runs")
        node.send_signal(signal.SIGTERM)
        await world.until(draining, "the node says that it drains")
        await world.submit(a_task("late"))
        gate.touch()
        (state,) = await world.ended(running)
        await world.until(lambda: node.poll() is not None, "the node has ended")
        assert node.returncode == 0
    finally:
        node.kill()
        node.wait()
    assert (state.status, state.attempt) == ("completed", 1), state.verdict
    for task_id in ("late", elsewhere.task_id):
        assert [left.status for left in await world.tasks.load_rollouts(task_id)] == ["queued"]
    assert await world.tasks.list_nodes() == []
