"""A node brings rollouts to their ends: real service, real Redis, local runtimes, and a scripted engine for the model."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.attempts import AttemptId, Failure, RolloutState
from contract.sessions import ForkRequest, Lookahead
from contract.tasks import Budgets, EvaluatorSpec, Exec, HarnessSpec, McpServer, RuntimeSpec, Upload
from rollout import steps
from rollout.attempts import node_prefix, runtime_name
from rollout.runtimes.base import RuntimeFailed
from rollout.runtimes.local.runtime import LocalKind
from rollout.stages import Slots
from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine
from tests.support.machine import unavailable
from tests.support.runtimes.rollout_nodes import ASK, World, a_task, failure_of, reward_of, serving_world
from tests.support.runtimes.runtime_places import no_sandbox
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import TRAINER

SLEEP = "sleep 600"


async def test_the_rollouts_of_a_task_are_run_scored_and_leased_as_one_group(world: World) -> None:
    task = await world.submit(a_task(num_samples=3))
    async with world.node():
        states = await world.ended(task)
    assert [(state.status, state.verdict and state.verdict.reward, state.calls) for state in states] == [
        ("completed", 1.0, 1)
    ] * 3
    leased = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1})
    assert leased.status_code == 200, leased.text
    (group,) = leased.json()["groups"]
    assert group["group_id"] == task.task_id
    assert {row["session_id"] for row in group["trajectories"]} == {state.session_id for state in states}
    assert {row["reward"] for row in group["trajectories"]} == {1.0}


TWO_TURNS = f"""{sys.executable} -S - <<'PYTHON'
import http.client, json, os, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
connection, messages, said = http.client.HTTPConnection(url.netloc), [], open("said.txt", "w")
for question in ("hello", "and then?"):
    messages.append({{"role": "user", "content": question}})
    body = json.dumps({{"model": "policy", "messages": messages}}).encode()
    connection.request("POST", url.path + "/chat/completions", body, headers)
    messages.append(json.load(connection.getresponse())["choices"][0]["message"])
    print(messages[-1]["content"], file=said)
PYTHON
"""


@pytest.mark.case(86)
async def test_the_forks_of_a_rollout_are_a_group_with_rewards_of_their_own(world: World, engine: ScriptedEngine) -> None:
    engine.script = lambda generation, index: Say(f"reply {len(engine.generations)}")
    begun = EvaluatorSpec("command", {"command": "grep -qx 'reply 1' said.txt"}, fresh_runtime=False)
    origin = await world.submit(a_task("origin", TWO_TURNS, evaluator=begun))
    async with world.node():
        (state,) = await world.ended(origin)
        fork = ForkRequest(state.session_id or "", until=1, on_divergence="fail")
        forks = await world.submit(a_task("forks", TWO_TURNS, evaluator=begun, num_samples=3, fork=fork))
        states = await world.ended(forks)
        other = await world.submit(a_task("other", ASK.replace("hello", "other"), max_attempts=1, fork=fork))
        (diverged,) = await world.ended(other)
    assert failure_of(diverged).failure is Failure.SERVICE_FAILED
    assert "replay_diverged" in failure_of(diverged).message
    # Each began with what the origin was told, and was told something else then.
    assert [state.verdict and state.verdict.reward for state in states] == [1.0] * 3
    assert len(engine.generations) == 2 + 3
    leased = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 2}).json()
    (group,) = [each for each in leased["groups"] if each["group_id"] == "forks"]
    assert [each["replayed_tokens"] > 0 for each in group["sessions"]] == [True] * 3
    assert sum(sum(row["loss_mask"]) for row in group["trajectories"]) == sum(
        len(ids) for made in engine.generations[2:] for ids in made.sampled.values()
    )


async def test_a_task_that_looks_ahead_gives_its_agents_the_chosen_replies(world: World, engine: ScriptedEngine) -> None:
    (state,) = await world.run(a_task(lookahead=Lookahead(3)))
    assert reward_of(state) == 1.0
    calls = world.service.request("GET", f"/sessions/{state.session_id}/calls").json()["calls"]
    assert [call["lookahead"] for call in calls] == ["chosen", "not_chosen", "not_chosen"]


async def test_a_fork_whose_replay_went_on_after_a_failure_is_scored(world: World, engine: ScriptedEngine) -> None:
    """A replayed call keeps the start that it had, before the failure: it looked as if nothing had been served since."""
    engine.script = lambda generation, index: Fail() if "other" in generation.prompt else Say("hello world")
    origin = await world.submit(a_task("origin"))
    async with world.node():
        (state,) = await world.ended(origin)
        twice = ASK.replace("hello", "other") + ASK
        (replayed,) = await world.ended(await world.submit(a_task("fork", twice, fork=ForkRequest(state.session_id or ""))))
    assert (replayed.status, replayed.attempt, replayed.failures) == ("completed", 1, ())
    session = world.service.request("GET", f"/sessions/{replayed.session_id}").json()
    assert session["unserved"]["code"] == "engine_failed"
    assert session["replayed_at"] > session["unserved"]["at"]


async def test_what_an_agent_printed_is_kept_apart_and_whole_where_the_rollout_says(world: World) -> None:
    (state,) = await world.run(a_task(instruction=f"{ASK}\necho heard; echo complained >&2"))
    folder = Path(state.logs.partition(":")[2])
    assert (folder / "agent.out").read_text() == "heard\n"
    assert (folder / "agent.err").read_text() == "complained\n"
    shown = world.service.request("GET", f"/ui/sessions/{state.session_id}").text
    assert "heard\n\n[stderr]\ncomplained\n</pre>" in shown


FAILS: dict[Failure, dict[str, Any]] = {
    Failure.HARNESS_FAILED: {"instruction": f"{ASK}\nexit 3"},
    Failure.HARNESS_CRASHED: {"instruction": f"{ASK}\nkill -SEGV $$"},
    Failure.NO_CALLS: {"instruction": "true"},
    Failure.TOTAL_TIMEOUT: {"instruction": SLEEP, "budgets": Budgets(agent=600, total=1)},
    Failure.PREPARE_FAILED: {"prepare": (Exec("echo broken >&2; exit 4"),)},
    Failure.PREPARE_TIMEOUT: {"prepare": (Exec(SLEEP),), "budgets": Budgets(prepare=1)},
    Failure.EVALUATOR_TIMEOUT: {
        "evaluator": EvaluatorSpec("command", {"command": SLEEP}, fresh_runtime=False),
        "budgets": Budgets(evaluation=0.5),
    },
    Failure.BAD_REWARD: {
        "evaluator": EvaluatorSpec("command", {"command": "echo nan", "reward": "number"}, fresh_runtime=False)
    },
}


async def test_every_failure_of_an_attempt_has_its_class_and_is_never_trained_on(world: World) -> None:
    tasks = {failure: await world.submit(a_task(str(failure), **fields)) for failure, fields in FAILS.items()}
    async with world.node():
        states = {failure: (await world.ended(task))[0] for failure, task in tasks.items()}
    sessions = {each["session_id"]: each for each in world.service.request("GET", "/sessions").json()["sessions"]}
    assert {*sessions} == {f"{failure}.0.1" for failure in FAILS}
    for failure, state in states.items():
        assert failure_of(state).failure == failure, failure_of(state).message
        assert failure_of(state).look.startswith("n:/")
        assert reward_of(state) is None and state.attempt == 1
        session = sessions[f"{failure}.0.1"]
        assert session["status"] == state.status != "completed" and session["reward"] is None
    assert world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).status_code == 204


async def test_an_upload_that_cannot_be_read_says_what_it_was(world: World) -> None:
    (state,) = await world.run(a_task(prepare=(Upload("x", source="/nowhere/at/all"),)))
    assert state.verdict and state.verdict.failure and "/nowhere/at/all" in state.verdict.failure.message


async def test_a_prepare_step_is_tried_as_often_as_it_may(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RETRY_SECONDS", 0.01)
    step = Exec("echo x >> tries; test $(wc -l < tries) -ge 3", retries=2)
    (state,) = await world.run(a_task(prepare=(step, Upload("given.txt", content=b"content"), Exec("test -s given.txt"))))
    assert state.status == "completed", state.verdict


async def test_an_agent_that_runs_out_of_its_own_budget_is_data(world: World) -> None:
    """As the task asks, its reward is a fixed one, the score of what it did so far, or none."""
    rewards = {"reward": 0.25, "evaluate": 1.0, "fail": None}

    async def ended(what: Any, seconds: float) -> RolloutState:
        fields: dict[str, Any] = {"on_agent_timeout": what, "agent_timeout_reward": 0.25, "budgets": Budgets(agent=seconds)}
        task = await world.submit(a_task(f"{what}{seconds:g}", instruction=f"{ASK}\n{SLEEP}", **fields))
        return (await world.ended(task))[0]

    async def asked(what: str) -> RolloutState:
        for seconds in (2.0, 20.0):
            state = await ended(what, seconds)
            # On a slow machine it had not asked by then.
            if state.verdict.failure is None or state.verdict.failure.failure != Failure.NO_CALLS:
                return state
        return await ended(what, 60.0)

    async with world.node():
        states = await asyncio.gather(*map(asked, rewards))
    for state, reward in zip(states, rewards.values(), strict=True):
        assert (state.verdict.status, state.verdict.reward) == ("timeout", reward)
        assert state.verdict.failure.failure == Failure.AGENT_TIMEOUT


async def test_a_cancelled_rollout_is_stopped_and_its_late_result_counts_for_nothing(world: World) -> None:
    # By its budgets it would go on for longer than the test waits.
    budgets = Budgets(agent=3600, total=7200)
    task = await world.submit(a_task(instruction=f"{ASK}\n{SLEEP}", budgets=budgets))
    async with world.node(lease_seconds=2.0) as node:
        await world.until(lambda: asks(world) == 1, "the harness works")
        await world.tasks.cancel(task.task_id, 2.0)
        (state,) = await world.ended(task)
        assert state.status == "cancelled"
        await world.until(lambda: not node.busy, "the node has stopped it")
    assert list((world.folder / "runtimes").iterdir()) == []


async def test_a_rollout_of_a_node_that_vanished_is_run_by_another_and_counts_once(world: World) -> None:
    hangs_at_first = f'{ASK}\ncase "$OPENAI_BASE_URL" in *.1/v1) {SLEEP};; esac'
    task = await world.submit(a_task(instruction=hangs_at_first, num_samples=2))
    async with world.node("first") as first:
        await world.until(lambda: asks(world) == 2, "both harnesses work")
        await first.vanish()
        await world.let_leases_run_out()
        async with world.node("second"):
            states = await world.ended(task)
    assert [(state.status, state.attempt, state.node) for state in states] == [("completed", 2, "second")] * 2
    assert [failure.failure for state in states for failure in state.failures] == [Failure.NODE_LOST] * 2
    sessions = world.service.request("GET", "/sessions").json()["sessions"]
    assert {session["session_id"] for session in sessions} == {state.session_id for state in states}
    leased = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 2}).json()
    assert [len(group["trajectories"]) for group in leased["groups"]] == [2]


async def test_a_draining_node_puts_back_what_has_not_begun_and_lets_the_rest_end(world: World) -> None:
    slots = Slots(prepare=1, ready=1, run=1, evaluate=1)
    gate = world.folder / "gate"
    task = await world.submit(a_task(instruction=f"{ASK}\nwhile ! test -e {gate}; do sleep 0.1; done", num_samples=2))
    async with world.node("first", slots=slots) as first:
        await world.until(lambda: asks(world) == 1 and first.busy.get("ready") == 1, "one runs, one is ready")
        first.drain()
        await world.until(lambda: first.busy.get("ready") == 0, "the ready one is put back")
        gate.touch()
        async with world.node("second"):
            states = await world.ended(task)
    assert sorted((state.status, state.node or "") for state in states) == [("completed", "first"), ("completed", "second")]
    assert [state.failures for state in states] == [(), ()]


async def test_a_node_prepares_ahead_no_more_than_its_ready_buffer(world: World) -> None:
    slots = Slots(prepare=2, ready=1, run=1, evaluate=1)
    gate = world.folder / "gate"
    task = await world.submit(a_task(instruction=f"{ASK}\nwhile ! test -e {gate}; do sleep 0.1; done", num_samples=4))

    async def counted() -> bool:
        statuses = sorted(state.status for state in await world.tasks.load_rollouts(task.task_id))
        return statuses == ["queued", "queued", "ready", "running"]

    async with world.node(slots=slots):
        await world.until(counted, "one runs, one is ready")
        await asyncio.sleep(0.3)
        assert await counted()
        gate.touch()
        await world.ended(task)


async def test_nodes_of_one_name_leave_another_services_runtimes_alone(world: World, engine: ScriptedEngine) -> None:
    """The later one ended what the first had running; where it did not, rollouts of one name had one control group, and so none began."""
    gate = world.folder / "gate"
    ask = f"{ASK}\nuntil test -e {gate}; do sleep 0.1; done"
    with running_redis() as redis:
        async with serving_world(redis.url, engine.url, world.folder) as other:
            tasks = [await each.submit(a_task(instruction=ask)) for each in (world, other)]
            async with world.node():
                await world.until(lambda: asks(world) == 1, "the first one's runs")
                async with other.node():
                    await other.until(lambda: asks(other) == 1, "the second one's runs beside it")
                    gate.touch()
                    (first,), (second,) = await world.ended(tasks[0]), await other.ended(tasks[1])
    assert [(state.status, state.attempt, state.node) for state in (first, second)] == [("completed", 1, "n")] * 2
    assert list((world.folder / "runtimes").iterdir()) == []


def test_the_name_of_a_runtime_is_never_used_again() -> None:
    """A task that was deleted and submitted again got the names of its first runtimes, of which a killed node had left control groups."""
    prefix = node_prefix("n" * 300, "http://service")
    names = {runtime_name(prefix, AttemptId("t" * 300, 999_999, 100), what) for what in ("i", "r", "e") for _ in range(50)}
    assert len(names) == 150 and all(name.startswith(prefix) for name in names)
    assert all(re.fullmatch(r"[a-z0-9-]{1,60}", name) for name in names), "an engine's second container adds to it"


@pytest.mark.case(67)
async def test_a_node_that_cannot_sweep_what_it_left_says_so_and_works(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended, and so did every later one of its name."""

    async def refused(self: LocalKind, prefix: str) -> int:
        raise RuntimeFailed("the file system is broken")

    monkeypatch.setattr(LocalKind, "sweep", refused)
    (state,) = await world.run(a_task())
    assert state.status == "completed", state.verdict
    assert "runtimes of kind local that this node left behind cannot be removed" in caplog.text


def asks(world: World) -> int:
    """Calls that were answered, over all sessions."""
    sessions = world.service.request("GET", "/sessions").json()["sessions"]
    return sum(session["calls"] for session in sessions)


async def test_skills_lie_where_the_harness_looks_and_servers_stand_in_its_configuration(world: World) -> None:
    definition = {
        "description": "tells what it finds at home, and asks the model",
        "dialect": "chat",
        "argv": ["sh", "-c", f"cat $HOME/skills/kites/SKILL.md $HOME/mine.json; {ASK}", "{prompt}"],
        "env": {"OPENAI_BASE_URL": "{openai}", "OPENAI_API_KEY": "{api_key}"},
        "files": {"mine.json": '{"plain": true}'},
        "mcp": {"file": "mine.json", "table": "servers", "command": {"run": "{words}"}},
        "skills": "skills",
    }
    harness = HarnessSpec(
        "mine", definition, mcp_servers=(McpServer("s", ("serve", ".")),), skills=(Upload("kites/SKILL.md", b"Hold on.\n"),)
    )
    (state,) = await world.run(replace(a_task(), harness=harness))
    assert state.status == "completed" and state.logs is not None, state.verdict
    told = (Path(state.logs.partition(":")[2]) / "agent.out").read_text()
    skill, _, config = told.partition("\n")
    assert skill == "Hold on." and json.loads(config) == {"plain": True, "servers": {"s": {"run": ["serve", "."]}}}


LIMITED = {
    "dialect": "chat",
    "argv": ["sh", "-c", f"echo $LIMITS; {ASK}", "{prompt}"],
    "env": {
        "OPENAI_BASE_URL": "{openai}",
        "OPENAI_API_KEY": "{api_key}",
        "LIMITS": "{window} {max_input} {reserve} {max_output}",
    },
}


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({}, "8192 6144 2048 2048"),
        ({"model": "policy", "sampling": {"max_tokens": 512}}, "8192 6144 2048 512"),
        ({"budgets": Budgets(agent=60, total=120, max_completion_tokens=1000)}, "8192 6144 2048 1000"),
    ],
    ids=["window", "sampling", "budget"],
)
async def test_a_harness_is_told_the_engines_window_and_what_the_task_may_sample(
    world: World, fields: dict[str, Any], limits: str
) -> None:
    (state,) = await world.run(replace(a_task(**fields), harness=HarnessSpec("limited", LIMITED)))
    assert state.status == "completed" and state.logs is not None, state.verdict
    assert (Path(state.logs.partition(":")[2]) / "agent.out").read_text() == f"{limits}\n"


@pytest.mark.parametrize("engine", [{"names_window": False}], indirect=True)
async def test_a_node_reports_once_that_it_does_not_know_a_window(world: World, caplog: pytest.LogCaptureFixture) -> None:
    states = await world.run(replace(a_task(num_samples=2), harness=HarnessSpec("limited", LIMITED)))
    assert {state.status for state in states} == {"completed"}
    assert len([record for record in caplog.records if "limited is not told it" in record.message]) == 1


@pytest.mark.parametrize("harness", ["shell", "reads"])
async def test_an_instruction_may_be_longer_than_an_argument(world: World, harness: str) -> None:
    env = {"OPENAI_BASE_URL": "{openai}", "OPENAI_API_KEY": "{api_key}"}
    reads = {"description": "reads it", "dialect": "chat", "argv": ["sh", "-s"], "env": env, "stdin": "prompt"}
    spec = HarnessSpec(harness, reads if harness == "reads" else None)
    body = f"{ASK}\n# {'long ' * 40_000}\ntest ${{#OPENAI_API_KEY}} -gt 0"
    (state,) = await world.run(replace(a_task(instruction=body), harness=spec))
    assert state.status == "completed", state.verdict


async def test_a_harness_that_is_missing_is_installed_once_for_all_rollouts(world: World) -> None:
    """It starts in both of them, and is told apart from one that does not by what it leaves undone."""
    if (reason := no_sandbox()) is not None:
        unavailable(reason)
    script = "mkdir -p $NPM_CONFIG_PREFIX/bin && cd $NPM_CONFIG_PREFIX/bin && printf '#!/bin/sh\\necho started\\n' > agent-y"
    install = ["echo installing", f"{script} && chmod +x agent-y"]
    definition = {"description": "only starts", "dialect": "chat", "argv": ["agent-y", "{prompt}"], "install": install}
    spec = RuntimeSpec(memory_mb=256, cpus=0.1)
    states = await world.run(
        replace(a_task(num_samples=2), harness=HarnessSpec("agent-y", definition), runtime=spec, evaluator=None)
    )
    assert [state.verdict and state.verdict.failure and state.verdict.failure.failure for state in states] == [
        Failure.NO_CALLS
    ] * 2
    logs = world.folder / "logs"
    assert [path.read_text() for path in logs.rglob("agent.out")] == ["started\n"] * 2
    assert [path.read_text() for path in logs.rglob("install.out")] == ["installing\n"]
