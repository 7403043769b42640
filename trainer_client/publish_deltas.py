"""Deltas of a trainer's weights: what changed since the version that the engines hold, or a whole checkpoint where a delta cannot tell.

A delta is written only on the version that this trainer published last, and only while the service says that its engines hold just that:
the same root. After a rollback, another trainer's push, a push that failed or a restart, the next version is an anchor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from contract.deltas import State, WeightDelta, encode_delta, read_chain, root_of, stamp, write_delta
from contract.tensor_files import BrokenWeights, Tensor
from trainer_client.errors import UnpublishableWeights
from trainer_client.publish import target_folder, version_folder, write_tensors

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.5
"""Of the checkpoint's bytes; a larger delta is written as an anchor."""


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version that was written: where it is and what it is, and a copy of its tensors."""

    state: State
    tensors: Mapping[str, Tensor]


class DeltaWriter:
    """Writes the versions of one model. Keeps a copy of the last one that was applied, in memory: as many bytes as a checkpoint has."""

    def __init__(self) -> None:
        self._applied: PublishedVersion | None = None
        self._written: PublishedVersion | None = None

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        directory: str | os.PathLike[str],
        version: int,
        *,
        served_root: str | None,
        anchor_every: int,
        config: Any,
        shard_bytes: int,
    ) -> tuple[Path, Literal["full", "delta"]]:
        """The folder of the version and its kind. `served_root` is what the engines hold, and of `anchor_every` versions one is an anchor.

        `tensors` are checked ones. Until `confirm`, the next version is an anchor. Raises UnpublishableWeights."""
        base, self._applied = self._applied, None
        after = copy_tensors(tensors)
        target = target_folder(directory, version)
        found = self._find_delta(base, after, target, served_root, anchor_every)
        if base is None or isinstance(found, str):
            log.info("version %d is a whole checkpoint: %s", version, found)
            stamps = {name: stamp(tensor) for name, tensor in after.items()}
            write_tensors(tensors, directory, version, config=config, shard_bytes=shard_bytes, stamps=stamps)
            self._written = PublishedVersion(State(target, version, root_of(stamps), stamps), after)
            return target, "full"
        with version_folder(directory, version) as folder:
            write_delta(folder.unfinished, found, version, base.state)
        self._written = PublishedVersion(State(target, version, root_of(found.stamps), found.stamps), after)
        return target, "delta"

    def confirm(self) -> None:
        """The engines hold what was written last."""
        self._applied, self._written = self._written, None

    def _find_delta(
        self,
        base: PublishedVersion | None,
        after: Mapping[str, Tensor],
        target: Path,
        served_root: str | None,
        anchor_every: int,
    ) -> WeightDelta | str:
        """The delta, or why there is none."""
        if base is None:
            return "this trainer has published none before it, or the last push failed"
        if served_root != base.state.root:
            return "the engines hold other weights than those this trainer published last"
        if target.parent != base.state.folder.parent or target == base.state.folder:
            return f"the one before it is in {base.state.folder}"
        try:
            chain = read_chain(base.state.folder)
        except BrokenWeights as error:
            return str(error)
        if chain.root != base.state.root:
            return f"{base.state.folder} holds other weights now"
        if len(chain.links) + 1 >= anchor_every:
            return f"one of {anchor_every} is"
        most = int(LARGEST_SHARE * sum(tensor.data.nbytes for tensor in after.values()))
        delta = encode_delta(base.tensors, base.state.stamps, after, most_bytes=most)
        return (
            delta or "more than half of the bytes changed, or names, shapes or dtypes did; publish the dtype that engines serve"
        )


def copy_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    """Copies as integers, those of tensors that share their memory once. Raises UnpublishableWeights for a dtype that deltas lack."""
    import torch

    names = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
        torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    }  # fmt: skip
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    copies: dict[str, Tensor] = {}
    shared: dict[tuple[object, ...], Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise UnpublishableWeights(f"{name!r} is of the dtype {tensor.dtype}, of which there are no deltas")
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if memory not in shared or not tensor.numel():
            flat = tensor.detach().contiguous().view(integers[tensor.element_size()]).reshape(-1)
            data = flat.to("cpu", copy=True).numpy().view(f"u{tensor.element_size()}")
            shared[memory] = Tensor(names[tensor.dtype], tuple(tensor.shape), data)
        copies[name] = shared[memory]
    return copies
