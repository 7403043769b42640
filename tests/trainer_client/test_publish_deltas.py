"""What a trainer writes of its weights: deltas on what the engines hold, whole checkpoints where nothing else is sure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.deltas import DELTA, fold, has_digests, is_delta, read_chain, verify
from contract.errors import NoAnswer
from contract.tensor_files import map_tensors
from tests.support.full_disk import disk_with_room_for
from tests.support.service.scripted_service import Answer, ScriptedService, json_answer
from trainer_client.client import TrainerClient
from trainer_client.errors import UnpublishableWeights
from trainer_client.publish import ReplicaFailed, prune_versions
from trainer_client.publish_deltas import copy_tensors

PUSH, CURRENT = "POST /weights", "GET /weights"
State = dict[str, torch.Tensor]


class Trainer:
    """A trainer whose service holds what was pushed last; `served` is its answer of `GET /weights`."""

    def __init__(self, service: ScriptedService, client: TrainerClient, directory: Path) -> None:
        self.service, self.client, self.directory = service, client, directory
        self.version = 0
        self.serve(None)
        self.refuse(False)

    def serve(self, root: str | None, path: Path | None = None) -> None:
        state = {"version": self.version, "root": root, "path": path and str(path), "kind": "full"}
        self.service.script(CURRENT, json_answer({"current": state, "history": [state], "replicas": {}}))

    def refuse(self, refused: bool) -> None:
        replica = {"ok": not refused, "seconds": 0.1, **({"error": "w is damaged"} if refused else {})}
        self.service.script(PUSH, json_answer({"applied": not refused, "seconds": 0.1, "replicas": {"one": replica}}))

    def publish(self, state: State, **options: Any) -> str:
        """Its kind."""
        self.version += 1
        push = self.client.publish(state, self.version, directory=self.directory, **{"delta": True, **options})
        self.serve(read_chain(Path(push.path)).root, Path(push.path))
        body = [request.body for request in self.service.received if request.method == "POST"][-1]
        assert (body["kind"] == "delta") == is_delta(self.folder())
        return str(body["kind"])

    def folder(self) -> Path:
        return self.directory / f"version-{self.version}"

    def read_back(self) -> State:
        chain = read_chain(self.folder())
        folded = dict(fold(map_tensors(chain.anchor.folder), chain.links, chain.stamps))
        names = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
        return {
            name: torch.from_numpy(each.data.view("u1").copy()).view(names[each.dtype]).reshape(each.shape)
            for name, each in folded.items()
        }


@pytest.fixture
def trainer(scripted_server: ScriptedService, tmp_path: Path) -> Iterator[Trainer]:
    service = scripted_server.reset()
    with TrainerClient(service.url, "trainer-token", retry_seconds=5) as client:
        yield Trainer(service, client, tmp_path)


def weights(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(40, 50, generator=generator).bfloat16(), "steps": torch.arange(3)}


def train(state: State) -> State:
    """One element in a hundred is another."""
    changed = {name: tensor.clone() for name, tensor in state.items()}
    changed["a"].view(-1)[::100] *= 1.5
    return changed


def equal(some: State, others: State) -> bool:
    return some.keys() == others.keys() and all(
        some[name].dtype == others[name].dtype and torch.equal(some[name], others[name]) for name in some
    )


def test_the_first_version_is_an_anchor_and_the_next_ones_what_changed(trainer: Trainer) -> None:
    state, kinds = weights(), []
    for _ in range(4):
        kinds.append(trainer.publish(state))
        assert equal(trainer.read_back(), state)
        state = train(state)
    assert kinds == ["full", "delta", "delta", "delta"]
    anchor, delta = (trainer.directory / f"version-{number}" for number in (1, 4))
    assert has_digests(anchor) and [path.name for path in delta.iterdir()] == [DELTA]
    verify(read_chain(anchor).anchor)


def test_weights_that_are_trained_in_place_are_compared_with_what_was_published(trainer: Trainer) -> None:
    """A base that shared memory with the model would never differ from it."""
    state = weights()
    trainer.publish(state)
    state["a"].view(-1)[::100] *= 1.5
    assert trainer.publish(state) == "delta"
    assert equal(trainer.read_back(), state) and read_chain(trainer.folder()).links[-1].changes.keys() == {"a"}


def test_one_version_in_anchor_every_is_whole(trainer: Trainer) -> None:
    state, kinds = weights(), []
    for _ in range(7):
        kinds.append(trainer.publish(state, anchor_every=3))
        state = train(state)
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def rolled_back(trainer: Trainer) -> None:
    trainer.serve(read_chain(trainer.directory / "version-1").root)


def pushed_by_another_trainer(trainer: Trainer) -> None:
    trainer.serve("0" * 64)


def pushed_without_digests(trainer: Trainer) -> None:
    trainer.serve(None)


def lost_the_base(trainer: Trainer) -> None:
    (trainer.folder() / DELTA).unlink()


def began_again(trainer: Trainer) -> None:
    trainer.client = TrainerClient(trainer.service.url, "trainer-token")


def was_refused(trainer: Trainer) -> None:
    trainer.refuse(True)
    with pytest.raises(ReplicaFailed, match="w is damaged"):
        trainer.publish(train(train(weights())))
    trainer.refuse(False)
    trainer.version -= 1


def got_no_answer(trainer: Trainer) -> None:
    trainer.service.script(PUSH, Answer(drop=True))
    with pytest.raises(NoAnswer):
        trainer.publish(train(train(weights())))
    trainer.refuse(False)


def had_a_full_disk(trainer: Trainer) -> None:
    with disk_with_room_for(50), pytest.raises(OSError, match="File too large"):
        trainer.publish(train(train(weights())))
    assert not trainer.folder().exists()
    trainer.version -= 1


@pytest.mark.parametrize(
    "happens",
    [
        rolled_back, pushed_by_another_trainer, pushed_without_digests, lost_the_base, began_again, was_refused, got_no_answer,
        had_a_full_disk,
    ],
)  # fmt: skip
def test_the_next_version_is_an_anchor_when_the_engines_may_hold_others(
    happens: Callable[[Trainer], None], trainer: Trainer
) -> None:
    state = weights()
    assert [trainer.publish(state), trainer.publish(train(state))] == ["full", "delta"]
    happens(trainer)
    state = train(train(state))
    assert trainer.publish(state) == "full"
    assert equal(trainer.read_back(), state)
    assert trainer.publish(train(state)) == "delta"
    if happens is began_again:
        trainer.client.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {**state, "b": torch.ones(2)},
        lambda state: {"a": state["a"]},
        lambda state: {**state, "a": state["a"].float()},
        lambda state: {**state, "a": state["a"].reshape(50, 40)},
        lambda state: weights(seed=1),
    ],
    ids=["a tensor more", "a tensor less", "another dtype", "another shape", "all changed"],
)
def test_the_next_version_is_an_anchor_when_a_delta_cannot_tell_or_would_not_pay(
    change: Callable[[State], State], trainer: Trainer
) -> None:
    state = weights()
    trainer.publish(state)
    assert trainer.publish(change(state)) == "full"
    assert equal(trainer.read_back(), change(state))


def test_float32_weights_are_cast_before_they_are_compared(trainer: Trainer) -> None:
    """Nearly all of them change in each step, and few as the engines serve them."""
    state = {"a": torch.randn(100, 100), "steps": torch.arange(3)}
    moved = {**state, "a": state["a"] * 1.00001}
    assert trainer.publish(state, dtype=torch.bfloat16) == "full"
    assert trainer.publish(moved, dtype=torch.bfloat16) == "delta"
    assert equal(trainer.read_back(), {"a": moved["a"].bfloat16(), "steps": moved["steps"]})
    assert trainer.publish({**moved, "a": moved["a"] * 1.00001}) == "full"


def test_tied_weights_are_copied_and_encoded_once(trainer: Trainer) -> None:
    body = torch.randn(50, 40).bfloat16()
    state = {"embed": body, "head": body}
    copies = copy_tensors(state)
    assert copies["embed"] is copies["head"]
    trainer.publish(state)
    body.view(-1)[::50] *= 1.5
    trainer.publish(state)
    (link,) = read_chain(trainer.folder()).links
    assert (link.changes["head"].like, [*link.header.places]) == ("embed", ["embed"])
    assert equal(trainer.read_back(), state)


@pytest.mark.parametrize("delta", [False, True])
def test_a_nan_is_refused_by_the_name_of_its_tensor(delta: bool, trainer: Trainer) -> None:
    """Engines load it, and answer as if nothing were."""
    state = weights()
    state["a"][3, 4] = torch.nan
    with pytest.raises(UnpublishableWeights, match="'a' holds a NaN: the model has diverged"):
        trainer.client.publish(state, 1, directory=trainer.directory, delta=delta)
    assert list(trainer.directory.iterdir()) == []


def test_an_infinity_and_a_minus_zero_are_weights(trainer: Trainer) -> None:
    state = {"a": torch.tensor([torch.inf, 0.0, 1.0])}
    trainer.publish(state)
    trainer.publish(changed := {"a": torch.tensor([torch.inf, -0.0, 1.0])})
    assert torch.equal(trainer.read_back()["a"].view(torch.int32), changed["a"].view(torch.int32))


def test_what_goes_with_a_state_dict_is_refused_with_a_path(trainer: Trainer) -> None:
    for options, named in (({"delta": True}, "`delta`"), ({"dtype": torch.bfloat16}, "`dtype`")):
        with pytest.raises(UnpublishableWeights, match=f"{named} goes with a state dict"):
            trainer.client.publish("/weights", 1, **options)
    with pytest.raises(UnpublishableWeights, match="delta=True"):
        trainer.client.publish(weights(), 1, kind="delta", directory=trainer.directory)


def test_pruning_always_leaves_what_a_late_replica_needs(trainer: Trainer) -> None:
    """And little more: the last versions and what they are built on."""
    state = weights()
    for _ in range(20):
        trainer.publish(state, anchor_every=4, keep_last=2)
        assert equal(trainer.read_back(), state)
        assert len(list(trainer.directory.iterdir())) <= 4 + 2
        state = train(state)


def test_nothing_is_pruned_while_a_kept_delta_cannot_be_read(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    state = weights()
    for _ in range(3):
        trainer.publish(state)
        state = train(state)
    (trainer.folder() / DELTA).write_bytes(b"damaged")
    assert prune_versions(trainer.directory, 3, keep_last=1) == []
    assert "no version is removed" in caplog.messages[-1] and len(list(trainer.directory.iterdir())) == 3
