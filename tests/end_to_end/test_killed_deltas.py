"""Deltas whose trainer or engine is killed: nobody ever reads half a version, and what follows has the trainer's bits.

A process of its own does the work and gets SIGKILL when it touches a file for the n-th time: opens, makes, renames, links or removes one.
The trainer is its `DeltaWriter`, which dies with it, the engine its mirror, which is all that it leaves behind. What real engines then
serve is measured by hand: `python -m benchmarks.delta_kills`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.deltas import State, fold, read_chain, read_digests, root_of, stamp, verify
from contract.tensor_files import BrokenWeights, map_tensors
from proxy.engine.in_vllm.mirror import CURRENT, Mirror
from trainer_client.publish import prune_versions
from trainer_client.publish_deltas import DeltaWriter, copy_tensors

TOUCHES = ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir")


def survives(work: Callable[[], object], step: int, root: Path) -> bool:
    """Whether the work came to its end in a process that is killed at its `step`-th touch of a file under `root`."""
    child = os.fork()
    if child == 0:
        touched = 0

        def touch(event: str, args: tuple[Any, ...]) -> None:
            nonlocal touched
            if event in TOUCHES and any(str(root) in str(arg) for arg in args):
                touched += 1
                if touched == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(touch)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), "the work failed by itself"
    return code == 0


@dataclass
class Trainer:
    """Writes versions into `folder`; each changes one element in a hundred."""

    folder: Path
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    writer: DeltaWriter = field(default_factory=DeltaWriter)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        body = torch.randn(60, 80, generator=self._random).bfloat16()
        self.weights = {"body": body, "embed": body + 1, "still": torch.ones(30).bfloat16(), "steps": torch.zeros(2).long()}

    def train(self) -> None:
        for name in ("body", "embed"):
            chosen = torch.rand(60, 80, generator=self._random) < 0.01
            self.weights[name] = torch.where(chosen, self.weights[name] * 1.5, self.weights[name])
        self.weights["steps"] = self.weights["steps"] + 1

    def write(self, version: int, served_root: str | None) -> Path:
        options: dict[str, Any] = {"anchor_every": 10, "config": None, "shard_bytes": 20_000}
        return self.writer.write(self.weights, self.folder, version, served_root=served_root, **options)[0]

    @property
    def root(self) -> str:
        return root_of({name: stamp(tensor) for name, tensor in copy_tensors(self.weights).items()})

    def is_written(self, version: int) -> bool:
        """Whether its folder is there, which then holds these weights, all of them."""
        folder = self.folder / f"version-{version}"
        if not folder.exists():
            return False
        chain = read_chain(folder)
        assert chain.root == self.root
        return len(list(fold(map_tensors(chain.anchor.folder), chain.links, chain.stamps))) == len(self.weights)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "weights")


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def read_held(mirror: Path) -> State | None:
    """What an engine that starts now finds, which is what it says, to the bit."""
    try:
        state = read_digests((mirror / CURRENT).resolve())
    except BrokenWeights:
        return None
    verify(state)
    return state


def test_after_a_hundred_pushes_with_kills_among_them_the_mirror_has_the_trainers_bits(trainer: Trainer, mirror: Path) -> None:
    chance, served, killed = random.Random(0), None, {"trainer": 0, "engine": 0}
    for version in range(1, 101):
        trainer.train()
        if chance.random() < 0.2:
            write = partial(trainer.write, version, served)
            killed["trainer"] += not survives(write, chance.randint(1, 12), trainer.folder)
            trainer.is_written(version)
            trainer.writer = DeltaWriter()
        folder = trainer.write(version, served)
        if chance.random() < 0.2:
            lived = survives(partial(Mirror(mirror).advance, read_chain(folder)), chance.randint(1, 20), mirror)
            held = read_held(mirror)
            assert (held.root if held else None) in ([trainer.root] if lived else [served, trainer.root])
            killed["engine"] += not lived
        copy = Mirror(mirror).advance(read_chain(folder))
        served = copy.state.root
        assert served == trainer.root
        trainer.writer.confirm()
        prune_versions(trainer.folder, version, keep_last=2)
    held = read_held(mirror)
    assert held is not None and (held.root, held.version) == (trainer.root, 100)
    assert min(killed.values()) >= 10, killed


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_trainer_killed_at_any_step_leaves_no_version_or_a_whole_one(kind: str, trainer: Trainer) -> None:
    served = None
    if kind == "delta":
        trainer.write(1, None)
        trainer.writer.confirm()
        served = trainer.root
    trainer.train()
    written, step = [False], 1
    while not survives(lambda: trainer.write(2, served), step, trainer.folder):
        written.append(trainer.is_written(2))
        step += 1
    assert trainer.is_written(2) and written == sorted(written) and step > 5


def test_an_engine_killed_at_any_step_leaves_the_old_copy_or_the_new_one(trainer: Trainer, mirror: Path) -> None:
    Mirror(mirror).advance(read_chain(trainer.write(1, None)))
    trainer.writer.confirm()
    old = trainer.root
    trainer.train()
    folder, step = trainer.write(2, old), 1
    while not survives(lambda: Mirror(mirror).advance(read_chain(folder)), step, mirror):
        held = read_held(mirror)
        assert held is not None and held.root in (old, trainer.root)
        step += 1
    assert step > 10
    held = read_held(mirror)
    assert held is not None and held.root == trainer.root
    assert len([path for path in mirror.iterdir() if path.is_dir() and not path.is_symlink()]) == 1
