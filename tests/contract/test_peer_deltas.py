"""Deltas of slime and SkyRL, in folders written after their sources: read to the bit, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from contract.deltas import verify
from contract.peer_deltas import PeerChain, fold_peer_chain, name_peer, read_peer_chain, write_peer_version
from contract.tensor_files import INDEX, BrokenWeights, Tensor, map_tensors, read_header
from tests.support.engine.peer_deltas import CHECKSUMS, Weights, make_versions, save, write_payload, write_skyrl, write_slime

Writer = Callable[[Path, int, Weights, Weights], Path]


def write_chain(root: Path, write: Writer, made: list[Weights]) -> Path:
    return [write(root, number, before, after) for number, (before, after) in enumerate(pairwise(made), start=1)][-1]


def same(some: Weights, others: Weights) -> bool:
    return some.keys() == others.keys() and all(
        (each.dtype, each.shape) == (others[name].dtype, others[name].shape) and np.array_equal(each.data, others[name].data)
        for name, each in some.items()
    )


WRITERS: dict[str, Writer] = {
    **{f"slime, {how}": partial(write_slime, encoding=how) for how in ("xor", "overwrite")},
    **{f"slime, {how}": partial(write_slime, algorithm=how) for how in ("blake3", "adler32")},
    **{f"SkyRL, {how}": partial(write_skyrl, algorithm=how) for how in ("xxh3-128", "sha256")},
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_peers_chain_gives_the_bits_that_went_in(writer: str, tmp_path: Path) -> None:
    made = make_versions(4)
    start, last = save(tmp_path / "start", made[0]), write_chain(tmp_path / "deltas", WRITERS[writer], made)
    assert name_peer(last) == writer.partition(",")[0] and name_peer(start) is None
    chain = read_peer_chain(last, start)
    assert [delta.version for delta in chain.deltas] == [1, 2, 3]
    assert same(dict(fold_peer_chain(chain)), made[3])
    (out := tmp_path / "folded").mkdir()
    state = write_peer_version(out, chain)
    verify(state)
    assert state.version == 3 and same(map_tensors(out), made[3])


def test_a_whole_version_of_slimes_begins_a_chain_anew(tmp_path: Path) -> None:
    """With it older deltas may be gone, and the checkpoint that engines started with is another base, which is refused."""
    made = make_versions(3)
    save(tmp_path / "weight_v000001", made[1])
    last = write_slime(tmp_path, 2, made[1], made[2])
    assert same(dict(fold_peer_chain(read_peer_chain(last, None))), made[2])
    with pytest.raises(BrokenWeights, match=r"weight_v000002 follows .*weight_v000001, and no other checkpoint"):
        read_peer_chain(last, save(tmp_path / "start", made[0]))


def test_a_manifest_of_skyrls_first_form_is_held_to_its_sha256(tmp_path: Path) -> None:
    made = make_versions(2)
    folder = write_skyrl(tmp_path / "deltas", 1, made[0], made[1], "sha256")
    told = json.loads((folder / "manifest.json").read_text())
    for record in told["tensors"]:
        record["sha256"] = record.pop("checksum")
        del record["checksum_algorithm"]
    (folder / "manifest.json").write_text(json.dumps(told))
    chain = read_peer_chain(folder, save(tmp_path / "start", made[0]))
    assert same(dict(fold_peer_chain(chain)), made[1])


def edit(file: Path, change: Callable[[Any], None]) -> None:
    told = json.loads(file.read_text())
    change(told)
    file.write_text(json.dumps(told))


def about(folder: Path) -> Path:
    return folder / ("manifest.json" if name_peer(folder) == "SkyRL" else INDEX)


def take_another_base(folder: Path, start: Path, made: list[Weights]) -> str:
    """Not one that the chain was pruned back to, either."""
    shutil.rmtree(start)
    save(start, made[1])
    return "body does not have the bytes that were published, after"


def damage_a_payload(folder: Path, start: Path, made: list[Weights]) -> str:
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[read_header(file).places["body"][3] - 3] ^= 1
    file.write_bytes(data)
    return "body does not have the bytes that were published|body is damaged"


def damage_a_checksum(folder: Path, start: Path, made: list[Weights]) -> str:
    digest = CHECKSUMS["xxh3-128"](made[3]["body"].data.tobytes()).encode()
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes().replace(digest, digest[::-1]))
    return "body does not have the bytes that were published, after"


def truncate_a_payload(folder: Path, start: Path, made: list[Weights]) -> str:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-2])
    return "is not a whole safetensors file"


def lose_a_link(folder: Path, start: Path, made: list[Weights]) -> str:
    shutil.rmtree(folder.with_name(folder.name[:-1] + "2"))
    return f"{folder.name[:-1]}2 is missing, which .*{folder.name} follows"


def swap_links(folder: Path, start: Path, made: list[Weights]) -> str:
    other = folder.with_name(folder.name[:-1] + "2")
    for source, target in ((other, start.with_name("x")), (folder, other), (start.with_name("x"), folder)):
        source.rename(target)
    return f"{folder.name} holds version 2, which belongs into {other.name}"


def lack_a_tensor(folder: Path, start: Path, made: list[Weights]) -> str:
    """SkyRL's own reader leaves out what it does not find, with a warning: the engine would keep old values."""
    shutil.rmtree(start)
    save(start, {name: tensor for name, tensor in made[0].items() if name != "body"})
    return "changes body, which its base lacks"


def have_another_shape(folder: Path, start: Path, made: list[Weights]) -> str:
    shutil.rmtree(start)
    save(start, {**made[0], "steps": Tensor("I64", (1,), np.zeros(1, "u8"))})
    return "steps has another size in its base"


def follow_itself(folder: Path, start: Path, made: list[Weights]) -> str:
    edit(about(folder), lambda told: told.get("metadata", told).update(base_version=3))
    return "follows version 3, which is not before it"


def name_no_start(folder: Path, start: Path, made: list[Weights]) -> str:
    return "follows the checkpoint that the engines started with: name it"


def know_no_number(folder: Path, start: Path, made: list[Weights]) -> str:
    edit(about(folder), lambda told: told.get("metadata", told).update(version="three"))
    return f"{folder.name} is damaged"


@pytest.mark.parametrize("write", [write_slime, write_skyrl])
@pytest.mark.parametrize(
    "spoil",
    [
        take_another_base, damage_a_payload, damage_a_checksum, truncate_a_payload, lose_a_link, swap_links, lack_a_tensor,
        have_another_shape, follow_itself, name_no_start, know_no_number,
    ],
)  # fmt: skip
def test_a_spoilt_chain_of_a_peers_is_refused_by_name(
    spoil: Callable[[Path, Path, list[Weights]], str], write: Writer, tmp_path: Path
) -> None:
    made = make_versions(4)
    start, last = save(tmp_path / "start", made[0]), write_chain(tmp_path / "deltas", write, made)
    says = spoil(last, start, made)
    with pytest.raises(BrokenWeights, match=says):
        dict(fold_peer_chain(read_peer_chain(last, None if spoil is name_no_start else start)))


def test_an_unknown_encoding_or_checksum_is_refused(tmp_path: Path) -> None:
    made = make_versions(2)
    start, folder = save(tmp_path / "start", made[0]), write_slime(tmp_path / "deltas", 1, made[0], made[1])
    edit(folder / INDEX, lambda told: told["metadata"].update(checksum_format="crc7"))
    with pytest.raises(BrokenWeights, match="checksums crc7 are not known here"):
        dict(fold_peer_chain(read_peer_chain(folder, start)))
    edit(folder / INDEX, lambda told: told["metadata"].update(delta_encoding="arithmetic"))
    with pytest.raises(BrokenWeights, match="known are xor and overwrite in zstd"):
        read_peer_chain(folder, start)


def test_a_payload_that_claims_more_than_a_tensor_has_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    made = make_versions(2)
    start, folder = save(tmp_path / "start", made[0]), write_slime(tmp_path / "deltas", 1, made[0], made[1])
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    file = next(folder.glob("*-00000-*"))
    write_payload(file, {"body": bomb}, body="0")
    edit(folder / INDEX, lambda told: told.update(weight_map={"body": file.name}))
    with pytest.raises(BrokenWeights, match="body has another size in its base, or is damaged: 6005 bytes for 1200"):
        dict(fold_peer_chain(PeerChain(start, read_peer_chain(folder, start).deltas)))
