"""Versions as what changed: exact for every dtype, small, and refused by name when anything of a chain is not what was published."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.deltas import (
    DELTA,
    DIGESTS,
    State,
    apply_changes,
    encode_changes,
    encode_delta,
    fold,
    read_chain,
    root_of,
    stamp,
    verify,
    write_delta,
    write_digests,
    write_folded,
)
from contract.tensor_files import ITEM_BYTES, BrokenWeights, Tensor, map_tensors, read_header, write_file

Weights = Mapping[str, Tensor]


def tensor(dtype: str, *values: int) -> Tensor:
    return Tensor(dtype, (len(values),), np.array(values, f"u{ITEM_BYTES[dtype]}"))


def save(folder: Path, weights: Weights, version: int) -> State:
    folder.mkdir(parents=True)
    sizes = {name: (each.dtype, each.shape) for name, each in weights.items()}
    write_file(folder / "model.safetensors", sizes, weights.items(), format="pt")
    return write_digests(folder, {name: stamp(each) for name, each in weights.items()}, version)


def extend(base: State, before: Weights, after: Weights, version: int) -> State:
    delta = encode_delta(before, base.stamps, after, most_bytes=1 << 30)
    assert delta is not None
    folder = base.folder.parent / f"version-{version}"
    folder.mkdir()
    write_delta(folder, delta, version, base)
    return State(folder, version, root_of(delta.stamps), delta.stamps)


def fold_chain(folder: Path) -> dict[str, Tensor]:
    chain = read_chain(folder)
    return dict(fold(map_tensors(chain.anchor.folder), chain.links, chain.stamps))


def same(some: Weights, others: Weights) -> bool:
    return some.keys() == others.keys() and all(
        (each.dtype, each.shape) == (others[name].dtype, others[name].shape) and np.array_equal(each.data, others[name].data)
        for name, each in some.items()
    )


@st.composite
def versions(draw: Any) -> list[Weights]:
    """Up to four versions of tensors of any dtype, empty ones, scalars and equal ones among them."""
    dtypes = draw(st.lists(st.sampled_from(sorted(ITEM_BYTES)), min_size=1, max_size=4))
    sizes = [draw(st.integers(0, 6)) for _ in dtypes]
    made: list[Weights] = []
    for _ in range(draw(st.integers(1, 4))):
        values = [
            draw(st.lists(st.integers(0, 256 ** ITEM_BYTES[dtype] - 1), min_size=size, max_size=size))
            for dtype, size in zip(dtypes, sizes, strict=True)
        ]
        made.append({f"t{i}": tensor(dtype, *row) for i, (dtype, row) in enumerate(zip(dtypes, values, strict=True))})
    return made


@settings(max_examples=30, deadline=None)
@given(versions())
def test_a_chain_gives_the_bits_that_went_in(tmp_path_factory: pytest.TempPathFactory, made: list[Weights]) -> None:
    folder = tmp_path_factory.mktemp("chain")
    state = save(folder / "version-1", made[0], 1)
    for number, (before, after) in enumerate(pairwise(made), start=2):
        state = extend(state, before, after, number)
        assert same(fold_chain(state.folder), after)
    chain = read_chain(state.folder)
    assert (chain.root, chain.stamps, chain.version) == (state.root, state.stamps, len(made))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 200_000), max_size=6), st.sampled_from([1, 2, 4, 8]))
def test_gaps_of_any_width_are_kept(gaps: list[int], width: int) -> None:
    places = np.cumsum(gaps, dtype="i8")
    before = np.zeros(int(places[-1]) + 3 if gaps else 3, f"u{width}")
    after = before.copy()
    after[places] = 255
    encoded, entries = encode_changes(before, after)
    assert np.array_equal(apply_changes(before, encoded, entries), after) and not before.any()
    assert np.array_equal(apply_changes(after, encoded, entries), before), "made twice, they undo themselves"


def test_zero_and_minus_zero_differ_and_a_nan_equals_itself(tmp_path: Path) -> None:
    """bfloat16: 0x8000 is -0.0 and 0x7FC0 a NaN; compared as floats, the first change would be lost and the second one made up."""
    before, after = {"w": tensor("BF16", 0, 0x7FC0, 1)}, {"w": tensor("BF16", 0x8000, 0x7FC0, 1)}
    state = extend(save(tmp_path / "version-1", before, 1), before, after, 2)
    assert read_chain(state.folder).links[0].changes["w"].entries == 1
    assert same(fold_chain(state.folder), after)


def test_unchanged_weights_cost_a_header(tmp_path: Path) -> None:
    weights = {f"model.layers.{number}.weight": tensor("BF16", *range(500)) for number in range(200)}
    state = extend(save(tmp_path / "version-1", weights, 1), weights, weights, 2)
    assert (state.folder / DELTA).stat().st_size < 1000
    assert same(fold_chain(state.folder), weights)


def test_one_percent_of_random_changes_costs_2_2_percent_at_most(tmp_path: Path) -> None:
    """Random bits cannot be packed, so trained weights, of which mostly low bits change, cost less."""
    rng = np.random.default_rng(0)
    before = {f"t{i}": Tensor("BF16", (500, 2000), rng.integers(0, 1 << 16, 1_000_000, "u2")) for i in range(5)}
    after = {name: Tensor(each.dtype, each.shape, each.data.copy()) for name, each in before.items()}
    for each in after.values():
        each.data[rng.choice(each.data.size, each.data.size // 100, replace=False)] = rng.integers(0, 1 << 16, 10_000, "u2")
    state = extend(save(tmp_path / "version-1", before, 1), before, after, 2)
    assert (state.folder / DELTA).stat().st_size < 0.022 * 10_000_000
    assert same(fold_chain(state.folder), after)


def test_names_that_share_their_bytes_are_encoded_once(tmp_path: Path) -> None:
    """Tied weights, which stand under both names in whole checkpoints."""
    rng = np.random.default_rng(0)
    old, new = (tensor("BF16", *rng.integers(0, 1 << 16, 5000)) for _ in range(2))
    state = extend(
        save(tmp_path / "version-1", {"embed": old, "head": old}, 1),
        {"embed": old, "head": old}, {"embed": new, "head": new}, 2,
    )  # fmt: skip
    assert [*read_header(state.folder / DELTA).places] == ["embed"]
    assert same(fold_chain(state.folder), {"embed": new, "head": new})


@pytest.mark.parametrize(
    "after",
    [
        {"a": tensor("BF16", 1, 2)},
        {"a": tensor("BF16", 1, 2), "b": tensor("F32", 1), "c": tensor("F32", 1)},
        {"a": tensor("F16", 1, 2), "b": tensor("F32", 1)},
        {"a": tensor("BF16", 1, 2, 3), "b": tensor("F32", 1)},
        {"a": Tensor("BF16", (2, 1), np.array([1, 2], "u2")), "b": tensor("F32", 1)},
    ],
    ids=["a name less", "a name more", "another dtype", "another length", "another shape"],
)
def test_weights_of_another_structure_have_no_delta(after: Weights) -> None:
    before = {"a": tensor("BF16", 1, 2), "b": tensor("F32", 1)}
    stamps = {name: stamp(each) for name, each in before.items()}
    assert encode_delta(before, stamps, after, most_bytes=1 << 30) is None


def test_a_delta_that_would_not_pay_is_none() -> None:
    rng = np.random.default_rng(0)
    before, after = ({"w": tensor("BF16", *rng.integers(0, 1 << 16, 5000))} for _ in range(2))
    stamps = {name: stamp(each) for name, each in before.items()}
    assert encode_delta(before, stamps, after, most_bytes=5000) is None
    assert encode_delta(before, stamps, after, most_bytes=50_000) is not None


@pytest.fixture
def chain(tmp_path: Path) -> list[State]:
    """Versions 1 to 4 of a tensor that every link changes, `w`, and one that none does, `still`."""
    rng = np.random.default_rng(0)
    weights = [{"still": tensor("BF16", *range(300)), "w": tensor("BF16", *rng.integers(0, 1 << 16, 300))} for _ in range(4)]
    states = [save(tmp_path / "version-1", weights[0], 1)]
    for number in (2, 3, 4):
        states.append(extend(states[-1], weights[number - 2], weights[number - 1], number))
    return states


def lose(link: Path) -> str:
    shutil.rmtree(link)
    return r"version-3 is missing, which .*version-4 follows"


def swap(link: Path) -> str:
    for source, target in (("version-2", "x"), ("version-3", "version-2"), ("x", "version-3")):
        (link.parent / source).rename(link.parent / target)
    return "version-3 holds version 2, which belongs into version-2"


def repeat(link: Path) -> str:
    shutil.copyfile(link.parent / "version-2" / DELTA, link / DELTA)
    return "version-3 holds version 2, which belongs into version-2"


def repeat_at_the_end(link: Path) -> str:
    """By their roots alone, versions 1, 2, 3 and 3 again are a chain: it would be served as version 4."""
    shutil.copyfile(link / DELTA, link.parent / "version-4" / DELTA)
    return "version-4 holds version 3, which belongs into version-3"


def truncate(link: Path) -> str:
    (link / DELTA).write_bytes((link / DELTA).read_bytes()[:-10])
    return "version-3/delta.safetensors is not a whole safetensors file"


def flip_data(link: Path) -> str:
    data = bytearray((link / DELTA).read_bytes())
    data[-200] ^= 4
    (link / DELTA).write_bytes(data)
    return r"version-3: w is damaged|w does not have the bytes that were published, after .*version-4"


def flip_digest(link: Path) -> str:
    data = (link / DELTA).read_bytes()
    digest = read_chain(link).stamps["w"].digest.encode()
    (link / DELTA).write_bytes(data.replace(digest, digest[::-1]))
    return "version-3 is damaged: its digests are not those of its root"


def take_another_trainers_base(link: Path) -> str:
    """A trainer that began again writes version 2 anew, and version 3 still follows the old one."""
    weights = map_tensors(link.parent / "version-1")
    shutil.rmtree(link.parent / "version-2")
    save(link.parent / "version-2", {**weights, "w": tensor("BF16", *range(300))}, 2)
    return r"version-3 follows the root \w{12}, and version-2 has"


def damage_the_anchor(name: str) -> Callable[[Path], str]:
    def damage(link: Path) -> str:
        file = link.parent / "version-1" / "model.safetensors"
        _, _, first, _ = read_header(file).places[name]
        data = bytearray(file.read_bytes())
        data[first + 5] ^= 1
        file.write_bytes(data)
        return f"{name} does not have the bytes that were published"

    damage.__name__ = f"damage_{name}_in_the_anchor"
    return damage


def damage_the_digests(link: Path) -> str:
    file = link.parent / "version-1" / DIGESTS
    file.write_text(file.read_text().replace("BF16", "F16", 1))
    return "digests.json is damaged"


def lose_the_digests(link: Path) -> str:
    (link.parent / "version-1" / DIGESTS).unlink()
    return "version-1 is neither a delta nor an anchor"


def lead_elsewhere(link: Path) -> str:
    (link / DELTA).write_bytes((link / DELTA).read_bytes().replace(b"version-2", b"../sion-2"))
    return "names '../sion-2' as its base, which is no folder beside it"


def lead_back(link: Path) -> str:
    (link / DELTA).write_bytes((link / DELTA).read_bytes().replace(b"version-2", b"version-4"))
    return "version-3 follows version-4, which follows it"


@pytest.mark.parametrize(
    "spoil",
    [
        lose,
        swap,
        repeat,
        repeat_at_the_end,
        truncate,
        flip_data,
        flip_digest,
        take_another_trainers_base,
        damage_the_anchor("w"),
        damage_the_anchor("still"),
        damage_the_digests,
        lose_the_digests,
        lead_elsewhere,
        lead_back,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_a_spoilt_chain_is_refused_by_the_name_of_its_link_or_tensor(spoil: Callable[[Path], str], chain: list[State]) -> None:
    says = spoil(chain[2].folder)
    with pytest.raises(BrokenWeights, match=says):
        fold_chain(chain[3].folder)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_bit_of_a_link_flips_the_weights_are_those_published_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    before, after = {"w": tensor("F32", 1, 2, 3), "v": tensor("I8", 1)}, {"w": tensor("F32", 1, 7, 3), "v": tensor("I8", 1)}
    state = extend(save(folder / "version-1", before, 1), before, after, 2)
    file = folder / data.draw(st.sampled_from([f"version-2/{DELTA}", f"version-1/{DIGESTS}", "version-1/model.safetensors"]))
    spoilt = bytearray(file.read_bytes())
    spoilt[data.draw(st.integers(0, len(spoilt) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(spoilt)
    try:
        folded = fold_chain(state.folder)
    except BrokenWeights:
        return
    assert same(folded, after)


def test_a_chain_is_folded_into_a_whole_checkpoint_that_is_verified(chain: list[State], tmp_path: Path) -> None:
    found = read_chain(chain[3].folder)
    assert found.folders == tuple(state.folder for state in chain)
    assert [link.version for link in found.behind(chain[1].root) or ()] == [3, 4] and found.behind("another") is None
    (target := tmp_path / "folded").mkdir()
    written = write_folded(target, map_tensors(found.anchor.folder), found.links, found.stamps, found.version)
    assert (written.root, written.version) == (chain[3].root, 4)
    verify(written)
    data = bytearray((target / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (target / "model.safetensors").write_bytes(data)
    with pytest.raises(BrokenWeights, match=r"w does not have the bytes that were published, in .*folded"):
        verify(written)


def test_the_files_are_those_that_safetensors_reads_and_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    weights = {"bf": torch.randn(3, 4).bfloat16(), "i": torch.arange(5), "empty": torch.zeros(0, 2), "one": torch.tensor(2.5)}
    save_file(weights, tmp_path / "theirs.safetensors")
    mapped = map_tensors(tmp_path / "theirs.safetensors")
    sizes = {name: (each.dtype, each.shape) for name, each in mapped.items()}
    write_file(tmp_path / "ours.safetensors", sizes, mapped.items())
    read = load_file(tmp_path / "ours.safetensors")
    assert read.keys() == weights.keys() and all(torch.equal(read[name], each) for name, each in weights.items())
