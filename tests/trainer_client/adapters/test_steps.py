"""Steps of a fixed number of groups, and the example hooks that are built on them, against a scripted service."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from contract.errors import ClientClosed, ServiceUnavailable
from examples.trainers import slime_rollout
from examples.trainers.skyrl_generator import VerbatimGenerator
from tests.support.service.scripted_service import ScriptedService, error_answer, json_answer
from tests.support.sessions.trainer_libraries import checked, recorded
from tests.support.sessions.training_rows import leased, trajectory
from trainer_client import TrainerClient
from trainer_client.adapters.steps import Steps
from trainer_client.errors import InvalidAnswer, LeaseLost
from trainer_client.publish import ReplicaFailed

LEASE = "POST /batches/lease"


@pytest.fixture
def service(scripted_server: ScriptedService) -> ScriptedService:
    """Three leases: two groups, then one, then one."""
    scripted = scripted_server.reset()
    parts = [[[trajectory("a")], [trajectory("b")]], [[trajectory("c")]], [[trajectory("d")]]]
    answers = [leased(*part, lease_id=f"l{at}", weight_version=7 + at) for at, part in enumerate(parts)]
    scripted.script(LEASE, *answers)
    for at in range(3):
        for action in ("ack", "nack"):
            scripted.script(f"POST /batches/l{at}/{action}", json_answer({"groups": []}))
    return scripted


@pytest.fixture
def client(service: ScriptedService) -> Iterator[TrainerClient]:
    with TrainerClient(service.url, "trainer-token", consumer="trainer-1", retry_seconds=5) as client:
        yield client


def ended(service: ScriptedService) -> list[str]:
    return [path.removeprefix("/batches/") for path in service.paths() if not path.endswith("lease")]


def test_a_step_is_joined_from_leases_until_it_has_all_its_groups(service: ScriptedService, client: TrainerClient) -> None:
    steps = Steps(client, 3, max_staleness=4)
    batch = steps.take()
    assert [row.trajectory_id for row in batch.rows] == ["a", "b", "c"] and batch.weight_version == 8
    assert [(request.body["max_groups"], request.body["max_staleness"]) for request in service.received] == [(3, 4), (1, 4)]
    assert batch.columns.group_index.tolist() == [0, 1, 2] and ended(service) == []
    steps.finish()
    assert ended(service) == ["l0/ack", "l1/ack"]


@pytest.mark.parametrize(("behind", "after_two"), [(1, ["l0/ack"]), (2, [])])
def test_a_step_is_acknowledged_so_many_requests_later(
    service: ScriptedService, client: TrainerClient, behind: int, after_two: list[str]
) -> None:
    steps = Steps(client, 2, behind=behind)
    steps.take()
    assert ended(service) == []
    steps.take()
    assert ended(service) == after_two
    steps.finish()
    assert ended(service) == ["l0/ack", "l1/ack", "l2/ack"]


def test_more_groups_than_asked_for_are_given_back(service: ScriptedService, client: TrainerClient) -> None:
    with pytest.raises(InvalidAnswer, match="at most 1 groups has 2"):
        Steps(client, 1).take()
    assert ended(service) == ["l0/nack"]


def test_what_is_out_can_be_given_back(service: ScriptedService, client: TrainerClient) -> None:
    steps = Steps(client, 3)
    steps.take()
    steps.give_back()
    steps.finish()
    assert ended(service) == ["l0/nack", "l1/nack"]


def test_one_lost_lease_is_told_and_the_others_are_acknowledged(service: ScriptedService, client: TrainerClient) -> None:
    service.script("POST /batches/l0/ack", error_answer(409, "conflict", "lease 'l0' expired"))
    steps = Steps(client, 3)
    steps.take()
    with pytest.raises(LeaseLost, match="'l0' expired"):
        steps.take()
    assert "l1/ack" in ended(service)


def test_a_lease_that_cannot_be_acknowledged_is_told_and_the_others_are_no_longer_held(service: ScriptedService) -> None:
    """The parts behind it used to be forgotten unended, while their threads went on extending them."""
    before = set(threading.enumerate())
    service.script("POST /batches/l0/ack", error_answer(503, "store_unavailable", "Redis is down"))
    with TrainerClient(service.url, "trainer-token", retry_seconds=0) as impatient:
        steps = Steps(impatient, 3)
        steps.take()
        with pytest.raises(ServiceUnavailable, match="Redis is down"):
            steps.finish()
    assert ended(service) == ["l0/ack", "l0/nack", "l1/ack"]
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("lease-keeper")]


def test_a_client_closed_while_a_step_is_joined_gives_the_parts_back(service: ScriptedService, client: TrainerClient) -> None:
    stopping = Steps(client, 4, stop=lambda: len(service.received) >= 2)
    with pytest.raises(ClientClosed):
        stopping.take()
    assert sorted(ended(service)) == ["l0/nack", "l1/nack"]


def script_a_push(service: ScriptedService, version: int) -> None:
    """The service serves the version before, and takes one push."""
    service.script("GET /weights", json_answer({"current": {"version": version - 1}}))
    service.script("POST /weights", json_answer({"applied": True, "seconds": 0.1, "replicas": {"e0": {"ok": True}}}))


def pushed(service: ScriptedService) -> list[tuple[int, str]]:
    return [(request.body["version"], request.body["path"]) for request in service.received if "path" in (request.body or {})]


def test_a_checkpoint_is_published_before_its_step_is_acknowledged(service: ScriptedService, client: TrainerClient) -> None:
    script_a_push(service, version=8)
    steps = Steps(client, 2)
    steps.take()
    steps.take("/shared/step-0")
    assert pushed(service) == [(8, "/shared/step-0")]
    assert service.paths()[1:4] == ["/weights", "/weights", "/batches/l0/ack"]


def test_an_unpublished_checkpoint_leaves_the_step_unacknowledged(service: ScriptedService, client: TrainerClient) -> None:
    service.script("GET /weights", json_answer({"current": {"version": 7}}))
    service.script(
        "POST /weights", json_answer({"applied": False, "seconds": 0.1, "replicas": {"e0": {"ok": False, "error": "no"}}})
    )
    steps = Steps(client, 2)
    steps.take()
    with pytest.raises(ReplicaFailed):
        steps.take("/shared/step-0")
    assert ended(service) == ["/weights", "/weights"]


def test_slimes_rollout_function_returns_the_samples_of_a_step_and_publishes_what_was_saved_after_it(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    types, base_types = ModuleType("slime.utils.types"), ModuleType("slime.rollout.base_types")
    types.Sample = recorded("slime.Sample")  # type: ignore[attr-defined]
    base_types.RolloutFnTrainOutput = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slime.utils.types", types)
    monkeypatch.setitem(sys.modules, "slime.rollout.base_types", base_types)
    for name in ("slime", "slime.utils", "slime.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setenv("VERBATIM_URL", service.url)
    monkeypatch.setenv("VERBATIM_TRAINER_TOKEN", "trainer-token")
    slime_rollout._steps.cache_clear()
    args = SimpleNamespace(rollout_batch_size=2, start_rollout_id=4, save_hf="/shared/step-{rollout_id}", save_interval=1)
    output = slime_rollout.generate_rollout(args, 4, None)
    assert [[[sample.metadata["trajectory_id"] for sample in rollout] for rollout in group] for group in output.samples] == [
        [["a"]], [["b"]],
    ]  # fmt: skip
    assert output.metrics == {"staleness_mean": 2.0, "staleness_max": 2}
    assert pushed(service) == []
    script_a_push(service, version=8)
    slime_rollout.generate_rollout(args, 5, None)
    assert pushed(service) == [(8, "/shared/step-4")]
    slime_rollout._steps(2).finish()
    slime_rollout._steps(2)._client.close()
    slime_rollout._steps.cache_clear()


def test_skyrls_generator_returns_a_step_and_publishes_what_is_saved(service: ScriptedService, client: TrainerClient) -> None:
    generator: Any = VerbatimGenerator(client, 2, recorded("skyrl.TrajectoryID"), exports="/shared")
    output = asyncio.run(generator.generate({"prompts": [[]] * 2, "batch_metadata": SimpleNamespace(global_step=7)}))
    checked("skyrl.GeneratorOutput", output)
    assert [name.instance_id for name in output["trajectory_ids"]] == ["g1:0", "g2:1"]
    assert pushed(service) == []
    script_a_push(service, version=8)
    asyncio.run(generator.generate({"prompts": [[]] * 2, "batch_metadata": SimpleNamespace(global_step=8)}))
    assert pushed(service) == [(8, "/shared/global_step_7/policy")]
    generator._steps.finish()
    assert ended(service) == ["/weights", "/weights", "l0/ack", "l1/ack", "l2/ack"]


def test_skyrls_generator_acknowledges_nothing_if_a_step_is_repeated(service: ScriptedService, client: TrainerClient) -> None:
    """SkyRL's dynamic sampling asks again without training. The old bug: the groups of the first time were acknowledged untrained."""
    generator: Any = VerbatimGenerator(client, 2, recorded("skyrl.TrajectoryID"))
    asked = {"prompts": [[]] * 2, "batch_metadata": SimpleNamespace(global_step=7)}
    asyncio.run(generator.generate(asked))
    with pytest.raises(ValueError, match=r"step 7 again .*dynamic_sampling\.type=null"):
        asyncio.run(generator.generate(asked))
    assert ended(service) == []
    generator._steps.give_back()
