"""The mirror of an engine's machine: the published bits or the old copy, whatever is damaged."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest

from contract.deltas import DELTA, DIGESTS, State, read_chain, read_digests, verify
from contract.tensor_files import BrokenWeights, map_tensors, read_header
from proxy.engine.in_vllm.mirror import BUILDING, CURRENT, Mirror
from tests.support.engine.delta_versions import write_chain
from tests.support.full_disk import disk_with_room_for


@pytest.fixture
def versions(tmp_path: Path) -> list[State]:
    """Versions 1 to 4; the first is an anchor."""
    return write_chain(tmp_path, 4)


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "mirror")


def held(tmp_path: Path) -> State:
    return read_digests((tmp_path / "mirror" / CURRENT).resolve())


def flip(file: Path, name: str) -> None:
    data = bytearray(file.read_bytes())
    data[read_header(file).places[name][2] + 7] ^= 1
    file.write_bytes(data)


def test_it_follows_a_chain_link_by_link_and_keeps_one_copy(mirror: Mirror, versions: list[State], tmp_path: Path) -> None:
    for state in versions:
        copy = mirror.advance(read_chain(state.folder))
        assert (copy.state.root, copy.state.version) == (state.root, state.version)
        verify(copy.state)
    del copy
    mirror.advance(read_chain(versions[0].folder))
    mirror.advance(read_chain(versions[1].folder))
    left = [path.name for path in (tmp_path / "mirror").iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(left) == 1


def test_links_behind_its_copy_are_not_read_again(mirror: Mirror, versions: list[State]) -> None:
    """The anchor's data could be on a slow link, or damaged meanwhile: only headers are read of what the mirror holds."""
    mirror.advance(read_chain(versions[1].folder))
    flip(versions[0].folder / "model.safetensors", "w")
    verify(mirror.advance(read_chain(versions[3].folder)).state)


def test_a_copy_that_an_engine_reads_is_not_removed(mirror: Mirror, versions: list[State]) -> None:
    first = mirror.advance(read_chain(versions[0].folder))
    mirror.advance(read_chain(versions[1].folder))
    verify(first.state)
    first.release()
    mirror.advance(read_chain(versions[2].folder))
    assert not first.state.folder.exists()


def test_a_copy_that_a_killed_process_left_is_removed_though_the_mirror_needs_no_other(
    mirror: Mirror, versions: list[State], tmp_path: Path
) -> None:
    """It is swapped in before the one before is removed: that one stayed until the next version. The place may lie behind a link."""
    mirror.advance(read_chain(versions[1].folder)).release()
    (tmp_path / "linked").symlink_to("mirror")
    shutil.copytree(held(tmp_path).folder, left := tmp_path / "mirror" / "0123456789abcdef-01234567")
    verify(Mirror(tmp_path / "linked").advance(read_chain(versions[1].folder)).state)
    assert not left.exists() and held(tmp_path).root == versions[1].root


@pytest.mark.parametrize("name", ["w", "still"])
def test_a_damaged_copy_is_refused_by_the_name_of_the_tensor_and_then_made_anew(
    name: str, mirror: Mirror, versions: list[State]
) -> None:
    copy = mirror.advance(read_chain(versions[1].folder))
    flip(copy.state.folder / "model.safetensors", name)
    with pytest.raises(BrokenWeights, match=f"{name} does not have the bytes that were published"):
        mirror.advance(read_chain(versions[2].folder))
    verify(mirror.advance(read_chain(versions[2].folder)).state)


def test_a_damaged_copy_of_the_version_itself_is_never_given_out(mirror: Mirror, versions: list[State]) -> None:
    """As when an engine starts again beside a mirror that another process wrote."""
    copy = mirror.advance(read_chain(versions[1].folder))
    flip(copy.state.folder / "model.safetensors", "still")
    with pytest.raises(BrokenWeights, match="still does not have the bytes"):
        mirror.advance(read_chain(versions[1].folder))


def test_a_damaged_link_leaves_the_mirror_as_it_was(mirror: Mirror, versions: list[State], tmp_path: Path) -> None:
    before = mirror.advance(read_chain(versions[1].folder)).state
    flip(versions[2].folder / DELTA, "w")
    with pytest.raises(BrokenWeights, match=r"w is damaged|w does not have the bytes"):
        mirror.advance(read_chain(versions[2].folder))
    assert held(tmp_path) == before
    verify(before)
    assert not (tmp_path / "mirror" / BUILDING).exists()


@pytest.mark.parametrize("room", [0, 5000])
def test_a_full_disk_leaves_the_mirror_as_it_was(room: int, mirror: Mirror, versions: list[State], tmp_path: Path) -> None:
    """At the first byte, and in the middle of the tensors."""
    before = mirror.advance(read_chain(versions[1].folder)).state
    with disk_with_room_for(room), pytest.raises(BrokenWeights, match=r"the mirror in .* cannot be written: .*too large"):
        mirror.advance(read_chain(versions[2].folder))
    assert held(tmp_path) == before
    assert not (tmp_path / "mirror" / BUILDING).exists()
    verify(mirror.advance(read_chain(versions[2].folder)).state)


def advance_in_a_process(place: Path, folder: Path) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_advance, args=(place, folder))
    process.start()
    return process


def _advance(place: Path, folder: Path) -> None:
    Mirror(place).advance(read_chain(folder))


def test_workers_that_share_a_mirror_make_one_copy(versions: list[State], tmp_path: Path) -> None:
    workers = [advance_in_a_process(tmp_path / "mirror", versions[3].folder) for _ in range(3)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert held(tmp_path).root == versions[3].root
    verify(held(tmp_path))
    assert len([path for path in (tmp_path / "mirror").iterdir() if (path / DIGESTS).exists() and not path.is_symlink()]) == 1
    assert map_tensors(held(tmp_path).folder).keys() == {"still", "w"}
