"""Processes that are found by their variables while they are just becoming another program: Linux shows neither variables nor
arguments of such a process for a moment, which is no sign that it has none."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.runtimes import processes
from rollout.runtimes.kubernetes import manifest

ID = "0a1b"
MARKED = b"HOME=/\0" + f"{manifest.MARK}={ID}\0".encode()


@pytest.fixture
def becoming() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def shown(proc: Path, pid: int, environ: bytes, cmdline: bytes) -> Path:
    """A process, in a /proc of the test, whose parent is the first one."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    folder.joinpath("status").write_text(f"Name:\tsleep\nState:\tS (sleeping)\nPid:\t{pid}\nPPid:\t1\n")
    folder.joinpath("environ").write_bytes(environ)
    folder.joinpath("cmdline").write_bytes(cmdline)
    folder.joinpath("exe").symlink_to("/bin/sleep")
    return folder


def become(folder: Path, environ: bytes) -> None:
    folder.joinpath("environ").write_bytes(environ)
    folder.joinpath("cmdline").write_bytes(b"sleep\x00600\x00")


def ending(proc: Path, inside: Path) -> subprocess.Popen[bytes]:
    """What ends the command `ID` in a pod, beside which another one runs, with that /proc."""
    shown(proc, 7, b"A=b\0", b"sh\0")
    inside.mkdir()
    inside.joinpath("other.pid").write_text("7\n")
    inside.joinpath(f"{ID}.pid").write_text("999999999\n")
    script = manifest.KILL.replace("/proc", str(proc))
    return subprocess.Popen(["/bin/sh", "-c", script, str(inside), ID, "KILL"])


def test_a_commands_end_waits_for_a_process_without_variables_yet(becoming: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = shown(tmp_path / "proc", becoming.pid, b"", b"")
    with ending(tmp_path / "proc", tmp_path / "inside") as end:
        with pytest.raises(subprocess.TimeoutExpired):
            end.wait(0.5)
        become(folder, MARKED)
        becoming.wait(120)
        os.rename(folder, tmp_path / "ended")
        assert end.wait(120) == 0


def test_a_commands_end_leaves_what_has_arguments_and_no_variables(becoming: subprocess.Popen[bytes], tmp_path: Path) -> None:
    shown(tmp_path / "proc", becoming.pid, b"", b"sleep\x00600\x00")
    with ending(tmp_path / "proc", tmp_path / "inside") as end:
        assert end.wait(120) == 0
    assert becoming.poll() is None


def test_variables_are_read_again_of_a_process_that_shows_none_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    folder = shown(tmp_path, 77, b"", b"")
    monkeypatch.setattr(time, "sleep", lambda seconds: become(folder, MARKED))
    assert processes.find_by_variable(manifest.MARK.encode(), ID.encode(), [77]) == [77]


def test_many_that_show_nothing_are_waited_for_no_longer_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process does that unmaps its own arguments: a rollout may have thousands, and its node looks at all of them."""
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    for pid in range(10, 20):
        shown(tmp_path, pid, b"", b"")
    shown(tmp_path, 20, MARKED, b"sleep\x00600\x00")
    assert processes.find_by_variable(manifest.MARK.encode(), ID.encode(), range(10, 21)) == [20]
    assert 0.2 < sum(slept) < 0.4


def test_a_thread_of_the_kernel_has_no_variables_and_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    shown(tmp_path, 2, b"", b"").joinpath("exe").unlink()
    assert processes.find_by_variable(manifest.MARK.encode(), ID.encode(), [2]) == []
