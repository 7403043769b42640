"""Instances of apptainer as runtimes: what its command line is told (the contract: test_contract)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from contract.attempts import Failure
from contract.tasks import RuntimeSpec
from rollout.attempts import RolloutFailed
from rollout.runtimes import disk
from rollout.runtimes.base import BadRuntime, Logs, ProxyAddress, Runtime, RuntimeFailed
from rollout.runtimes.container.apptainer import ApptainerKind
from rollout.runtimes.settings import RuntimeSettings, read_environment
from tests.support.runtimes.apptainer_command import calls, in_instances
from tests.support.runtimes.rollout_nodes import install_what_lacks
from tests.support.runtimes.runtime_places import NOWHERE, SECONDS, Place, out, python, shell

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY_BYTES = "import sys; open('great', 'wb').write(bytes(1 << 21))"


@dataclass(frozen=True, slots=True)
class Started:
    """An instance with half a CPU, 300 MB of memory, files of at most a megabyte, and a proxy with TLS."""

    folder: Path
    place: Place
    runtime: Runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    folder = tmp_path_factory.mktemp("apptainer")
    place = in_instances(folder)
    async with place.started(ProxyAddress("proxy.example", 443), cpus=0.5, memory_mb=300, disk_mb=1) as runtime:
        yield Started(folder, place, runtime)


def told(folder: Path) -> list[str]:
    """The words after the first `instance start`."""
    return next(words[3:] for words in calls(folder / "bin") if words[1:3] == ["instance", "start"])


def options(words: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(words) if option == name]


@pytest.mark.cell("A1", "A5")
async def test_an_instance_sees_nothing_of_the_machine_and_has_its_limits(started: Started) -> None:
    words = told(started.folder)
    assert {"--userns", "--containall", "--cleanenv", "--net"} <= {*words}
    assert options(words, "--network") == ["none"] and options(words, "--no-mount") == ["bind-paths"]
    assert options(words, "--memory") == options(words, "--memory-swap") == [str(300 << 20)]
    assert (options(words, "--cpus"), options(words, "--pids-limit")) == (["0.5"], ["4096"])
    outside = [
        each.split(":")[0] for each in (*options(words, "--bind"), *options(words, "--home"), *options(words, "--overlay"))
    ]
    assert outside and all(Path(each).is_relative_to(started.folder / "instances") for each in outside)


@pytest.mark.cell("A6")
async def test_what_is_written_is_kept_in_memory_where_that_is_asked_for(tmp_path: Path) -> None:
    async with in_instances(tmp_path, apptainer_writable="tmpfs", apptainer_flags=("--fakeroot",)).started(network="full"):
        words = told(tmp_path)
    assert {"--writable-tmpfs", "--fakeroot"} <= {*words}
    assert not {"--overlay", "--net", "--network"} & {*words}


@pytest.mark.cell("A4")
async def test_variables_that_are_flags_of_apptainer_open_no_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APPTAINER_BIND", "SINGULARITY_NV", "APPTAINERENV_SECRET", "APPTAINER_CACHEDIR"):
        monkeypatch.setenv(name, "/of/the/node")
    environment = (await in_instances(tmp_path).kind.find_engine()).get_environment()  # type: ignore[attr-defined]
    assert {name for name in environment if "APPTAINER" in name or "SINGULARITY" in name} == {"APPTAINER_CACHEDIR"}


@pytest.mark.cell("A2")
async def test_a_step_cannot_have_another_network_than_its_instance(started: Started) -> None:
    with pytest.raises(RuntimeFailed, match="one network"):
        await shell(started.runtime, "true", network="full")


async def test_a_harness_that_an_image_lacks_and_that_cannot_be_fetched_is_missing(started: Started, tmp_path: Path) -> None:
    """The old bug: a broken runtime, three attempts of it, and no word of the harness."""
    with pytest.raises(RolloutFailed, match=r"lacking: .* use an image that has it") as failed:
        await install_what_lacks(started.runtime, tmp_path)
    assert failed.value.failure is Failure.HARNESS_MISSING


@pytest.mark.cell("A6")
async def test_a_file_is_held_to_the_size_of_the_disk(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sum of all files."""
    monkeypatch.setattr(disk, "WATCH_SECONDS", 3600.0)
    done = await python(started.runtime, MANY_BYTES)
    assert done.exit_code != 0 and b"File too large" in done.stderr
    assert await out(started.runtime, "stat -c %s great && rm great") == f"{1 << 20}\n"


async def test_an_image_that_is_not_there_and_an_instance_that_is_gone_are_told(tmp_path: Path) -> None:
    place = in_instances(tmp_path)
    with pytest.raises(RuntimeFailed, match=r"could not open image missing\.sif"):
        await place.runtime(NOWHERE, image="missing.sif").start()
    assert [*(tmp_path / "instances").iterdir()] == []
    async with place.started() as runtime:
        engine = await place.kind.find_engine()  # type: ignore[attr-defined]
        await engine.remove(runtime.name)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeFailed, match="no instance found"):
            await shell(runtime, "true")


@pytest.mark.cell("A4")
async def test_a_machine_without_it_and_a_node_that_is_root_are_told(tmp_path: Path) -> None:
    place = in_instances(tmp_path)
    settings = place.kind.settings  # type: ignore[attr-defined]
    told = [
        await ApptainerKind(RuntimeSettings(**given)).probe()
        for given in (
            {"apptainer_command": "no-such-apptainer", "apptainer_root": "allowed"},
            {"apptainer_command": settings.apptainer_command},
            {"apptainer_writable": "disk", "apptainer_root": "allowed"},
        )
    ]
    assert "no-such-apptainer is not installed" in str(told[0])
    assert "does not run as root" in str(told[1])
    assert "choose overlay or tmpfs" in str(told[2])
    assert await place.kind.probe() is None


async def test_an_instance_needs_an_image() -> None:
    for image in (None, "", "--writable"):
        with pytest.raises(BadRuntime, match="image"):
            ApptainerKind(RuntimeSettings()).check(RuntimeSpec(kind="apptainer", image=image))


async def test_settings_come_from_the_environment() -> None:
    settings = read_environment({"VERBATIM_APPTAINER_COMMAND": "singularity", "VERBATIM_APPTAINER_FLAGS": "--fakeroot --nv"})
    assert (settings.apptainer_command, settings.apptainer_flags) == ("singularity", ("--fakeroot", "--nv"))
    assert settings.apptainer_root == "refused"


@pytest.mark.cell("A7")
async def test_instances_of_others_are_left_alone(started: Started) -> None:
    async with started.place.started() as other:
        assert await started.place.kind.sweep(other.name) == 1  # type: ignore[attr-defined]
    assert await out(started.runtime, "echo alive") == "alive\n"


@pytest.mark.cell("A3")
async def test_a_hidden_daemon_that_holds_the_output_keeps_nobody_waiting(started: Started, tmp_path: Path) -> None:
    """Another command runs meanwhile, so that not all there is can be this one's."""
    logs = Logs(tmp_path / "out", tmp_path / "err")
    daemon = "env -i setsid sh -c ': > there; exec sleep 600' & until [ -e there ]; do sleep 0.1; done"
    async with asyncio.timeout(SECONDS):
        line = "echo one; until [ -e go ]; do sleep 0.1; done; echo two"
        running = asyncio.ensure_future(shell(started.runtime, line, logs=logs))
        while not (logs.stdout.exists() and logs.stdout.read_bytes()):
            await asyncio.sleep(0.05)
        assert (await shell(started.runtime, daemon)).exit_code == 0
        await started.runtime.upload("go", b"")
        assert (await running).stdout == b"one\ntwo\n"
