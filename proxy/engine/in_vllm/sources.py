"""What an update reads: a checkpoint, or a chain of deltas, which is folded into the mirror or while it is loaded.

`open_source` reads and verifies, touches no model, and may run in a thread of the worker while the engine samples. A delta, and a
checkpoint with digests, are verified tensor by tensor; a checkpoint without digests is read when it is loaded.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from contract.deltas import Chain, Stamps, check, fold, has_digests, is_delta, read_chain, verify
from contract.peer_deltas import name_peer
from contract.tensor_files import BrokenWeights, Tensor, list_files, map_tensors
from proxy.engine.in_vllm.mirror import Mirror

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NICER = 10
"""By so much a thread that prepares is nicer than those that sample, which have most of the cores where cores are few."""


@dataclass(frozen=True)
class TensorHeader:
    """A tensor's shape and dtype, read without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Headers = Mapping[str, TensorHeader]
Tensors = Iterator[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """`root` is None for a checkpoint without digests; `kind` is what a push calls it."""

    @property
    def headers(self) -> Headers: ...
    @property
    def root(self) -> str | None: ...
    @property
    def kind(self) -> str: ...

    def read(self, names: Collection[str]) -> Tensors:
        """Those tensors, each with its name. Raises BrokenWeights if one is not what was published."""

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same values."""


@dataclass(frozen=True)
class Checkpoint:
    """Files of `places`. With `stamps` each tensor is verified as it is read: in the mode wait, minutes may have passed since it was
    prepared. `held` keeps the mirror's copy in its place."""

    headers: Headers
    places: Mapping[str, Path]
    root: str | None = None
    kind: str = "full"
    stamps: Stamps | None = None
    held: object = field(default=None, compare=False)

    def read(self, names: Collection[str]) -> Tensors:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.places[name], []).append(name)
        for file, inside in by_file.items():
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in inside:
                    tensor = tensors.get_tensor(name)
                    if self.stamps is not None:
                        check(name, as_bits(tensor, self.stamps[name].dtype), self.stamps[name], f"in {file}")
                    yield name, tensor

    def are_equal(self, first: str, second: str) -> bool:
        tensors = dict(self.read((first, second)))
        return torch.equal(tensors[first], tensors[second])


@dataclass(frozen=True)
class Folded:
    """A chain without a mirror: folded tensor by tensor, each verified as it is read."""

    chain: Chain
    headers: Headers
    kind: str = "delta"

    @property
    def root(self) -> str:
        return self.chain.root

    def read(self, names: Collection[str]) -> Tensors:
        for name, tensor in fold(map_tensors(self.chain.anchor.folder), self.chain.links, self.chain.stamps):
            if name in names:
                data = torch.from_numpy(tensor.data.view("u1").copy())
                yield name, data.view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def are_equal(self, first: str, second: str) -> bool:
        return self.chain.stamps[first] == self.chain.stamps[second]


def as_bits(tensor: torch.Tensor, dtype: str) -> Tensor:
    """Its bytes, with the format's name of its dtype if that is `dtype`."""
    named = dtype if DTYPES[dtype] == tensor.dtype else str(tensor.dtype)
    return Tensor(named, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def open_source(path: str, kind: str | None, mirror: Mirror | None) -> WeightSource:
    """What the push of `path` as `kind` (None: whatever it is) loads. Raises BrokenWeights, naming the file, link or tensor."""
    folder = Path(path)
    if (peer := name_peer(folder)) is not None:
        raise BrokenWeights(
            f"{path} holds a delta as {peer} writes it: verbatim weights fold makes a checkpoint of it, to be pushed"
        )
    found = "delta" if is_delta(folder) else "full"
    if kind not in (None, found):
        told = "holds a delta" if found == "delta" else "holds no delta"
        raise BrokenWeights(f"{path} {told}: push it as kind {found}")
    if found == "full" and not has_digests(folder):
        return open_checkpoint(folder)
    chain = read_chain(folder)
    if mirror is not None:
        copy = mirror.advance(chain)
        opened = open_checkpoint(copy.state.folder)
        return Checkpoint(opened.headers, opened.places, chain.root, found, chain.stamps, copy)
    if found == "full":
        verify(chain.anchor)
        opened = open_checkpoint(folder)
        return Checkpoint(opened.headers, opened.places, chain.root, stamps=chain.stamps)
    for _ in fold(map_tensors(chain.anchor.folder), chain.links, chain.stamps):
        pass
    return Folded(chain, {name: TensorHeader(stamp.shape, DTYPES[stamp.dtype]) for name, stamp in chain.stamps.items()})


def open_checkpoint(path: Path) -> Checkpoint:
    """A safetensors file, or a folder with one file, several, or an index.

    Raises BrokenWeights if it is missing, unreadable, truncated, or has a tensor twice."""
    if not path.exists():
        raise BrokenWeights(f"{path} does not exist on the engine's machine")
    headers, places = dict[str, TensorHeader](), dict[str, Path]()
    for file, wanted in list_files(path).items():
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in list(tensors.keys()) if wanted is None else wanted:
                    if name in headers:
                        raise BrokenWeights(f"{path} holds {name} twice")
                    part = tensors.get_slice(name)
                    headers[name], places[name] = TensorHeader(tuple(part.get_shape()), DTYPES[part.get_dtype()]), file
        except (SafetensorError, OSError) as error:
            raise BrokenWeights(f"{file} is not a whole safetensors file: {error}") from error
        except KeyError as error:
            raise BrokenWeights(f"{file} holds a dtype that is not known here: {error}") from error
    if not headers:
        raise BrokenWeights(f"{path} holds no tensors")
    return Checkpoint(headers, places)


class Preparation:
    """`open` in a thread of the worker: a method that blocked would stop every stream of the engine meanwhile. `ticket` names it; `source`
    is what was opened, None until then."""

    def __init__(self, ticket: str, path: str, open: Callable[[], WeightSource]) -> None:
        self.ticket, self.path = ticket, path
        self._open = open
        self.source: WeightSource | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"prepare {path}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> WeightSource:
        """What was opened, once `done`. Raises what opening it raised."""
        if self.source is None:
            assert self._error is not None, "it is not done"
            raise self._error
        return self.source

    def _run(self) -> None:
        try:
            if sys.platform == "linux":  # where each thread has a nice value of its own
                os.nice(NICER)
            self.source = self._open()
        except Exception as error:
            # Raised in `result`, where it is answered.
            self._error = error
