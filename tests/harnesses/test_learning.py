"""The agents of the learning run: a demonstration is the conversation they have, and one of them learns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import uuid
from pathlib import Path

import pytest

from contract.attempts import ENDED
from examples.learn.agents import AGENTS, make_task, with_agents
from examples.learn.exercises import KINDS, make_exercise
from proxy.store.connection import StoreConnection
from rollout.runtimes.local.runtime import LocalKind
from rollout.runtimes.settings import RuntimeSettings
from rollout.task import read_json
from tests.support.engine.forked_vllm import ForkedVllm
from tests.support.engine.scripted_engine import Generation, Reply, Say, ScriptedEngine
from tests.support.engine.vllm_server import require_vllm
from tests.support.machine import require
from tests.support.runtimes.rollout_nodes import World
from tests.support.service.rollout_service import serving_tasks
from tests.support.sessions.demo_process import judged


def seeing_agents(folder: Path) -> RuntimeSettings:
    seen = with_agents()
    readable = tuple(seen["VERBATIM_LOCAL_READABLE"].split(":"))
    return RuntimeSettings(local_dir=folder / "runtimes", local_path=seen["VERBATIM_LOCAL_PATH"], local_readable=readable)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", AGENTS)
async def test_a_demonstration_is_the_conversation_that_the_agent_has(name: str, redis_url: str, tmp_path: Path) -> None:
    """The model says what the demonstration says; the prompts of both calls, the reward and the count of tokens then follow."""
    require("bwrap")
    agent, exercise = AGENTS[name], make_exercise("order", random.Random(0), "train")
    played = agent.play(exercise, exercise.solution)
    with ScriptedEngine("qwen3") as engine, serving_tasks(redis_url, engine.url, engine_api="token") as service:

        def act_out(generation: Generation, index: int) -> Reply:
            said = played[4 if "<tool_response>" in generation.prompt else 2]
            calls = [
                (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said.get("tool_calls", ())
            ]
            return Say(engine.family.speak(said["content"], calls=calls))

        engine.script = act_out
        # This engine's tokens are short: what is one for the model that learns is several here.
        task = read_json(json.dumps(make_task("t", exercise, agent, 1) | {"sampling": {}}).encode())
        async with contextlib.AsyncExitStack() as stack:
            connection = StoreConnection(redis_url)
            stack.push_async_callback(connection.close)
            world = World(service, redis_url, connection, tmp_path)
            await world.submit(task)
            async with world.node(f"learn-{uuid.uuid4().hex[:8]}", kinds={"local": LocalKind(seeing_agents(tmp_path))}):
                while any(state.status not in ENDED for state in await world.tasks.load_rollouts("t")):
                    await asyncio.sleep(0.2)
            (state,) = await world.tasks.load_rollouts("t")
        assert state.verdict is not None and state.verdict.reward == 1.0, state
        prompts = [generation.prompt for generation in engine.generations]
        assert prompts == [engine.family.render_text(played[:end], agent.tools) for end in (2, 4)]
        sampled = sum(len(ids) for generation in engine.generations for ids in generation.sampled.values())
        assert state.verdict.metadata["completion_tokens"] == sampled


@pytest.mark.case(80)
@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_an_agent_learns_where_the_weights_are_pushed_and_only_there(tmp_path: Path) -> None:
    """`examples.learn` in small, with its own verdict: every token accounted for, recomputed and trained on once."""
    require_vllm()
    require("bwrap")
    model = str(tmp_path / "pushed" / "model")
    short = {
        "pushed": ("--steps", "4", "--held-out", "1"),
        "kept": ("--steps", "2", "--rollouts", "2", "--held-out", "0", "--no-push", "--model", model),
    }
    verdicts = {
        name: judged("examples.learn.learn", tmp_path / name, *words, **ForkedVllm.forking_env())
        for name, words in short.items()
    }
    rewards = {name: verdict["rewards"] for name, verdict in verdicts.items()}
    # A warmed-up model solves a fifth; of the last 64 rollouts of the one that learns, sampled after one to three pushes, half and more.
    assert sum(rewards["pushed"][-2:]) / 2 - sum(rewards["kept"]) / 2 >= 0.15, rewards
    assert verdicts["kept"]["weight_versions"] == [0] and len(verdicts["pushed"]["weight_versions"]) >= 2
    held_out = json.loads((tmp_path / "pushed" / "held-out.json").read_text())
    assert {kind: len(rewards) for kind, rewards in held_out["after"].items()} == dict.fromkeys(KINDS, 1)
