"""Deltas in folders of slime and SkyRL, written after their sources.

slime: `_encode_delta` and `_write_delta_files` of update_weight_from_disk_delta.py at 624b824a8. SkyRL: `_process_tensor_delta` and
`publish` of weight_sync/delta_checkpoint.py at a9564572e.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard

from contract.peer_deltas import FORMATS
from contract.tensor_files import INDEX, Tensor, write_file

Weights = Mapping[str, Tensor]
CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": lambda data: str(xxhash.xxh3_128(data).hexdigest()),
    "blake3": lambda data: str(blake3.blake3(data).hexdigest()),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: sha256(data).hexdigest(),
}


def make_versions(count: int) -> list[Weights]:
    """`still` is the same in all; of `body` some elements change, of `steps` all, and `empty` has none."""
    rng = np.random.default_rng(0)
    body = rng.integers(0, 1 << 16, 600, "u2")
    made: list[Weights] = []
    for number in range(count):
        made.append(
            {
                "body": Tensor("BF16", (20, 30), body.copy()),
                "empty": Tensor("F32", (0, 2), np.zeros(0, "u4")),
                "steps": Tensor("I64", (2,), np.array([number, 7 * number], "u8")),
                "still": Tensor("F32", (3,), np.arange(3, dtype="u4")),
            }
        )
        body[rng.choice(600, 6, replace=False)] ^= 5
    return made


def save(folder: Path, weights: Weights) -> Path:
    folder.mkdir(parents=True)
    write_file(
        folder / "model.safetensors", {name: (each.dtype, each.shape) for name, each in weights.items()}, weights.items()
    )
    return folder


def compare(before: Weights, after: Weights, encoding: str) -> dict[str, bytes]:
    """Per changed tensor what goes into the file."""
    found = {}
    for name, tensor in after.items():
        old, new = before[name].data.view("u1"), tensor.data.view("u1")
        places = np.flatnonzero(old != new).astype("<u4")
        count = np.array([places.size], "<u4")
        whole = old ^ new if encoding == "xor" else np.concatenate([count.view("u1"), places.view("u1"), new[places]])
        if places.size:
            found[name] = zstandard.ZstdCompressor(level=1).compress(whole.tobytes())
    return found


def write_payload(file: Path, changed: Mapping[str, bytes], **metadata: str) -> None:
    tensors = {name: Tensor("U8", (len(data),), np.frombuffer(data, "u1")) for name, data in changed.items()}
    write_file(file, {name: (each.dtype, each.shape) for name, each in tensors.items()}, tensors.items(), **metadata)


def write_slime(
    root: Path, version: int, before: Weights, after: Weights, encoding: str = "xor", algorithm: str = "xxh3-128"
) -> Path:
    """Two ranks wrote a file each."""
    folder = root / FORMATS["slime"].format(version)
    folder.mkdir(parents=True)
    changed, places = compare(before, after, encoding), dict[str, str]()
    for rank in (0, 1):
        file, own = f"model-{rank:05d}-of-00002.safetensors", dict(list(changed.items())[rank::2])
        places |= dict.fromkeys(own, file)
        checksums = {name: CHECKSUMS[algorithm](after[name].data.tobytes()) for name in own}
        write_payload(folder / file, own, **checksums)
    told = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding}
    told |= {"compression_format": "zstd", "checksum_format": algorithm}
    (folder / INDEX).write_text(json.dumps({"metadata": told, "weight_map": places}))
    return folder


def write_skyrl(root: Path, version: int, before: Weights, after: Weights, algorithm: str = "xxh3-128") -> Path:
    folder, file = root / FORMATS["SkyRL"].format(version), "delta-rank00000-file000000.safetensors"
    folder.mkdir(parents=True)
    changed = compare(before, after, "xor")
    write_payload(folder / file, changed)
    records = []
    for name, data in changed.items():
        tensor, size = after[name], after[name].data.nbytes
        record: dict[str, Any] = {"name": name, "dtype": "bfloat16", "shape": list(tensor.shape), "payload_file": file}
        record |= {"payload_key": name, "uncompressed_num_bytes": size, "compressed_num_bytes": len(data)}
        records.append(record | {"checksum": CHECKSUMS[algorithm](tensor.data.tobytes()), "checksum_algorithm": algorithm})
    told = {"version": version, "base_version": version - 1, "tensors": records, "payload_files": [file]}
    (folder / "manifest.json").write_text(json.dumps(told))
    return folder
