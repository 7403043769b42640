"""Weights written whole or not at all, and pushed once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from contract.errors import NoAnswer, ServiceError
from tests.support.service.scripted_service import Answer, ScriptedService, error_answer, json_answer
from trainer_client.client import TrainerClient
from trainer_client.errors import InvalidAnswer, UnpublishableWeights, VersionConflict
from trainer_client.publish import ReplicaFailed, prune_versions, write_weights

PUSH, CURRENT = "POST /weights", "GET /weights"
GOOD = {"ok": True, "seconds": 0.1}
BAD = {"ok": False, "seconds": 0.2, "error": "no such file"}


def pushed(applied: bool = True, **replicas: object) -> Answer:
    return json_answer({"applied": applied, "version": 4, "seconds": 0.3, "replicas": replicas})


@pytest.fixture
def service(scripted_server: ScriptedService) -> ScriptedService:
    scripted = scripted_server.reset()
    scripted.script(CURRENT, json_answer({"current": {"version": 3}, "replicas": {}}))
    scripted.script(PUSH, pushed(one=GOOD))
    return scripted


@pytest.fixture
def client(service: ScriptedService) -> Iterator[TrainerClient]:
    with TrainerClient(service.url, "trainer-token", retry_seconds=5) as client:
        yield client


def small_state() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(4.0), "b": torch.arange(6).reshape(2, 3)}


def pushes(service: ScriptedService) -> list[object]:
    return [request.body for request in service.received if request.method == "POST"]


def test_a_state_dict_is_written_and_pushed(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    push = client.publish(small_state(), 4, directory=tmp_path)
    folder = tmp_path / "version-4"
    assert pushes(service) == [{"version": 4, "path": str(folder), "kind": "full", "mode": "keep"}]
    assert (push.version, push.path, push.applied, push.seconds) == (4, str(folder), True, 0.3)
    assert (push.replicas, push.failed) == ({"one": GOOD}, {})
    written = load_file(folder / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in small_state().items())
    assert [path.name for path in tmp_path.iterdir()] == ["version-4"]


def test_a_path_is_pushed_as_it_is(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    client.publish(tmp_path / "adapter", 4, kind="lora", mode="wait")
    assert pushes(service) == [{"version": 4, "path": str(tmp_path / "adapter"), "kind": "lora", "mode": "wait"}]


def test_a_failed_replica_raises_with_every_result(service: ScriptedService, client: TrainerClient) -> None:
    service.script(PUSH, pushed(one=GOOD, two=BAD))
    with pytest.raises(ReplicaFailed, match="1 of 2 replicas, the others serve it: two: no such file") as error:
        client.publish("/weights/4", 4)
    assert error.value.push.failed == {"two": "no such file"} and error.value.push.applied
    assert len(pushes(service)) == 1


def test_a_push_that_reached_no_replica_says_that_nothing_changed(service: ScriptedService, client: TrainerClient) -> None:
    service.script(PUSH, pushed(applied=False, two=BAD))
    with pytest.raises(ReplicaFailed, match="nothing has changed") as error:
        client.publish("/weights/4", 4)
    assert not error.value.push.applied


def test_an_older_version_is_a_conflict(service: ScriptedService, client: TrainerClient) -> None:
    service.script(PUSH, error_answer(409, "conflict", "version 3 is not greater than 3"))
    with pytest.raises(VersionConflict, match="not greater"):
        client.publish("/weights/3", 3)


def test_a_served_versions_folder_is_not_overwritten(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    with pytest.raises(VersionConflict, match="version 3 is not greater than 3"):
        client.publish(small_state(), 3, directory=tmp_path)
    assert list(tmp_path.iterdir()) == [] and pushes(service) == []


def test_a_push_that_may_have_begun_is_not_repeated(service: ScriptedService, client: TrainerClient) -> None:
    service.script(PUSH, Answer(drop=True))
    with pytest.raises(NoAnswer) as error:
        client.publish("/weights/4", 4)
    assert len(pushes(service)) == 1 and "may have happened" in error.value.__notes__[0]


def test_a_push_refused_with_503_is_retried(service: ScriptedService, client: TrainerClient) -> None:
    busy = error_answer(503, "store_unavailable", "loading", retry_after="0")
    service.script(PUSH, busy, pushed(one=GOOD))
    assert client.publish("/weights/4", 4).failed == {}


def test_a_push_the_engine_failed_is_not_retried(service: ScriptedService, client: TrainerClient) -> None:
    service.script(PUSH, error_answer(502, "engine_failed", "gone"))
    with pytest.raises(ServiceError, match="gone"):
        client.publish("/weights/4", 4)
    assert len(pushes(service)) == 1


def test_an_answer_without_replicas_is_refused(service: ScriptedService, client: TrainerClient) -> None:
    service.script(PUSH, json_answer({"version": 4}))
    with pytest.raises(InvalidAnswer, match="replicas"):
        client.publish("/weights/4", 4)


def test_weights_tells_the_version(service: ScriptedService, client: TrainerClient) -> None:
    assert client.weights()["current"]["version"] == 3
    service.script(CURRENT, json_answer({}))
    with pytest.raises(InvalidAnswer):
        client.weights()


@pytest.mark.parametrize(
    ("weights", "kind", "sentence"),
    [
        ({}, "full", "empty"),
        ({"step": 3}, "full", "'step' is of type int, not a torch tensor"),
        ({"w": torch.empty(2, device="meta")}, "full", "meta device"),
        ({"w": torch.eye(2).to_sparse()}, "full", "sparse"),
        ({"w": torch.eye(2)}, "lora", "adapter_config.json"),
    ],
)
def test_weights_that_cannot_be_published_are_named(
    service: ScriptedService, client: TrainerClient, tmp_path: Path, weights: dict[str, object], kind: str, sentence: str
) -> None:
    with pytest.raises(UnpublishableWeights, match=sentence):
        client.publish(weights, 4, kind=kind, directory=tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [] and pushes(service) == []


def test_a_state_dict_needs_a_directory(client: TrainerClient) -> None:
    with pytest.raises(UnpublishableWeights, match="directory"):
        client.publish(small_state(), 4)


@pytest.mark.parametrize("given", ["config", "folder"])
def test_a_version_with_a_config_is_loaded_by_from_pretrained(client: TrainerClient, tmp_path: Path, given: str) -> None:
    """Its folder had weights alone, which engines load and nothing else."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    base = tmp_path / "base"
    model.save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    client.publish(
        model.state_dict(), 4, directory=tmp_path, config=model.config if given == "config" else base, shard_bytes=64
    )
    folder = tmp_path / "version-4"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert (folder / "tokenizer.json").exists() == (given == "folder")
    assert not (folder / "model.safetensors").exists()


def test_weights_alone_are_pushed_and_the_reader_is_told_once_what_they_lack(
    service: ScriptedService, client: TrainerClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client.publish(small_state(), 4, directory=tmp_path)
    client.publish(small_state(), 5, directory=tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} gets weights alone, which engines load; for from_pretrained, publish them with config=model.config"
    ]


def test_a_config_that_cannot_be_one_is_refused_and_leaves_nothing(
    service: ScriptedService, client: TrainerClient, tmp_path: Path
) -> None:
    with pytest.raises(UnpublishableWeights, match=r"neither a model's config nor a folder with a config\.json"):
        client.publish(small_state(), 4, directory=tmp_path / "weights", config="some/model")
    with pytest.raises(UnpublishableWeights, match="goes with a state dict"):
        client.publish(tmp_path, 4, config=tmp_path)
    assert not (tmp_path / "weights").exists() and pushes(service) == []


def test_old_versions_are_removed_after_a_good_push(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write_weights(small_state(), tmp_path, version)
    client.publish(small_state(), 4, directory=tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-3", "version-4"]


def test_old_versions_stay_when_the_push_failed(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    service.script(PUSH, pushed(applied=False, two=BAD))
    write_weights(small_state(), tmp_path, 3)
    with pytest.raises(ReplicaFailed):
        client.publish(small_state(), 4, directory=tmp_path, keep_last=1)
    assert (tmp_path / "version-3").is_dir()


def test_pruning_touches_only_older_version_folders(tmp_path: Path) -> None:
    for name in ("version-1", "version-2", "version-10", "version-11", ".version-2.writing", "version-x", "notes"):
        (tmp_path / name).mkdir()
    removed = prune_versions(tmp_path, 10, keep_last=1)
    assert sorted(path.name for path in removed) == [".version-2.writing", "version-1", "version-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "version-10", "version-11", "version-x"]
    with pytest.raises(ValueError, match="must stay"):
        prune_versions(tmp_path, 10, keep_last=0)


def test_tied_viewed_and_strided_tensors_are_written_in_full(tmp_path: Path) -> None:
    body = torch.arange(12.0).reshape(3, 4)
    state = {"embed": body, "head": body, "first": body[0], "turned": body.t(), "learnt": torch.nn.Parameter(body + 1)}
    written = load_file(write_weights(state, tmp_path, 1) / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())


def test_large_state_dicts_are_sharded_with_an_index(tmp_path: Path) -> None:
    shared = torch.zeros(4)
    state = {"a": torch.ones(4), "b": torch.ones(4), "big": torch.ones(40), "c": shared, "d": shared}
    folder = write_weights(state, tmp_path, 1, shard_bytes=32)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index == {
        "metadata": {"total_size": 4 * 56},
        "weight_map": {"a": names[0], "b": names[0], "big": names[1], "c": names[2], "d": names[2]},
    }
    written = {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())


def test_bfloat16_keeps_its_type(tmp_path: Path) -> None:
    written = load_file(write_weights({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path, 1) / "model.safetensors")
    assert written["w"].dtype == torch.bfloat16


def test_writing_a_version_again_replaces_it_and_what_a_crash_left(tmp_path: Path) -> None:
    write_weights({"w": torch.zeros(2)}, tmp_path, 1)
    (tmp_path / ".version-1.writing").mkdir()
    (tmp_path / ".version-1.writing" / "half").touch()
    folder = write_weights({"w": torch.ones(2)}, tmp_path, 1)
    assert load_file(folder / "model.safetensors")["w"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.rglob("*")] == ["version-1", "model.safetensors"]


def test_another_model_has_a_version_line_of_its_own(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    """The default one is at version 3, the critic at 7."""
    line = {"current": {"version": 7}, "replicas": {}}
    service.script(CURRENT, json_answer({"current": {"version": 3}, "replicas": {}, "models": {"critic": line}}))
    with pytest.raises(VersionConflict, match="version 7 is not greater than 7"):
        client.publish(small_state(), 7, directory=tmp_path, model="critic")
    client.publish(small_state(), 8, directory=tmp_path, model="critic")
    path = str(tmp_path / "version-8")
    assert pushes(service) == [{"version": 8, "path": path, "kind": "full", "mode": "keep", "model": "critic"}]


def served(*pushed: tuple[int, str, Path]) -> dict[str, Any]:
    """A version line: what `GET /weights` says of a model after these pushes, the newest first: version, kind and path of each."""
    history = [{"version": version, "kind": kind, "path": str(path)} for version, kind, path in pushed]
    return {"current": history[0], "history": history, "replicas": {}}


def test_another_models_checkpoint_is_not_replaced(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    """Its engines would have been given the critic's weights under the policy's label."""
    folder = write_weights(small_state(), tmp_path, 7)
    policy, critic = served((7, "full", folder)), served((6, "full", tmp_path / "version-6"))
    service.script(CURRENT, json_answer({**policy, "models": {"critic": critic}}))
    with pytest.raises(UnpublishableWeights, match=r"version-7 holds weights of the default model .* its own directory"):
        client.publish({"a": torch.zeros(4)}, 7, directory=tmp_path, model="critic")
    assert torch.equal(load_file(folder / "model.safetensors")["a"], small_state()["a"]) and not pushes(service)


def test_what_a_push_that_is_running_may_read_is_not_replaced(
    service: ScriptedService, client: TrainerClient, tmp_path: Path
) -> None:
    """A trainer that was killed in its push of version 8 begins again there: engines would hold the old bits, late ones the new."""
    folder = write_weights(small_state(), tmp_path, 8)
    service.script(CURRENT, json_answer({**served((7, "full", tmp_path / "version-7")), "updating": True}))
    with pytest.raises(VersionConflict, match="version-8 may be what a push that is running reads"):
        client.publish({"a": torch.zeros(4)}, 8, directory=tmp_path)
    assert torch.equal(load_file(folder / "model.safetensors")["a"], small_state()["a"]) and not pushes(service)
    client.publish({"a": torch.zeros(4)}, 9, directory=tmp_path)


def test_what_an_engine_may_still_get_is_not_removed(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    """Another model's checkpoint, and the full weights below an adapter."""
    for version in range(1, 9):
        (tmp_path / f"version-{version}").mkdir()
    pushed_adapters = [(version, "lora", tmp_path / f"version-{version}") for version in (8, 6, 4)]
    policy = served(*pushed_adapters, (2, "full", tmp_path / "version-2"), (1, "full", tmp_path / "version-1"))
    critic = served((3, "full", tmp_path / "version-3"))
    service.script(CURRENT, json_answer({**policy, "models": {"critic": critic}}))
    client.publish(tmp_path / "version-8", 8, kind="lora", directory=tmp_path, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-2", "version-3", "version-8"]


def test_weights_of_an_unknown_model_are_not_written(service: ScriptedService, client: TrainerClient, tmp_path: Path) -> None:
    """It used to be a bare KeyError."""
    line = {"current": {"version": 7}, "replicas": {}}
    service.script(CURRENT, json_answer({"current": {"version": 3}, "replicas": {}, "models": {"critic": line}}))
    with pytest.raises(UnpublishableWeights, match="no model 'critik': known: critic"):
        client.publish(small_state(), 8, directory=tmp_path, model="critik")
    assert not pushes(service) and not list(tmp_path.iterdir())
