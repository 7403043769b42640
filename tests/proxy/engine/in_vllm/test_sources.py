"""What an update reads, with a mirror and without one: the same tensors, verified before anything pauses."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.deltas import DELTA, has_digests, root_of, stamp
from contract.tensor_files import BrokenWeights, map_tensors, read_header
from proxy.engine.in_vllm.mirror import CURRENT, Mirror
from proxy.engine.in_vllm.sources import NICER, Preparation, WeightSource, open_checkpoint, open_source
from trainer_client.publish import write_weights
from trainer_client.publish_deltas import DeltaWriter

State = dict[str, torch.Tensor]


@pytest.fixture
def state() -> State:
    body = torch.randn(40, 50).bfloat16()
    return {"embed": body, "head": body, "norm": torch.ones(7), "steps": torch.arange(3), "scalar": torch.tensor(2.5)}


@pytest.fixture
def folder(state: State, tmp_path: Path) -> Path:
    """Version 3, the second delta on an anchor. `state` is what it holds."""
    writer, root = DeltaWriter(), None
    for version in (1, 2, 3):
        options: dict[str, Any] = {"served_root": root, "anchor_every": 9, "config": None, "shard_bytes": 3000}
        path, kind = writer.write(state, tmp_path, version, **options)
        writer.confirm()
        root = root_of({name: stamp(each) for name, each in map_tensors(path).items()}) if kind == "full" else None
        root = root or read_header(path / DELTA).metadata["root"]
        if version < 3:
            state["embed"].view(-1)[::100] *= 1.5
    return path


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_chain_is_read_as_the_checkpoint_it_stands_for(mirrored: bool, folder: Path, state: State, tmp_path: Path) -> None:
    source = open_source(str(folder), "delta", Mirror(tmp_path / "mirror") if mirrored else None)
    whole = open_checkpoint(write_weights(state, tmp_path / "whole", 1))
    assert (source.headers, source.kind) == (whole.headers, "delta") and source.root is not None
    read = dict(source.read(["embed", "norm", "scalar", "steps"]))
    assert read.keys() == state.keys() - {"head"}
    assert all(torch.equal(read[name], state[name]) and read[name].dtype == state[name].dtype for name in read)
    assert source.are_equal("embed", "head") and not source.are_equal("embed", "norm")


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("damaged", ["version-3", "version-1"])
def test_damage_anywhere_in_a_chain_is_named_before_anything_is_loaded(
    damaged: str, mirrored: bool, folder: Path, tmp_path: Path
) -> None:
    file = next((folder.parent / damaged).glob(DELTA if damaged == "version-3" else "model-00001-*"))
    data = bytearray(file.read_bytes())
    data[read_header(file).places["embed"][2] + 9] ^= 1
    file.write_bytes(data)
    with pytest.raises(BrokenWeights, match="embed"):
        open_source(str(folder), "delta", Mirror(tmp_path / "mirror") if mirrored else None)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("version", ["version-1", "version-3"])
def test_damage_after_the_preparation_is_named_when_it_is_loaded(
    version: str, mirrored: bool, folder: Path, tmp_path: Path
) -> None:
    """Calls may take minutes to end in between: the files of an anchor were read again then, and not verified."""
    source = open_source(str(folder.with_name(version)), None, Mirror(tmp_path / "mirror") if mirrored else None)
    files = (
        (tmp_path / "mirror" / CURRENT).glob("*.safetensors")
        if mirrored
        else folder.with_name("version-1").glob("model-00001-*")
    )
    file = next(iter(files))
    data = bytearray(file.read_bytes())
    data[read_header(file).places["embed"][2] + 9] ^= 1
    file.write_bytes(data)
    with pytest.raises(BrokenWeights, match="embed does not have the bytes that were published"):
        dict(source.read(source.headers))


def test_an_anchor_is_verified_and_a_checkpoint_without_digests_is_not(folder: Path, state: State, tmp_path: Path) -> None:
    anchor, plain = folder.parent / "version-1", write_weights(state, tmp_path / "plain", 1)
    assert has_digests(anchor) and open_source(str(anchor), "full", None).root is not None
    assert open_source(str(plain), "full", Mirror(tmp_path / "mirror")).root is None
    assert not (tmp_path / "mirror").exists()
    next(anchor.glob("model-00001-*")).write_bytes(b"")
    with pytest.raises(BrokenWeights, match="not a whole safetensors file"):
        open_source(str(anchor), "full", None)


def test_a_folder_is_refused_as_what_it_is_not(folder: Path) -> None:
    for path, kind, says in ((folder, "full", "push it as kind delta"), (folder.parent / "version-1", "delta", "as kind full")):
        with pytest.raises(BrokenWeights, match=says):
            open_source(str(path), kind, None)
        assert open_source(str(path), None, None).root is not None, "the engine's own routes name no kind"


def test_a_delta_of_another_trainers_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Its tensors are compressed bytes: as a checkpoint it would be refused by their shapes, which tells nobody why."""
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"delta_encoding": "xor"}, "weight_map": {}}')
    for kind in ("full", "delta"):
        with pytest.raises(BrokenWeights, match=r"a delta as slime writes it: verbatim weights fold makes a checkpoint of it"):
            open_source(str(tmp_path), kind, None)


def test_a_preparation_does_not_wait_for_what_it_reads(folder: Path) -> None:
    going = threading.Event()

    def open_late() -> WeightSource:
        going.wait()
        return open_source(str(folder), "delta", None)

    preparation = Preparation("ticket", str(folder), open_late)
    assert (preparation.done, preparation.source) == (False, None)
    going.set()
    preparation._thread.join()
    assert preparation.done and preparation.result() is preparation.source

    def fail() -> WeightSource:
        raise BrokenWeights(f"damaged at {os.nice(0)}")

    failed = Preparation("another", str(folder), fail)
    failed._thread.join()
    with pytest.raises(BrokenWeights, match=f"damaged at {min(os.nice(0) + NICER, 19)}$"):
        failed.result()
