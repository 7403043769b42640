"""How much memory sessions may take: what the machine has, or its container, and the settings before both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.memory import SESSION_SHARE, find_memory_bytes, find_session_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("text", ["max\n", f"{2**63}\n", "nonsense", None])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, text: str | None) -> None:
    write(tmp_path / "own", "0::/a\n")
    if text is not None:
        write(tmp_path / "a" / "memory.max", text)
    assert find_memory_bytes(tmp_path, tmp_path / "own") == MACHINE
    assert find_memory_bytes(tmp_path, tmp_path / "none") == MACHINE


@pytest.mark.parametrize("where", ["", "pods", "pods/one"])
def test_the_lowest_limit_of_any_group_around_counts(tmp_path: Path, where: str) -> None:
    write(tmp_path / "own", "0::/pods/one\n")
    write(tmp_path / "pods" / "one" / "memory.max", "900000000")
    write(tmp_path / where / "memory.max", "100000000\n")
    assert find_memory_bytes(tmp_path, tmp_path / "own") == 100_000_000


def test_a_container_that_sees_its_own_group_as_the_top_is_limited_by_it(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/\n")
    write(tmp_path / "memory.max", "100000000\n")
    assert find_memory_bytes(tmp_path, tmp_path / "own") == 100_000_000


def test_groups_of_the_first_version_limit_as_well(tmp_path: Path) -> None:
    write(tmp_path / "own", "5:cpu:/x\n4:memory:/docker/abc\n0::/x\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", "100000000\n")
    assert find_memory_bytes(tmp_path, tmp_path / "own") == 100_000_000


def test_processes_share_a_part_of_it() -> None:
    assert find_session_bytes(1) == find_memory_bytes() // SESSION_SHARE
    assert find_session_bytes(4) <= find_session_bytes(1) // 4
