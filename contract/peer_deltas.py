"""Deltas as slime, miles and SkyRL write them: folders that are read as they are, onto a base, into a checkpoint with digests.

slime and miles: `weight_v000012` with safetensors files, each tensor of which is a changed one's bytes, compressed; checksums in the
files' metadata, the rest in the index (slime/utils/disk_delta.py, July 2026). SkyRL: `delta-00000012` with safetensors files and
`manifest.json` (skyrl/backends/skyrl_train/weight_sync/delta_checkpoint.py, July 2026).

Their chains are of numbers: a delta names the version before it, version 0 is the checkpoint that engines started with, and checksums are
those of the tensors that change. So a tensor that no delta changes is as it is in the base, whatever that is; each one that changes is held
to its checksum after every delta, and a tensor that the base lacks is refused.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.deltas import Stamp, State, stamp, verify, write_digests
from contract.tensor_files import INDEX, BrokenWeights, Tensor, as_integers, map_file, map_tensors, read_header, write_file

if TYPE_CHECKING:
    import numpy as np

MANIFEST = "manifest.json"
FORMATS = {"slime": "weight_v{:06d}", "SkyRL": "delta-{:08d}"}
"""How each names the folder of a version; miles does as slime."""


@dataclass(frozen=True, slots=True)
class PeerChange:
    """The tensor `key` of `file` has the compressed change; `checksum`, made by `algorithm`, is of the tensor's bytes after it."""

    file: str
    key: str
    checksum: str
    algorithm: str


@dataclass(frozen=True, slots=True)
class PeerDelta:
    """`encoding` is xor, of all bytes of a tensor, or overwrite: places of bytes and what they become."""

    folder: Path
    version: int
    base_version: int
    encoding: str
    changes: Mapping[str, PeerChange]


@dataclass(frozen=True, slots=True)
class PeerChain:
    """A whole checkpoint, and the deltas that follow it, oldest first."""

    base: Path
    deltas: tuple[PeerDelta, ...]


def name_peer(folder: Path) -> str | None:
    """Whose delta the folder holds: slime or SkyRL; None if neither's."""
    if (folder / MANIFEST).is_file():
        return "SkyRL"
    try:
        return "slime" if "delta_encoding" in json.loads((folder / INDEX).read_text())["metadata"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_peer_delta(folder: Path) -> PeerDelta:
    """Raises BrokenWeights unless the folder holds a delta of a format that is known, of the version that it is named for."""
    peer = name_peer(folder)
    if peer is None:
        raise BrokenWeights(f"{folder} holds no delta of {' or '.join(FORMATS)}")
    try:
        delta = _read_skyrl(folder) if peer == "SkyRL" else _read_slime(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BrokenWeights):
            raise
        raise BrokenWeights(f"{folder} is damaged: {error!r}") from error
    if folder.name != (named := FORMATS[peer].format(delta.version)):
        raise BrokenWeights(f"{folder} holds version {delta.version}, which belongs into {named}")
    if not delta.base_version < delta.version:
        raise BrokenWeights(f"{folder} follows version {delta.base_version}, which is not before it")
    return delta


def _read_slime(folder: Path) -> PeerDelta:
    index = json.loads((folder / INDEX).read_text())
    told, changes = index["metadata"], {}
    if (compression := told["compression_format"]) != "zstd" or told["delta_encoding"] not in ("xor", "overwrite"):
        raise BrokenWeights(f"{folder} is {told['delta_encoding']} in {compression}, and known are xor and overwrite in zstd")
    for name, file in index["weight_map"].items():
        checksums = read_header(folder / file).metadata
        changes[name] = PeerChange(file, name, checksums[name], told["checksum_format"])
    return PeerDelta(folder, int(told["version"]), int(told["base_version"]), told["delta_encoding"], changes)


def _read_skyrl(folder: Path) -> PeerDelta:
    told = json.loads((folder / MANIFEST).read_text())
    changes = {}
    for each in told["tensors"]:
        # Its first manifests had no other checksums than sha256, under that name.
        algorithm = each.get("checksum_algorithm", "xxh3-128") if "checksum" in each else "sha256"
        checksum = each["checksum"] if "checksum" in each else each["sha256"]
        changes[each["name"]] = PeerChange(each["payload_file"], each["payload_key"], checksum, algorithm)
    if len(changes) < len(told["tensors"]):
        raise BrokenWeights(f"{folder} changes a tensor twice")
    return PeerDelta(folder, int(told["version"]), int(told["base_version"]), "xor", changes)


def read_peer_chain(folder: Path, start: Path | None) -> PeerChain:
    """The deltas that end with the folder's, back to version 0, of which `start` is the checkpoint, or to a whole version beside them.

    Raises BrokenWeights naming a folder that is missing or damaged, and if `start` is missing, or there is another base."""
    deltas = [read_peer_delta(folder)]
    named = FORMATS[name_peer(folder) or ""]
    while True:
        base = folder.parent / named.format(deltas[0].base_version)
        if base.is_dir() and name_peer(base) is not None:
            deltas.insert(0, read_peer_delta(base))
        elif base.is_dir() and start is None:
            return PeerChain(base, tuple(deltas))
        elif base.is_dir():
            raise BrokenWeights(f"{deltas[0].folder} follows {base}, and no other checkpoint")
        elif deltas[0].base_version:
            raise BrokenWeights(f"{base} is missing, which {deltas[0].folder} follows")
        elif start is None:
            raise BrokenWeights(f"{deltas[0].folder} follows the checkpoint that the engines started with: name it (--base)")
        else:
            return PeerChain(start, tuple(deltas))


def fold_peer_chain(chain: PeerChain) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the base after the deltas, one at a time and in order of name.

    Raises BrokenWeights naming the first tensor that is not what its checksum says, or that the base lacks."""
    base, deltas = map_tensors(chain.base), chain.deltas
    for delta in deltas:
        if unknown := sorted(delta.changes.keys() - base.keys()):
            raise BrokenWeights(f"{delta.folder} changes {unknown[0]}, which its base lacks")
    files = [
        {name: map_file(delta.folder / name, read_header(delta.folder / name)) for name in _list_files(delta)}
        for delta in deltas
    ]
    for name in sorted(base):
        tensor = base[name]
        for delta, mapped in zip(deltas, files, strict=True):
            if (change := delta.changes.get(name)) is not None:
                tensor = _change(tensor, delta, name, mapped[change.file])
        yield name, tensor


def _list_files(delta: PeerDelta) -> set[str]:
    return {change.file for change in delta.changes.values()}


def _change(tensor: Tensor, delta: PeerDelta, name: str, mapped: Mapping[str, Tensor]) -> Tensor:
    change, before = delta.changes[name], tensor.data.view("u1")
    if change.key not in mapped:
        raise BrokenWeights(f"{delta.folder}/{change.file} lacks {change.key}")
    # The larger encoding is a count, and a place and a byte for each byte.
    told = _decompress(mapped[change.key].data.tobytes(), 4 + 5 * before.size, f"{delta.folder}: {name}")
    try:
        after = _xor(before, told) if delta.encoding == "xor" else _overwrite(before, told)
    except (ValueError, IndexError) as error:
        raise BrokenWeights(f"{delta.folder}: {name} has another size in its base, or is damaged: {error}") from error
    if digest(after, change.algorithm) != change.checksum:
        raise BrokenWeights(
            f"{name} does not have the bytes that were published, after {delta.folder}: it is damaged, or its base another"
        )
    return replace(tensor, data=as_integers(after, tensor.data.itemsize))


def _xor(before: np.ndarray[Any, Any], told: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if told.size != before.size:
        raise ValueError(f"{told.size} bytes for {before.size}")
    after: np.ndarray[Any, Any] = before ^ told
    return after


def _overwrite(before: np.ndarray[Any, Any], told: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    count = int(told[:4].view("<u4")[0])
    if told.size != 4 + 5 * count:
        raise ValueError(f"{count} bytes that change do not take {told.size}")
    after = before.copy()
    after[told[4 : 4 + 4 * count].view("<u4")] = told[4 + 4 * count :]
    return after


def _decompress(data: bytes, most: int, whose: str) -> np.ndarray[Any, Any]:
    import numpy as np

    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise BrokenWeights("these deltas need the package zstandard: pip install zstandard in this environment") from error
    try:
        # Not `decompress`, which believes the size that the data claims.
        found = zstandard.ZstdDecompressor().stream_reader(data).read(most + 1)
    except zstandard.ZstdError as error:
        raise BrokenWeights(f"{whose} is damaged: {error}") from error
    return np.frombuffer(found, "u1")


def digest(data: np.ndarray[Any, Any], algorithm: str) -> str:
    """In hexadecimal. Raises BrokenWeights for an algorithm that is not known, or not installed."""
    if algorithm == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    if algorithm == "sha256":
        return hashlib.sha256(data.data).hexdigest()
    try:
        if algorithm == "xxh3-128":
            import xxhash

            return xxhash.xxh3_128(data.data).hexdigest()
        if algorithm == "blake3":
            import blake3

            return str(blake3.blake3(data.data).hexdigest())
    except ModuleNotFoundError as error:
        raise BrokenWeights(
            f"checksums {algorithm} need the package {error.name}: pip install it in this environment"
        ) from error
    raise BrokenWeights(f"checksums {algorithm} are not known here")


def write_peer_version(folder: Path, chain: PeerChain) -> State:
    """Writes the version after the deltas as a whole checkpoint with digests, and verifies what is in the file.

    Raises BrokenWeights, and OSError from a full disk."""
    stamps: dict[str, Stamp] = {}

    def stamped() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in fold_peer_chain(chain):
            stamps[name] = stamp(tensor)
            yield name, tensor

    sizes = {name: (tensor.dtype, tensor.shape) for name, tensor in sorted(map_tensors(chain.base).items())}
    write_file(folder / "model.safetensors", sizes, stamped(), format="pt")
    state = write_digests(folder, stamps, chain.deltas[-1].version)
    verify(state)
    return state
