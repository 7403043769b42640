"""What a container keeps from the machine beyond the contract: privileges, users, the node's own network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contract.tasks import RuntimeSpec
from rollout.runtimes.base import BadRuntime, Install, Logs, Runtime, RuntimeFailed
from rollout.runtimes.container.engine import Engine
from rollout.runtimes.container.runtime import LABEL, ROOTS, ContainerKind, ContainerRuntime
from rollout.runtimes.local.resources import PIDS
from rollout.runtimes.settings import read_environment
from tests.support.runtimes.runtime_places import NOWHERE, Place, answering, contained, out, python, shell

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUMBERS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""Of capabilities, as linux/capability.h has them."""
REACHED = """
import socket, sys
try: socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60); print("reached")
except OSError as error: print(error.strerror)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return contained(tmp_path_factory.mktemp("containers"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def root(place: Place) -> AsyncIterator[Runtime]:
    async with place.started() as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def user(place: Place) -> AsyncIterator[Runtime]:
    async with place.started(options={"user": 1234}) as runtime:
        yield runtime


async def told(runtime: Runtime, field: str) -> int:
    return int((await out(runtime, f"grep ^{field}: /proc/self/status")).split()[1], 16)


@pytest.mark.cell("D1", "D3", "D5")
async def test_a_container_sees_nothing_of_the_machine(place: Place, root: Runtime, tmp_path: Path) -> None:
    """Neither its files nor its processes; and what it may have of each is its own."""
    (tmp_path / "secret").write_text("of the node")
    assert (await shell(root, f"cat {tmp_path}/secret")).exit_code != 0
    mounted = {line.split()[1] for line in (await out(root, "cat /proc/mounts")).splitlines()}
    assert {path for path in mounted if not path.startswith(("/proc", "/dev", "/sys", "/etc", "/run"))} <= {"/"}
    assert str(os.getpid()) not in (await out(root, "ls /proc")).split()
    assert place.kind.describe_limits() == f"memory, CPUs and {PIDS} processes are limited by the container engine"
    limit = "cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max 2> /dev/null || true"
    assert (await out(root, limit)).split() == [str(PIDS)]


@pytest.mark.cell("D4")
async def test_root_inside_has_what_installing_packages_takes_and_no_program_gives_more(root: Runtime) -> None:
    assert set(NUMBERS) == set(ROOTS)
    assert await told(root, "CapEff") == await told(root, "CapBnd") == sum(1 << number for number in NUMBERS.values())
    assert (await told(root, "NoNewPrivs"), await told(root, "Seccomp")) == (1, 2)
    for line in ("mknod null c 1 3", "mount -t tmpfs x /mnt", "chroot / true"):
        assert (await shell(root, line)).exit_code != 0, line
    await out(root, "touch file && chown 1:1 file && setpriv --reuid 1 --regid 1 --clear-groups test -O file")


@pytest.mark.cell("D4")
async def test_another_user_has_no_capability_and_its_files_are_its_own(user: Runtime) -> None:
    assert [await told(user, field) for field in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")] == [0, 0, 1, 2]
    assert await out(user, "id -u; id -g; id -G") == "1234\n1234\n1234\n"
    await user.upload("given", b"x")
    assert await out(user, 'stat -c %u given . "$HOME"; touch "$HOME/there" && rm given') == "1234\n" * 3
    assert (await shell(user, "touch /usr/x")).exit_code != 0
    # A step with the network is no other user.
    shown = await out(user, "id -u; id -G; grep CapEff /proc/self/status", network="full")
    assert shown == "1234\n1234\nCapEff:\t0000000000000000\n"


async def test_a_workdir_of_the_image_that_the_user_cannot_write_is_said_at_once(place: Place) -> None:
    with pytest.raises(RuntimeFailed, match=r"the user 1234 cannot write /usr of the image .*: set options.user to 0"):
        async with place.started(options={"user": 1234}, workdir="/usr"):
            pytest.fail("it has started")


@pytest.mark.cell("D2")
@pytest.mark.parametrize("network", ["proxy", "full"])
async def test_the_whole_network_is_not_the_nodes(place: Place, network: Any) -> None:
    """A service on the node's loopback device, such as its Redis, was reached by every step with the network."""
    apart = Place(place.kind, place.spec)
    async with apart.started(network=network) as runtime, answering() as beside:
        done = await python(runtime, REACHED, str(beside.port), network="full")
        assert done.stdout == b"Connection refused\n", done
        await runtime.stop()
    assert await apart.kind.sweep(apart.names) == 0, "no container is left beside it"


async def test_a_container_beside_is_swept_with_the_runtime(place: Place) -> None:
    apart = Place(place.kind, place.spec)
    async with apart.started() as runtime:
        await out(runtime, "true", network="full")
        assert await apart.kind.sweep(apart.names) == 1
        assert await apart.kind.sweep(apart.names) == 0


SERVES = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("serves", flush=True)
    while True: server.accept()[0].close()
"""
REACHES = """
import socket, sys
try: socket.create_connection((sys.argv[1], 7000), float(sys.argv[2])); print("reached")
except OSError as error: print("not reached")
"""
OWN = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('192.0.2.1', 9)); print(s.getsockname()[0])"


@pytest.mark.cell("D7")
@pytest.mark.parametrize("network", ["proxy", "full"])
async def test_rollouts_with_the_whole_network_do_not_reach_each_other(place: Place, tmp_path: Path, network: Any) -> None:
    """Neither whole rollouts nor single steps of them: all were in the engine's one default network."""
    apart = Place(place.kind, place.spec)
    logs = Logs(tmp_path / "out", tmp_path / "err")
    async with apart.started(network=network) as one, apart.started(network=network) as other:
        serving = asyncio.ensure_future(python(one, SERVES, logs=logs, network="full"))
        while not (logs.stdout.exists() and logs.stdout.read_bytes()):
            assert not serving.done(), serving.result()
            await asyncio.sleep(0.05)
        address = (await python(one, OWN, network="full")).stdout.decode().strip()
        assert (await python(one, REACHES, address, "120", network="full")).stdout == b"reached\n"
        assert (await python(other, REACHES, address, "3", network="full")).stdout == b"not reached\n"
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert isinstance(apart.kind, ContainerKind)
        engine = await apart.kind.find_engine()
        own = [each for each in await engine.list_networks(LABEL) if each.startswith(apart.names)]
        assert len(own) == 2
    assert not [each for each in await engine.list_networks(LABEL) if each.startswith(apart.names)]


async def test_a_killed_nodes_network_is_swept_where_nothing_else_is_left(place: Place) -> None:
    apart = Place(place.kind, place.spec)
    assert isinstance(apart.kind, ContainerKind)
    engine = await apart.kind.find_engine()
    await engine.create_network(f"{apart.names}-x", LABEL)
    assert await apart.kind.sweep(apart.names) == 1
    assert await apart.kind.sweep(apart.names) == 0


async def test_packages_with_set_id_programs_are_installed_where_the_operator_allows_it(place: Place, tmp_path: Path) -> None:
    assert isinstance(place.kind, ContainerKind)
    settings = replace(place.kind.settings, container_set_id="allowed", container_dir=tmp_path / "containers")
    async with replace(place, kind=ContainerKind(settings)).started() as runtime:
        for network in ("proxy", "full"):
            line = "touch file && chmod 6755 file && stat -c %a file && unshare --user true"
            done = await shell(runtime, line, network=network)
            assert done.exit_code != 0 and done.stdout == b"6755\n", done
    odd = ContainerKind(replace(settings, container_set_id="yes"))
    assert await odd.probe() == "VERBATIM_CONTAINER_SET_ID cannot be 'yes': choose refused or allowed"


@pytest.mark.cell("D4")
async def test_an_engine_that_applies_no_filter_starts_nothing(place: Place, tmp_path: Path) -> None:
    assert isinstance(place.kind, ContainerKind)
    flags = (*place.kind.settings.container_run_flags, "--security-opt", "seccomp=unconfined")
    settings = replace(place.kind.settings, container_run_flags=flags, container_dir=tmp_path / "containers")
    apart = Place(ContainerKind(settings), place.spec)
    with pytest.raises(RuntimeFailed, match="without a system call filter"):
        async with apart.started():
            pytest.fail("it has started")
    assert await apart.kind.sweep(apart.names) == 0


async def test_a_container_beside_goes_also_if_its_making_broke_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = Place(place.kind, place.spec)
    begun = ContainerRuntime._start_container

    async def broken(self: ContainerRuntime, engine: Engine, name: str, *flags: str) -> int:
        first = await begun(self, engine, name, *flags)
        if name.endswith("-n"):
            raise asyncio.CancelledError
        return first

    monkeypatch.setattr(ContainerRuntime, "_start_container", broken)
    async with apart.started() as runtime:
        with pytest.raises(asyncio.CancelledError):
            await out(runtime, "true", network="full")
    assert await apart.kind.sweep(apart.names) == 0


async def test_a_container_that_was_gone_before_its_start_is_made_once_more(place: Place, tmp_path: Path) -> None:
    """The engine's first `run` makes the container and fails as runc does when its process is gone by then."""
    assert isinstance(place.kind, ContainerKind)
    engine, once = tmp_path / "engine", tmp_path / "once"
    engine.write_text(
        f"""#!/bin/bash
if [ "$3" = run ] && mkdir {once}; then
  {place.kind.settings.container_command} "${{@:1:2}}" create "${{@:5}}" || exit
  echo 'cannot start a container that has stopped' >&2
  exit 126
fi
exec {place.kind.settings.container_command} "$@"
"""
    )
    engine.chmod(0o755)
    settings = replace(place.kind.settings, container_command=str(engine), container_dir=tmp_path / "containers")
    async with replace(place, kind=ContainerKind(settings)).started() as runtime:
        assert await out(runtime, "echo here") == "here\n"
    assert once.exists()


async def test_the_nodes_own_network_is_had_where_its_settings_say_so(place: Place, tmp_path: Path) -> None:
    assert isinstance(place.kind, ContainerKind)
    settings = replace(place.kind.settings, container_network="host", container_dir=tmp_path / "containers")
    async with replace(place, kind=ContainerKind(settings)).started() as runtime, answering() as beside:
        assert (await python(runtime, REACHED, str(beside.port), network="full")).stdout == b"reached\n"
        assert (await python(runtime, REACHED, str(beside.port))).stdout == b"Connection refused\n"


async def test_harnesses_are_installed_by_root_whoever_uses_them(place: Place, tmp_path: Path) -> None:
    spec = replace(place.spec, options={"user": 1234})
    there = "/usr/local/bin/tool-of-root"
    install = Install("tool-of-root", (f"printf '#!/bin/sh\\nid -u\\n' > {there} && chmod 755 {there}",))
    made = await place.kind.install(spec, install, f"{place.names}-i", NOWHERE, Logs(tmp_path / "out", tmp_path / "err"))
    assert not made.failure and made.spec.options == spec.options and made.spec.image != spec.image
    async with replace(place, spec=made.spec).started() as runtime:
        assert await out(runtime, "tool-of-root") == "1234\n"


async def test_a_user_that_is_none_is_refused(place: Place) -> None:
    with pytest.raises(BadRuntime, match=r"options.user: 'agent' is not the number of a user"):
        place.kind.check(RuntimeSpec(kind="docker", image="i", options={"user": "agent"}))
    with pytest.raises(BadRuntime, match="VERBATIM_CONTAINER_USER: 'agent' is not the number of a user"):
        read_environment({"VERBATIM_CONTAINER_USER": "agent"})
    settings = read_environment({"VERBATIM_CONTAINER_USER": "7", "VERBATIM_CONTAINER_NETWORK": "agents"})
    assert (settings.container_user, settings.container_network) == (7, "agents")
