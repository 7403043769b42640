"""Safetensors files without torch: tensors as integer views of mapped memory, for code that compares, digests and rewrites bytes.

Source: the format of safetensors 0.8, an 8-byte length, a JSON header, the data. numpy is imported where it is used: `contract` installs
without it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

INDEX = "model.safetensors.index.json"
HEADER_BYTES = 1 << 28
"""No header is longer; a length beyond it is damage."""
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8), **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2), **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}  # fmt: skip
"""By the format's name of a dtype."""


class BrokenWeights(ValueError):
    """A file, a link of a chain or a tensor that is not what it has to be; the message names it."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data` has one unsigned integer per element, flat and in row-major order: the bits of the tensor, whatever its `dtype`, which is
    named as the format does."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Header:
    """`places` are dtype, shape, and the first byte and the one behind the last, in the file; `metadata` is the file's own."""

    places: Mapping[str, tuple[str, tuple[int, ...], int, int]]
    metadata: Mapping[str, str]


def list_files(path: Path) -> dict[Path, list[str] | None]:
    """The safetensors files at `path`, a file or a folder with one, several or an index, and which tensors to read of each (None: all).

    Raises BrokenWeights."""
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        raise BrokenWeights(f"{path} does not exist")
    if (path / INDEX).is_file():
        return _read_index(path)
    files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("adapter_"))
    if not files:
        kind = "is a LoRA adapter, push it as kind lora" if (path / "adapter_config.json").is_file() else "has no *.safetensors"
        raise BrokenWeights(f"{path} {kind}")
    return dict.fromkeys(files)


def _read_index(path: Path) -> dict[Path, list[str] | None]:
    try:
        places = json.loads((path / INDEX).read_text())["weight_map"]
        shards: dict[Path, list[str] | None] = {}
        for name, file in places.items():
            shards.setdefault(path / file, []).append(name)  # type: ignore[union-attr]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenWeights(f"{path / INDEX} is not a safetensors index: {error!r}") from error
    if missing := [file.name for file in shards if not file.is_file()]:
        raise BrokenWeights(f"{path} lacks {', '.join(missing)}, which its index names")
    return shards


def read_header(file: Path) -> Header:
    """Raises BrokenWeights unless the file is as long as its header says, and every tensor as long as its shape."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 1 < length <= min(HEADER_BYTES, size - 8):
                raise BrokenWeights(f"{file} is not a whole safetensors file: its header is said to have {length} bytes")
            described = json.loads(opened.read(length))
        metadata = described.pop("__metadata__", {})
        places = {name: _read_place(name, described[name], 8 + length) for name in described}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BrokenWeights):
            raise
        raise BrokenWeights(f"{file} is not a whole safetensors file: {error!r}") from error
    end = max((place[3] for place in places.values()), default=8 + length)
    if end != size:
        raise BrokenWeights(f"{file} is not a whole safetensors file: it has {size} bytes, its header says {end}")
    return Header(places, metadata)


def _read_place(name: str, described: Mapping[str, Any], start: int) -> tuple[str, tuple[int, ...], int, int]:
    dtype, shape, (first, end) = described["dtype"], tuple(described["shape"]), described["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise BrokenWeights(f"{name} has a dtype that is not known here: {dtype}")
    if not 0 <= first <= end or end - first != math.prod(shape) * ITEM_BYTES[dtype]:
        raise BrokenWeights(f"{name} does not have the {end - first} bytes that the header gives it")
    return dtype, shape, start + first, start + end


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file or folder; reading its data reads the file. Raises BrokenWeights, also for a tensor that comes twice."""
    tensors: dict[str, Tensor] = {}
    for file, wanted in list_files(path).items():
        found = map_file(file, read_header(file))
        for name in found if wanted is None else wanted:
            if name not in found:
                raise BrokenWeights(f"{file} lacks {name}, which the index of its folder names")
            if name in tensors:
                raise BrokenWeights(f"{path} holds {name} twice")
            tensors[name] = found[name]
    return tensors


def map_file(file: Path, header: Header) -> dict[str, Tensor]:
    """The tensors of one file. Raises BrokenWeights if it cannot be mapped."""
    import numpy as np

    try:
        mapped = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise BrokenWeights(f"{file} cannot be read: {error}") from error
    return {
        name: Tensor(dtype, shape, as_integers(mapped[first:end], ITEM_BYTES[dtype]))
        for name, (dtype, shape, first, end) in header.places.items()
    }


def as_integers(data: np.ndarray[Any, Any], item_bytes: int) -> np.ndarray[Any, Any]:
    """Bytes as unsigned integers of that size."""
    return data.view(f"u{item_bytes}") if data.size else data[:0].astype(f"u{item_bytes}")


def write_file(
    file: Path, sizes: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Iterable[tuple[str, Tensor]], **metadata: str
) -> None:
    """Writes and flushes one safetensors file. `tensors` come in the order of `sizes`, the dtype and shape of each.

    Raises OSError; then the file is not whole."""
    described: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in sizes.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        for name, (written, tensor) in zip(sizes, tensors, strict=True):
            assert (name, *sizes[name]) == (written, tensor.dtype, tensor.shape), "the header describes other tensors"
            opened.write(tensor.data.view("u1").data if tensor.data.size else b"")
        opened.flush()
        os.fsync(opened.fileno())
