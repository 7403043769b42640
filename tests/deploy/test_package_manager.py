"""How the programs that tests need are installed while somebody else uses the package manager: real apt-get, in folders of its own."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import machine

LOCKS = {
    "lists/lock": ["update"],
    "dpkg/lock-frontend": ["install", "--yes"],
    "dpkg/lock": ["install", "--yes"],
    "archives/lock": ["clean"],
}
"""Each lock of the package manager, by the file that it is, and what asks for it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The package manager's folders, empty: it knows no package and no index."""
    for made in ("lists/partial", "archives/partial", "dpkg", "parts"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "dpkg/status").touch()
    (tmp_path / "sources.list").touch()
    return tmp_path


def start(folder: Path, *command: str, timeout: int | None = None) -> subprocess.Popen[str]:
    """`.ci/apt-get` in those folders; `timeout`: apt's own setting, in seconds."""
    if machine.find("apt-get") is None:
        machine.unavailable("apt-get is not installed")
    places = {
        "State": folder, "State::lists": folder / "lists", "State::status": folder / "dpkg/status", "Cache": folder,
        "Etc::sourcelist": folder / "sources.list", "Etc::sourceparts": folder / "parts",
    }  # fmt: skip
    lines = [f'Dir::{name} "{path}";' for name, path in places.items()] + ['APT::Sandbox::User "root";']
    lines += [] if timeout is None else [f'DPkg::Lock::Timeout "{timeout}";']
    (folder / "apt.conf").write_text("\n".join(lines))
    environment = os.environ | {"APT_CONFIG": str(folder / "apt.conf")}
    return subprocess.Popen([ROOT / ".ci/apt-get", *command], env=environment, stderr=subprocess.PIPE, text=True)


@contextmanager
def hold(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize(("lock", "command"), LOCKS.items())
def test_whoever_locks_the_package_manager_is_waited_for_and_named(folder: Path, lock: str, command: list[str]) -> None:
    with hold(folder / lock):
        waiting = start(folder, *command)
        line = waiting.stderr.readline()
    assert line.startswith(
        f"apt-get {' '.join(command)}: waiting up to 600 s for another process. Could not get lock {folder / lock}."
    )
    assert f"held by process {os.getpid()}" in line
    rest = waiting.communicate()[1]
    assert (waiting.returncode, rest) == (0, "")


def test_a_lock_that_stays_held_ends_in_an_error_that_says_what_to_do(folder: Path) -> None:
    with hold(folder / "lists/lock"):
        gave_up = start(folder, "update", timeout=1)
        errors = gave_up.communicate()[1].splitlines()
    assert gave_up.returncode == 100
    assert errors[-2].startswith("apt-get update: gave up after 1 s. Could not get lock")
    assert errors[-1] == "Nothing was installed. Let that process end, then repeat this command."


def test_any_other_failure_is_the_package_managers_own_at_once(folder: Path) -> None:
    failed = start(folder, "install", "--yes", "no-such-package")
    assert (failed.communicate()[1], failed.returncode) == ("E: Unable to locate package no-such-package\n", 100)


def test_no_script_calls_the_package_manager_without_waiting_for_it() -> None:
    scripts = [ROOT / "Makefile", *(path for path in (ROOT / ".ci").iterdir() if path.name != "apt-get")]
    calls = [
        call for script in scripts for call in re.findall(r"\S*apt.get\S* (?:update|install|download)", script.read_text())
    ]
    assert len(calls) >= 10
    assert [call for call in calls if ".ci/apt-get" not in call and call.split()[0] != '"$apt_get"'] == []
    assert "apt_get=$(dirname" in (ROOT / ".ci" / "unpack").read_text()
