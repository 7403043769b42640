"""Versions as a trainer writes them: an anchor, and deltas on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from contract.deltas import State, encode_delta, root_of, stamp, write_delta, write_digests
from contract.tensor_files import Tensor, write_file


def write_chain(folder: Path, count: int) -> list[State]:
    """Versions 1, the anchor, to `count`, in `folder`: `still` is the same in all of them, `w` differs."""
    states: list[State] = []
    for number in range(1, count + 1):
        states.append(_write_version(folder / f"version-{number}", states[-1] if states else None, number))
    return states


def _write_version(folder: Path, before: State | None, number: int) -> State:
    values = np.random.default_rng(number).integers(0, 1 << 16, 3000, "u2")
    tensors = {"still": Tensor("BF16", (3000,), np.arange(3000, dtype="u2")), "w": Tensor("BF16", (3000,), values)}
    folder.mkdir()
    if before is None:
        sizes = {name: (each.dtype, each.shape) for name, each in tensors.items()}
        write_file(folder / "model.safetensors", sizes, tensors.items())
        return write_digests(folder, {name: stamp(each) for name, each in tensors.items()}, number)
    old = np.random.default_rng(before.version).integers(0, 1 << 16, 3000, "u2")
    delta = encode_delta({**tensors, "w": Tensor("BF16", (3000,), old)}, before.stamps, tensors, most_bytes=1 << 20)
    assert delta is not None
    write_delta(folder, delta, number, before)
    return State(folder, number, root_of(delta.stamps), delta.stamps)
