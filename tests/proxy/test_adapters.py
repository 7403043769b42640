"""Several LoRA adapters on one engine: which one a call gets, whose its row is, and which version each of its tokens has."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.scripted_engine import Generation, Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import TRAINER, RunningService, wait_until
from trainer_client import TrainerClient

QUESTION = {"role": "user", "content": "hello"}


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(adapters=["a", "b"]) as engine:
        yield engine


def push(service: RunningService, model: str, version: int, path: Path | str, mode: str = "keep") -> dict[str, Any]:
    kind = "lora" if model else "full"
    body = {"version": version, "path": str(path), "kind": kind, "mode": mode, "model": model}
    answer = service.request("POST", "/weights", json=body)
    assert answer.status_code == 200, answer.text
    pushed: dict[str, Any] = answer.json()
    return pushed


def asked_of(engine: ScriptedEngine) -> list[str]:
    """The models that the engine was asked to sample from, by their own names."""
    return [generation.body["model"].partition("@v")[0] for generation in engine.generations]


def statuses(service: RunningService) -> dict[str, str]:
    return {each["policy"]: each["status"] for each in service.request("GET", "/engines").json()["replicas"]}


@pytest.mark.parametrize("api", ["token", "chat"])
def test_agents_of_one_session_that_use_different_adapters_have_rows_of_their_own_policies(
    api: str, engine: ScriptedEngine, redis_url: str, tmp_path: Path
) -> None:
    with RunningService(engine.url, redis_url, engine_api=api) as service:
        assert push(service, "a", 3, tmp_path)["applied"]
        session = service.session(group_id="g", group_size=1)
        first = session.answer([QUESTION], model="a", max_tokens=8)
        session.answer([{"role": "user", "content": "a sub-agent's task"}], model="b", max_tokens=8)
        session.answer([QUESTION, first, {"role": "user", "content": "go on"}], model="a", max_tokens=8)
        session.answer([{"role": "user", "content": "judge it"}], model="policy", max_tokens=8)
        assert asked_of(engine) == ["a", "b", "a", "policy"]
        rows, accounting = session.trajectories()
        found = sorted(
            (row["policy"], len(row["call_ids"]), {version for version, _, _ in row["weight_versions"]}) for row in rows
        )
        joined = [("a", 2, {3})] if api == "token" else [row for row in found if row[0] == "a"]
        assert found == [("", 1, {0}), *joined, ("b", 1, {0})]
        assert accounting["exported_tokens"] == accounting["sampled_tokens"] > 0
        session.close(reward=1.0)
        with TrainerClient(service.url, TRAINER, consumer="t") as client:
            for policy, version in (("a", 3), ("b", 0), ("", 0)):
                batch = client.lease(model=policy, max_staleness=0)
                assert batch is not None
                with batch:
                    assert {row.policy for row in batch.rows} == {policy}
                    assert {*batch.row_versions.tolist()} == {version}
                    assert dict(batch.weight_versions) == {"": 0, "a": 3, "b": 0}


def test_a_name_that_no_model_has_means_the_only_adapter_and_the_base_models_name_the_base_model(redis_url: str) -> None:
    """A harness often has a name of its own for the model, and what is trained is the adapter."""
    with ScriptedEngine(adapters=["learner"]) as engine, RunningService(engine.url, redis_url) as service:
        session = service.session()
        for model in ("gpt-5", "learner", "policy"):
            session.answer([QUESTION], model=model, max_tokens=8)
        assert asked_of(engine) == ["learner", "learner", "policy"]
        assert sorted(row["policy"] for row in session.trajectories()[0]) == ["", "learner", "learner"]
        engine.weights.adapters["second"] = "/adapters/second"
        wait_until(lambda: statuses(service).get("second") == "serving", 60, "it is found")
        session.answer([QUESTION], model="gpt-5", max_tokens=8)
        assert asked_of(engine)[3:] == ["policy"]
        (base,) = [each for each in service.request("GET", "/engines").json()["replicas"] if not each["policy"]]
        assert base["notes"] == [
            "has several adapters (learner, second): a call for a name that no model has goes to the base model"
        ]


def test_an_adapter_is_the_policy_that_the_settings_map_it_to(engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> None:
    with RunningService(engine.url, redis_url, policy_models={"writer": ["a", "gpt-5"], "": ["b"]}) as service:
        assert statuses(service) == {"": "serving", "writer": "serving", "b": "serving"}
        session = service.session()
        for model in ("a", "writer", "gpt-5", "b"):
            session.answer([QUESTION], model=model, max_tokens=8)
        assert asked_of(engine) == ["a", "a", "a", "b"]
        assert push(service, "writer", 1, tmp_path)["applied"]
        refused = service.request("POST", "/weights", json={"version": 1, "path": str(tmp_path), "kind": "lora", "model": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert "adapters: 'b', 'writer'" in refused.json()["error"]["message"]


def test_an_engine_may_be_added_with_the_names_of_all_its_models(engine: ScriptedEngine, redis_url: str) -> None:
    with RunningService([], redis_url) as service:
        for _ in range(2):
            added = service.request("POST", "/engines", json={"url": engine.url, "models": ["policy", "a", "b"]})
            assert added.status_code == 201, added.text
            wait_until(lambda: statuses(service) == {"": "serving", "a": "serving", "b": "serving"}, 60, "all serve")
        session = service.session()
        for model in ("a", "policy"):
            session.answer([QUESTION], model=model, max_tokens=8)
        assert asked_of(engine) == ["a", "policy"]


def test_two_models_are_never_one_policy(engine: ScriptedEngine, redis_url: str) -> None:
    """The adapter b has the name of another engine's policy, and the engine of a is called as its adapter is."""
    with ScriptedEngine(model="large") as large, RunningService([engine.url, f"b={large.url}"], redis_url) as service:
        session = service.session()
        session.answer([QUESTION], model="b", max_tokens=8)
        assert (asked_of(engine), asked_of(large)) == ([], ["large"])
        (note,) = service.request("GET", "/engines").json()["replicas"][0]["notes"][:1]
        assert "lists the adapter 'b', which gets no calls: 'b' is a policy with engines of its own" in note
    with RunningService(f"a={engine.url}", redis_url) as service:
        ready = service.request("GET", "/readyz")
        assert (ready.status_code, "its adapter has the same name" in ready.json()["reason"]) == (503, True)


def test_a_call_for_an_adapter_that_its_engine_has_no_more_is_refused(engine: ScriptedEngine, redis_url: str) -> None:
    """Also before the service has looked: it is never answered by another model."""
    with RunningService(engine.url, redis_url) as service:
        session = service.session()
        session.answer([QUESTION], model="a", max_tokens=8)
        del engine.weights.adapters["a"]
        for _ in range(2):
            answer = session.client.with_options(max_retries=0).chat.completions.with_raw_response
            with pytest.raises(Exception, match="no longer has") as refused:
                answer.create(model="a", messages=[QUESTION])
            assert getattr(refused.value, "status_code", 0) == 503
            wait_until(lambda: statuses(service)["a"] == "down", 60, "it was looked for")
        assert [call["status"] for call in session.calls] == ["finished"]


def test_a_push_that_aborts_cuts_the_calls_of_its_adapter_alone(engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> None:
    gate = threading.Event()
    engine.script = lambda generation, index: Say("hello world in Paris", gate=gate, gate_after=2)
    with RunningService(engine.url, redis_url) as service, ThreadPoolExecutor() as pool:
        session = service.session()
        replies = {model: pool.submit(session.answer, [QUESTION], model=model, max_tokens=8) for model in ("a", "b", "policy")}
        engine.wait_for(lambda: sum(len(each.sampled.get(0, ())) for each in engine.generations) == 6)
        assert push(service, "a", 1, tmp_path, "abort")["applied"]
        assert replies["a"].result()["content"] == "hello world"
        gate.set()
        assert {replies[model].result()["content"] for model in ("b", "policy")} == {"hello world in Paris"}
        rows, accounting = session.trajectories()
        assert sorted((row["policy"], sum(row["loss_mask"])) for row in rows) == [("", 5), ("a", 2), ("b", 5)]
        assert accounting["complete"]


def test_a_fork_of_a_session_with_two_adapters_is_replayed_and_sampled_by_them(engine: ScriptedEngine, redis_url: str) -> None:
    with RunningService(engine.url, redis_url) as service:
        origin = service.session()
        first = origin.answer([QUESTION], model="a", max_tokens=8)
        origin.answer([{"role": "user", "content": "task"}], model="b", max_tokens=8)
        origin.answer([QUESTION, first, {"role": "user", "content": "go on"}], model="a", max_tokens=8)
        origin.close(reward=1.0)
        engine.generations.clear()
        fork = service.session(replay={"session_id": origin.session_id, "until": 2})
        again = fork.answer([QUESTION], model="a", max_tokens=8)
        assert again["content"] == first["content"]
        fork.answer([{"role": "user", "content": "task"}], model="b", max_tokens=8)
        fork.answer([QUESTION, again, {"role": "user", "content": "go on"}], model="a", max_tokens=8)
        assert asked_of(engine) == ["a"], "what was recorded is not sampled again"
        assert {row["policy"] for row in fork.trajectories()[0] if sum(row["loss_mask"])} == {"a"}


# Versions per token, whatever is pushed meanwhile.

MODELS = ["a", "b", ""]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["push", "begin", "go on", "restart"]), st.sampled_from(MODELS), st.sampled_from(["keep", "wait"])
    ),
    min_size=3,
    max_size=9,
)
TOKENS = 6


@dataclass(eq=False)
class Flying:
    """A call in flight: what its tokens are to say."""

    model: str
    generation: Generation
    answer: Future[Any]
    gate: threading.Event
    versions: list[int]
    bases: list[int]
    """Of the base model under them."""


class World:
    """One engine with two adapters, a service, and the version that each policy has in truth."""

    def __init__(self, engine: ScriptedEngine, service: RunningService, folder: Path) -> None:
        self.engine, self.service, self.folder = engine, service, folder
        self.current = dict.fromkeys(MODELS, 0)
        self.flying: list[Flying] = []
        self.done: list[Flying] = []
        self.session = service.session()
        self.pool = ThreadPoolExecutor(max_workers=16)

    def push(self, model: str, mode: str) -> None:
        if mode == "wait" and not model and self.flying:
            mode = "keep"
        version = self.current[model] + 1
        folder = self.folder / f"{model or 'base'}-{version}"
        folder.mkdir()
        assert push(self.service, model, version, folder, mode)["applied"]
        self.current[model] = version

    def begin(self, model: str) -> None:
        gate, before = threading.Event(), len(self.engine.generations)
        self.engine.script = lambda generation, index: Say(token_ids=range(10, 10 + TOKENS), gate=gate, gate_after=TOKENS // 2)
        question = {"role": "user", "content": f"question {len(self.flying) + len(self.done)}"}
        answer = self.pool.submit(self.session.answer, [question], model=model or "policy", max_tokens=8)
        self.engine.wait_for(lambda: len(self.engine.generations) > before and self.engine.last.sampled.get(0) is not None)
        generation = self.engine.last
        self.engine.wait_for(lambda: len(generation.sampled[0]) == TOKENS // 2)
        half = TOKENS // 2
        self.flying.append(Flying(model, generation, answer, gate, [self.current[model]] * half, [self.current[""]] * half))

    def go_on(self) -> None:
        if not self.flying:
            return
        call = self.flying.pop(0)
        # An adapter's call ends under the version it began with, the base model's goes on under the new weights.
        then = self.current[""] if not call.model else call.versions[0]
        call.gate.set()
        call.answer.result()
        call.versions += [then] * (TOKENS - len(call.versions))
        call.bases += [self.current[""]] * (TOKENS - len(call.bases))
        self.done.append(call)

    def restart(self) -> None:
        """The engine has lost every version that was pushed, and is given them again."""
        lost = [name for name in self.engine.weights.adapters if "@v" in name]
        if not lost or self.flying:
            return
        for name in lost:
            del self.engine.weights.adapters[name]
        wait_until(self._holds_all, 60, "it has all of them")

    def _holds_all(self) -> bool:
        loaded = [name.split("@v") for name in self.engine.weights.adapters if "@v" in name]
        held = {(adapter, int(rest.partition(".")[0])) for adapter, rest in loaded}
        whole = all((model, version) in held for model, version in self.current.items() if model and version)
        return whole and {*statuses(self.service).values()} == {"serving"}

    def check(self) -> None:
        while self.flying:
            self.go_on()
        calls = {call["started_at"]: call for call in self.session.calls}
        assert len(calls) == len(self.done)
        recorded = {tuple(call["prompt_ids"]): call for call in calls.values()}
        rows, accounting = self.session.trajectories()
        row_of = {call_id: row for row in rows for call_id in row["call_ids"]}
        for flying in self.done:
            call = recorded[tuple(flying.generation.prompt_ids)]
            assert spread(call["weight_versions"]) == flying.versions, (flying.model, call["weight_versions"])
            row = row_of[call["call_id"]]
            assert row["policy"] == flying.model
            assert spread(row["metadata"].get("base_versions", ())) == (flying.bases if flying.model else [])
        assert accounting["quarantined"] == []


def spread(spans: Sequence[list[int]]) -> list[int]:
    """The version of each token."""
    return [version for version, start, end in spans for _ in range(start, end)]


@pytest.fixture(scope="module")
def redis_of_worlds() -> Iterator[RedisServer]:
    from tests.support.service.redis_server import running_redis

    with running_redis() as server:
        yield server


@contextmanager
def world(redis: RedisServer) -> Iterator[World]:
    redis.flushall()
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedEngine(adapters=["a", "b"]) as engine,
        RunningService(engine.url, redis.url) as service,
    ):
        made = World(engine, service, Path(folder))
        yield made
        for call in made.flying:
            call.gate.set()
        made.pool.shutdown()


@pytest.mark.usefixtures("often_visited")
@settings(max_examples=12, deadline=None)
@given(steps=STEPS)
def test_every_token_knows_its_policy_and_version_whatever_is_pushed_meanwhile(
    steps: list[tuple[str, str, str]], redis_of_worlds: RedisServer
) -> None:
    with world(redis_of_worlds) as made:
        for step, model, mode in steps:
            if step == "push":
                made.push(model, mode)
            elif step == "begin":
                made.begin(model)
            elif step == "go on":
                made.go_on()
            else:
                made.restart()
        made.check()
