"""A running harness: how it ends, on its own or not, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout.harnesses.prepared import CannotStart, MissingExecutable
from rollout.harnesses.process import HarnessProcess, ProcessExit, find_executable
from tests.support.service.verbatim_process import runs, wait_until

DEAF = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("pid").write_text("started")
time.sleep(3600)
"""


def started(folder: Path, program: str, **options: Any) -> HarnessProcess:
    return HarnessProcess([sys.executable, "-c", program], os.environ, folder, **options)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_harnesses(tmp_path: Path, code: int) -> None:
    assert started(tmp_path, f"raise SystemExit({code})").wait() == ProcessExit(code, timed_out=False)


def test_a_signal_counts_as_a_shell_counts_it(tmp_path: Path) -> None:
    assert started(tmp_path, "import os; os.kill(os.getpid(), 11)").wait() == ProcessExit(139, timed_out=False)


def test_a_harness_that_does_not_mind_being_told_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    process = started(tmp_path, DEAF, grace_seconds=0.1)
    wait_until((tmp_path / "pid").exists, 120, "the harness has started")
    process.stop()
    assert process.wait() == ProcessExit(137, timed_out=False)


def test_a_harness_is_stopped_when_its_time_is_over(tmp_path: Path) -> None:
    assert started(tmp_path, "import time; time.sleep(60)").wait(0.5) == ProcessExit(128 + signal.SIGTERM, timed_out=True)


def test_a_stop_before_the_time_is_over_is_no_timeout(tmp_path: Path) -> None:
    process = started(tmp_path, DEAF, grace_seconds=0.3)
    wait_until((tmp_path / "pid").exists, 120, "the harness has started")
    process.stop()
    assert process.wait(0.02) == ProcessExit(137, timed_out=False)


def test_a_harness_may_be_stopped_from_another_thread(tmp_path: Path) -> None:
    process = started(tmp_path, "import time; time.sleep(60)")
    threading.Timer(0.3, process.stop).start()
    assert process.wait() == ProcessExit(128 + signal.SIGTERM, timed_out=False)


def test_what_a_harness_started_ends_with_it(tmp_path: Path) -> None:
    program = f"""
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}])
pathlib.Path("child").write_text(str(child.pid))
"""
    assert started(tmp_path, program).wait().exit_code == 0
    wait_until(lambda: not runs(int((tmp_path / "child").read_text())), 120, "the child has ended")


def test_it_has_a_group_and_a_session_of_its_own_and_works_where_it_is_told(tmp_path: Path) -> None:
    program = "import os; open('seen', 'w').write(f'{os.getpid()} {os.getpgrp()} {os.getsid(0)}')"
    assert started(tmp_path, program).wait().exit_code == 0
    assert len(set((tmp_path / "seen").read_text().split())) == 1


def test_pwd_is_where_the_harness_works(tmp_path: Path) -> None:
    """opencode runs its commands in the folder that PWD names, wherever it was started."""
    program = "import os; open('seen', 'w').write(os.environ['PWD'])"
    assert HarnessProcess([sys.executable, "-c", program], {**os.environ, "PWD": "/"}, tmp_path).wait().exit_code == 0
    assert (tmp_path / "seen").read_text() == str(tmp_path)


def test_a_command_is_looked_for_on_the_path_of_the_harness(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\nexit 7\n")
    tool.chmod(0o755)
    assert find_executable("tool", {"PATH": str(tmp_path)}) == str(tool)
    assert HarnessProcess(["tool"], {"PATH": f"{tmp_path}:/bin:/usr/bin"}, tmp_path).wait().exit_code == 7
    with pytest.raises(MissingExecutable, match="'tool' on PATH"):
        HarnessProcess(["tool"], {"PATH": "/nowhere"}, tmp_path)


def test_an_argument_that_the_system_cannot_pass_on_is_told(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="null byte"):
        HarnessProcess([sys.executable, "a\0b"], os.environ, tmp_path)
