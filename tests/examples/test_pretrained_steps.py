"""The steps of the learning runs over a real service, Redis and node: a trainer that dies anywhere goes on, and takes every group once."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from examples.demo.plan import TEACHER
from examples.demo.tiny_model import make_tiny_model
from examples.demo.trainer import Recipe
from examples.learn.agents import CliAgent
from examples.pretrained.journal import Journal
from examples.pretrained.policy import Policy
from examples.pretrained.steps import OPTIMIZER, Rules, Training
from examples.tasks_loop.trainer import connected
from tests.support.engine.scripted_engine import Generation, Reply, Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import fresh_engine
from tests.support.machine import require
from tests.support.runtimes.rollout_nodes import World, serving_world
from tests.support.service.running_service import ADMIN, TRAINER

__all__ = ["fresh_engine"]

ASKING = """
import http.client, json, os, sys, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
connection = http.client.HTTPConnection(url.netloc)
connection.request("POST", url.path + "/chat/completions", body, headers)
assert connection.getresponse().status == 200
"""
DEFINITION = {
    "name": "asking",
    "description": "asks once",
    "dialect": "chat",
    "argv": ["python3", "-S", "-c", ASKING, "{prompt}"],
    "env": {"OPENAI_BASE_URL": "{openai}", "OPENAI_API_KEY": "{api_key}"},
}
AGENT = CliAgent("asking", {"definition": DEFINITION}, "", [], "", "", ends_by_command=False, told="0")
RULES = Rules(
    AGENT, steps=4, groups=2, rollouts=2, held_out=1, held_out_every=4, seed=0, push=True, shuffled=False, taught=False
)
DEATHS = [(1, "before its line"), (2, "before the push"), (3, "before the acknowledgement"), (4, "during a trial")]


TOO_SHORT = 8
"""A teacher's window that no call fits into."""


@pytest.fixture
async def world(
    engine: ScriptedEngine, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    """With a teacher, which scores sessions that ask for it; the parameter is its window."""
    require("bwrap")
    monkeypatch.setenv("VERBATIM_ADMIN_TOKEN", ADMIN)
    monkeypatch.setenv("VERBATIM_TRAINER_TOKEN", TRAINER)
    with ScriptedEngine("qwen3", max_model_len=getattr(request, "param", 8192)) as teacher:
        engines, scorers = [engine.url, f"{TEACHER}={teacher.url}"], {TEACHER: {"policy": TEACHER}}
        async with serving_world(redis_url, engines, tmp_path, scorers=scorers) as world:
            yield world


class Killed(BaseException):
    pass


class Dying(Training):
    """It dies at each of DEATHS, once."""

    deaths: ClassVar[list[tuple[int, str]]] = []

    def _put_aside(self, step: int) -> None:
        super()._put_aside(step)
        self._die(step, "before its line")

    def _push(self, step: int) -> None:
        self._die(step, "before the push")
        super()._push(step)
        self._die(step, "before the acknowledgement")

    def _submit(self, bodies: Any) -> None:
        super()._submit(bodies)
        if bodies[0]["task_id"] == "held-out-4-0":
            self._die(4, "during a trial")

    def _die(self, step: int, moment: str) -> None:
        if (step, moment) in self.deaths:
            self.deaths.remove((step, moment))
            raise Killed


def train(world: World, model_dir: Path, rules: Rules = RULES) -> None:
    """As `examples.pretrained.steps.train`, in a process that starts."""
    folder, journal = world.folder, Journal(world.folder / "results.jsonl")
    policy = Policy(model_dir, Recipe(1e-3))
    if done := journal.done:
        policy.load(folder / "weights" / f"version-{done}", folder / "checkpoints" / f"version-{done}" / OPTIMIZER)
    with connected(world.service.url) as (admin, client):
        Dying(rules, policy, journal, folder / "weights", folder / "checkpoints", admin, client).run()


def list_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.case(81)
async def test_a_trainer_that_dies_at_any_moment_goes_on_and_takes_every_group_once(
    engine: ScriptedEngine, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dying, "deaths", [*DEATHS])
    words = itertools.cycle(["yes", "no", "perhaps"])

    def answer(generation: Generation, index: int) -> Reply:
        return Say(next(words))

    engine.script = answer
    model_dir = make_tiny_model(tmp_path / "model", layers=1, hidden_size=64)
    async with world.node(f"steps-{uuid.uuid4().hex[:8]}"):
        for _ in DEATHS:
            with pytest.raises(Killed):
                await asyncio.to_thread(train, world, model_dir)
        await asyncio.to_thread(train, world, model_dir)
    journal = Journal(tmp_path / "results.jsonl")
    steps = journal.read("step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["versions"] for line in steps] == [[0], [1], [2], [3]]
    assert all(line["rollouts"] == 4 and line["sampled_tokens"] == line["exported_tokens"] > 0 for line in steps)
    assert [line["step"] for line in journal.read("held-out")] == [0, 4]
    with connected(world.service.url) as (_, client):
        assert client.weights()["current"]["version"] == 4
        assert client.lease(max_groups=8) is None
    assert list_folders(tmp_path / "weights") == list_folders(tmp_path / "checkpoints") == ["version-3", "version-4"]


async def test_a_teachers_scores_of_all_sampled_tokens_teach_whatever_was_earned(world: World, tmp_path: Path) -> None:
    rules = replace(RULES, steps=1, held_out_every=1, taught=True)
    model_dir = make_tiny_model(tmp_path / "model", layers=1, hidden_size=64)
    async with world.node(f"steps-{uuid.uuid4().hex[:8]}"):
        await asyncio.to_thread(train, world, model_dir, rules)
    journal = Journal(tmp_path / "results.jsonl")
    (line,) = journal.read("step")
    assert line["rollouts"] == 4 and line["learned_groups"] == 2
    assert line["scored_tokens"] == line["learned_tokens"] == line["sampled_tokens"] > 0
    assert [line["step"] for line in journal.read("held-out")] == [0, 1]


@pytest.mark.parametrize("world", [TOO_SHORT], indirect=True)
async def test_groups_whose_required_scores_fail_are_not_waited_for(world: World, tmp_path: Path) -> None:
    rules = replace(RULES, steps=1, held_out_every=1, taught=True)
    model_dir = make_tiny_model(tmp_path / "model", layers=1, hidden_size=64)
    async with world.node(f"steps-{uuid.uuid4().hex[:8]}"):
        with pytest.raises(RuntimeError, match=r"none of 2 groups came; step-1-\d: dropped by the group's rule"):
            await asyncio.to_thread(train, world, model_dir, rules)
    assert [line["step"] for line in Journal(tmp_path / "results.jsonl").read("held-out")] == [0]
