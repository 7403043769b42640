"""What goes wrong on a node with the real apptainer, and what it is told (the contract: test_contract)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollout.runtimes import processes
from rollout.runtimes.base import DiskFull, RuntimeFailed
from rollout.runtimes.container.apptainer import probe_limits
from tests import ROOT
from tests.support.runtimes.apptainer_installed import in_real_instances, installed
from tests.support.runtimes.runtime_places import NOWHERE, SECONDS, Place

pytestmark = pytest.mark.apptainer

UNTIL_THEN = """
import asyncio
from rollout.runtimes.container.apptainer import probe_user_namespace
open("/proc/sys/user/max_user_namespaces", "w").write("0")
print(asyncio.run(probe_user_namespace()))
"""


def left(place: Place, folder: Path) -> list[object]:
    """Also processes that are in no list of apptainer's."""
    found: list[object] = [*folder.iterdir()]
    for pid in processes.list_pids():
        with suppress(OSError):
            found += [pid] if place.names in Path(f"/proc/{pid}/mountinfo").read_text() else []
    return found


async def nothing_left(place: Place, folder: Path) -> None:
    assert not await place.kind.sweep(place.names)
    assert left(place, folder) == []


async def refused(place: Place, folder: Path, told: str, **changes: object) -> None:
    with pytest.raises(RuntimeFailed, match=told):
        await place.runtime(NOWHERE, **changes).start()
    await nothing_left(place, folder)


async def test_an_image_that_is_not_there_or_is_none_is_told(tmp_path: Path) -> None:
    place, folder = in_real_instances(tmp_path), tmp_path / "instances"
    (tmp_path / "text.sif").write_text("text")
    (tmp_path / "folder").mkdir()
    await refused(place, folder, "no such file or directory", image=str(tmp_path / "missing.sif"))
    await refused(place, folder, "image format not recognized", image=str(tmp_path / "text.sif"))
    await refused(place, folder, "doesn't exist in container", image=str(tmp_path / "folder"))


async def test_a_bind_that_the_administrator_forbids_is_told(tmp_path: Path) -> None:
    command = Path(installed())
    [usual] = (command.parent.parent.parent / "etc" / "apptainer").glob("apptainer.conf")
    forbids = tmp_path / "apptainer.conf"
    forbids.write_text(usual.read_text().replace("user bind control = yes", "user bind control = no"))
    wrapper = tmp_path / "apptainer"
    wrapper.write_text(f'#!/bin/sh\nexec {command} --config {forbids} "$@"\n')
    wrapper.chmod(0o755)
    place = in_real_instances(tmp_path, apptainer_command=str(wrapper))
    await refused(place, tmp_path / "instances", "user bind control is disallowed")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for the folder of one runtime and for nothing in it."""
    installed()
    disk = tmp_path / "full"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=3,mode=700", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_disk_that_is_full_is_told_as_that(tmp_path: Path, full: Path) -> None:
    place = in_real_instances(tmp_path, apptainer_dir=full / "instances")
    with pytest.raises(DiskFull, match="No space left"):
        await place.runtime(NOWHERE).start()
    await nothing_left(place, full / "instances")


@pytest.mark.parametrize("when", ["at once", "while the instance is made"])
async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, when: str) -> None:
    place, folder = in_real_instances(tmp_path), tmp_path / "instances"
    starting = asyncio.ensure_future(place.runtime(NOWHERE).start())
    async with asyncio.timeout(SECONDS):
        while not [*folder.glob("*/hosts" if when == "at once" else "*/scratch/tmp")]:
            assert not starting.done()
            await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await nothing_left(place, folder)


def test_a_machine_where_nobody_may_make_a_user_namespace_is_told() -> None:
    line = ["unshare", "--user", "--map-root-user", sys.executable, "-c", UNTIL_THEN]
    told = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert told == "instances need user namespaces, and none can be made here: No space left on device\n"


def test_a_machine_that_holds_limits_for_root_alone_is_told(tmp_path: Path) -> None:
    assert "version 2" in str(probe_limits(1000, tmp_path))
    assert probe_limits(0, tmp_path) is None
    (tmp_path / "cgroup.controllers").touch()
    assert probe_limits(1000, tmp_path) is None
