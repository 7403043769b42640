"""The loop through tasks: the agent walks the corridor in its sandbox, what it left is graded there, and on a real engine the trainer
that submits the tasks learns from the groups they become."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contract.attempts import RolloutState
from examples.demo.environment import FITS
from examples.tasks_loop.tasks import task
from rollout.task import read_json
from tests.support.engine.scripted_engine import Generation, Reply, Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import fresh_engine
from tests.support.engine.vllm_server import require_vllm
from tests.support.machine import require
from tests.support.runtimes.rollout_nodes import World, serving_world
from tests.support.service.running_service import TRAINER
from tests.support.sessions.demo_process import judged

__all__ = ["fresh_engine"]

DOORS = ("red", "green", "blue")
STEPS, GROUPS, ROLLOUTS = 3, 2, 2


@pytest.fixture
async def world(engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    require_bubblewrap()
    async with serving_world(redis_url, engine.url, tmp_path) as world:
        yield world


def require_bubblewrap() -> None:
    require("bwrap")


async def rolled_out(world: World, rollouts: int = 1) -> list[RolloutState]:
    submitted = read_json(json.dumps({**task("t", DOORS, rollouts), "task_id": "t"}).encode())
    await world.submit(submitted)
    # Runtimes are told apart by their node's name on the whole machine, on which other tests may be running.
    async with world.node(f"loop-{uuid.uuid4().hex[:8]}"):
        return await world.ended(submitted)


async def test_an_agent_that_knows_the_keys_opens_every_door(engine: ScriptedEngine, world: World) -> None:
    def right_key(generation: Generation, index: int) -> Reply:
        door = re.findall(r"Door: (\w+)", generation.prompt)[-1]
        return Say(engine.family.speak(calls=[("open", {"door": door, "key": FITS[door]})]))

    engine.script = right_key
    states = await rolled_out(world, rollouts=2)
    assert [state.verdict and state.verdict.reward for state in states] == [1.0, 1.0], states
    assert [state.calls for state in states] == [3, 3]
    # What the agents were told of is what a trainer is given.
    told = [state.verdict.metadata["completion_tokens"] for state in states if state.verdict]
    leased = world.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1}).json()
    (group,) = leased["groups"]
    assert sorted(sum(row["loss_mask"]) for row in group["trajectories"]) == sorted(told)


async def test_the_reward_is_the_share_of_doors_and_a_reply_without_a_call_ends_the_attempt(
    engine: ScriptedEngine, world: World
) -> None:
    engine.say(engine.family.speak(calls=[("open", {"door": "red", "key": FITS["red"]})]))
    engine.say(engine.family.speak("I have had enough."))
    (state,) = await rolled_out(world)
    assert state.verdict is not None and state.verdict.reward == pytest.approx(1 / 3), state
    assert (state.status, state.calls) == ("completed", 2)


@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_the_loop_closes_when_a_trainer_only_submits_tasks_and_leases_groups(tmp_path: Path) -> None:
    """The verdict's own checks: every rollout completed; tokens accounted for, recomputed under their versions and trained on once."""
    require_vllm()
    require_bubblewrap()
    sizes = {"--steps": STEPS, "--groups": GROUPS, "--rollouts": ROLLOUTS}
    verdict = judged("examples.tasks_loop.loop", tmp_path, *(str(word) for pair in sizes.items() for word in pair))
    assert verdict["sessions"] == STEPS * GROUPS * ROLLOUTS
    assert verdict["agent_tokens"] == verdict["sampled_tokens"] == verdict["trained_tokens"] == verdict["recomputed_tokens"]
    assert sum(verdict["ages"].values()) == STEPS * GROUPS
    # The last step's tasks were submitted when the weights of the first had been pushed.
    assert verdict["weight_versions"][-1] >= 1
