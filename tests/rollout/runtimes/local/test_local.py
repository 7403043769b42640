"""Local runtimes: what a sandbox keeps from a command, and what the node does where the machine cannot."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from contract.tasks import RuntimeSpec
from rollout.runtimes import catalogue, passage, processes
from rollout.runtimes.base import BadRuntime, DiskFull, RuntimeFailed
from rollout.runtimes.container.apptainer import ApptainerKind
from rollout.runtimes.container.runtime import ContainerKind
from rollout.runtimes.local import resources
from rollout.runtimes.local.runtime import LocalKind
from rollout.runtimes.settings import RuntimeSettings, read_environment
from tests.support.machine import unavailable
from tests.support.runtimes.runtime_places import NOWHERE, answering, out, python, sandboxed, shell, unconfined

IN_A_MEMORY_FILE = """
import os, time
fd = os.memfd_create("x")
for _ in range(512): os.write(fd, bytes(1 << 20))
time.sleep(600)
"""
IN_SHARED_PAGES = "import mmap, time; m = mmap.mmap(-1, 1 << 29); m[::4096] = b'x' * (1 << 17); time.sleep(600)"
MANY_PROCESSES = """
import os, time
for _ in range(6):
    for _ in range(1000):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(0.1)
time.sleep(600)
"""
MANY_THREADS = """
import threading, time
threading.stack_size(1 << 16)
for _ in range(5000): threading.Thread(target=time.sleep, args=(600,)).start()
time.sleep(600)
"""
GREEDY = "import time; x = bytearray(1 << 29); x[::4096] = b'x' * len(x[::4096]); time.sleep(600)"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in which there is room for 4 MiB."""
    if os.geteuid() != 0:
        unavailable("a small disk can be made by root only")
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        unavailable(f"no small disk can be made here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.cell("L1", "L3")
async def test_the_system_is_read_only_and_what_is_the_nodes_is_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the node")
    async with sandboxed(tmp_path / "runtimes").started() as runtime:
        for line in (
            "touch /usr/x",
            "touch /etc/x",
            "touch /x",
            f"cat {secret}",
            "cat /etc/shadow",
            "ls /root/",
            "mount -t tmpfs x /tmp",
        ):
            assert (await shell(runtime, line)).exit_code != 0, line
        assert await out(runtime, "id -un; id -u; ls /home; ls -A /var /run") == "agent\n1000\nagent\n/run:\n\n/var:\ntmp\n"
        assert await out(runtime, "grep CapEff /proc/self/status") == "CapEff:\t0000000000000000\n"
        assert str(os.getpid()) not in (await out(runtime, "ls /proc")).split()


async def test_what_the_machine_says_is_readable_is_there_read_only(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "tool").write_text("#!/bin/sh\necho the tool\n")
    (tmp_path / "tools" / "tool").chmod(0o755)
    tools = str(tmp_path / "tools")
    place = sandboxed(tmp_path / "runtimes", local_readable=(tools,), local_path=f"{tools}:/usr/bin:/bin")
    async with place.started() as runtime:
        assert (await runtime.exec(["tool"], timeout_seconds=60)).stdout == b"the tool\n"
        assert (await shell(runtime, f"echo x > {tools}/tool")).exit_code != 0


@pytest.mark.cell("L1")
async def test_a_link_that_a_command_left_leads_the_node_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with sandboxed(tmp_path / "runtimes").started() as runtime:
        await out(runtime, f"ln -s {outside} link; ln -s /etc/passwd file")
        with pytest.raises(RuntimeFailed):
            await runtime.upload("link/x", b"x")
        await runtime.upload("file", b"replaced")
        assert await out(runtime, "cat file") == "replaced"
    assert list(outside.iterdir()) == []


async def test_a_command_takes_no_more_connections_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passage, "MAX_CONNECTIONS", 4)
    program = (
        f"import socket; held = [socket.create_connection(('127.0.0.1', {passage.PORT}), 60) for _ in range(6)]; got = []\n"
        "for one in held:\n"
        "    try: one.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n'); got.append(bool(one.recv(100)))\n"
        "    except OSError: got.append(False)\n"
        "print(got)"
    )
    async with answering() as proxy, sandboxed(tmp_path).started(proxy) as runtime:
        assert (await python(runtime, program)).stdout.decode() == f"{[True] * 4 + [False] * 2}\n"


@pytest.mark.parametrize(("kind", "named"), [(LocalKind, "LOCAL"), (ContainerKind, "CONTAINER"), (ApptainerKind, "APPTAINER")])
def test_a_folder_of_another_user_is_not_used(kind: type[LocalKind | ContainerKind], named: str, tmp_path: Path) -> None:
    """Its owner could put a folder of this machine in the place of a runtime's."""
    others = tmp_path / "others"
    others.mkdir()
    if os.geteuid() == 0:
        os.chown(others, 1000, 1000)
    folder = others if os.geteuid() == 0 else Path("/usr")
    settings = RuntimeSettings(local_dir=folder, container_dir=folder, apptainer_dir=folder)
    with pytest.raises(RuntimeFailed, match=f"belongs to another user; set VERBATIM_{named}_DIR"):
        kind(settings).make(RuntimeSpec(image="judge"), "t-1", NOWHERE)._claim()


async def test_a_workdir_of_the_specs_is_where_it_says(tmp_path: Path) -> None:
    async with sandboxed(tmp_path).started(workdir="/testbed/a b") as runtime:
        await runtime.upload("x", b"")
        assert await out(runtime, "pwd; ls") == "/testbed/a b\nx\n"


async def test_places_are_the_sandboxs_own_and_begin_empty(tmp_path: Path) -> None:
    places = ["/app", "/logs", "/a/deep one"]
    for _ in range(2):
        async with sandboxed(tmp_path).started(workdir="/app", options={"places": places}) as runtime:
            assert await out(runtime, "pwd; find /logs '/a/deep one'") == "/app\n/logs\n/a/deep one\n"
            await runtime.upload("/logs/verifier/x", b"x")
            assert await out(runtime, "echo y > '/a/deep one/y'; cat '/a/deep one/y' /logs/verifier/x") == "y\nx"


@pytest.mark.parametrize("path", ["/usr/x", "/etc", "/home", "/proc/x", "/tmp/x"])
@pytest.mark.parametrize("name", ["workdir", "places"])
def test_a_place_that_would_hide_the_system_is_refused(path: str, name: str) -> None:
    spec = RuntimeSpec(workdir=path) if name == "workdir" else RuntimeSpec(options={"places": ["/logs", path]})
    with pytest.raises(BadRuntime, match=name):
        LocalKind().check(spec)


@pytest.mark.cell("N1")
@pytest.mark.parametrize(
    "spec",
    [
        RuntimeSpec(image="debian"),
        RuntimeSpec(options={"sandbox": "none"}),
        RuntimeSpec(options={"sandbox": "none"}, network="full", workdir="/x"),
        RuntimeSpec(options={"sandbox": "chroot"}),
        RuntimeSpec(options={"sandbox": "none", "places": ["/logs"]}, network="full"),
        RuntimeSpec(options={"places": "/logs"}),
        RuntimeSpec(options={"places": ["/logs/../etc"]}),
    ],
)
def test_what_a_local_runtime_cannot_be_is_refused(spec: RuntimeSpec) -> None:
    with pytest.raises(BadRuntime, match=r"image|sandbox|places"):
        LocalKind().check(spec)


def test_an_unknown_kind_is_told_with_the_known_ones() -> None:
    with pytest.raises(BadRuntime, match="'vm': choose one of apptainer, docker, kubernetes, local"):
        catalogue.load("vm")
    assert [catalogue.load(name).name for name in catalogue.list_names()] == catalogue.list_names()


async def test_a_machine_without_bubblewrap_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    kind = LocalKind(RuntimeSettings(local_dir=tmp_path))
    assert "bubblewrap" in (await kind.probe() or "")
    with pytest.raises(RuntimeFailed, match="bubblewrap"):
        await kind.make(RuntimeSpec(), "t-without", NOWHERE).start()
    assert os.listdir(tmp_path) == []
    assert await LocalKind(RuntimeSettings(local_dir=tmp_path, local_sandbox="none")).probe() is None


async def test_the_check_of_bubblewrap_needs_no_mount_that_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of / has every container's, and bubblewrap fails when one is gone before it gets there. This one always is."""
    program = tmp_path / "bwrap"
    program.write_text(
        f'#!/bin/sh\ncase " $* " in *" / / "*) echo no such mount >&2; exit 1;; esac\nexec {shutil.which("bwrap")} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert await LocalKind(RuntimeSettings(local_dir=tmp_path)).probe() is None


@pytest.mark.cell("L5")
@pytest.mark.parametrize("program", [GREEDY, IN_A_MEMORY_FILE, IN_SHARED_PAGES, MANY_PROCESSES, MANY_THREADS])
async def test_without_a_control_group_the_node_watches_memory_and_processes(program: str, tmp_path: Path) -> None:
    """Memory that no process has mapped was not seen, and processes were not counted."""
    place = sandboxed(tmp_path / "runtimes", cgroup=tmp_path / "no" / "group")
    assert "VERBATIM_CGROUP" in (await place.kind.probe() or "")
    assert "checked every 0.25 s" in place.kind.describe_limits()
    async with place.started() as runtime:
        done = await python(runtime, program)
        assert (done.exit_code, done.timed_out) == (137, False), done
        assert await out(runtime, "echo alive") == "alive\n"


def test_a_file_in_memory_counts_once_however_many_map_it() -> None:
    """32 MiB, open and mapped by two processes, beside 16 MiB that one has for itself."""
    program = (
        "import mmap, os, sys; own = bytearray(b'x') * (16 << 20); fd = os.memfd_create('x'); os.write(fd, bytes(32 << 20))\n"
        "m = mmap.mmap(fd, 32 << 20); child = os.fork()\n"
        "sum(m[::4096]); os.write(1, b'%d\\n' % os.getpid()); sys.stdin.read()"
    )
    running = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with running as process:
        pids = [int(process.stdout.readline()) for _ in "ab"]
        used = processes.measure_memory(pids)
        assert 48 << 20 <= used < 64 << 20, used
        assert processes.count_threads(pids) == 2


@pytest.mark.cell("L5")
async def test_nothing_that_a_command_can_write_lies_in_memory(tmp_path: Path) -> None:
    """What is in a tmpfs was in no process, and so in no account."""
    async with sandboxed(tmp_path).started() as runtime:
        program = (
            "while read -r _ path kind options _; do case $options in ro*) ;; *) echo $kind $path;; esac; done < /proc/mounts"
        )
        writable = [line.split() for line in (await out(runtime, program)).splitlines()]
        # These lie where the machine says, on a disk or not.
        own = {"/tmp", "/dev/shm", runtime.home, runtime.workdir}
        assert {path for _, path in writable} >= own
        assert {path for kind, path in writable if kind == "tmpfs"} <= own
        for folder in ("/run", "/dev", "/var", "/sys"):
            assert (await shell(runtime, f"touch {folder}/x")).exit_code != 0, folder
        await out(runtime, "echo x > /dev/shm/x; echo x > /dev/null; script -qec true /dev/null")
        assert await out(runtime, "cat /dev/shm/x") == "x\n"


@pytest.mark.cell("N5")
async def test_without_a_sandbox_too(tmp_path: Path) -> None:
    place = unconfined(tmp_path / "runtimes")
    kind = LocalKind(RuntimeSettings(local_dir=tmp_path / "runtimes", cgroup=tmp_path / "no" / "group"))
    async with replace(place, kind=kind).started() as runtime:
        assert (await python(runtime, GREEDY)).exit_code == 137


@pytest.mark.cell("N1", "N7")
async def test_without_a_sandbox_nothing_is_kept_from_a_command(tmp_path: Path) -> None:
    """It may do what the node's user may, also among the files of others."""
    (tmp_path / "secret").write_text("of the node")
    place = unconfined(tmp_path / "runtimes")
    async with place.started() as runtime, place.started() as other:
        await other.upload("mine", b"of another")
        assert (
            await out(runtime, f"cat {tmp_path}/secret {other.workdir}/mine; id -u") == f"of the nodeof another{os.geteuid()}\n"
        )
        assert str(os.getpid()) in (await out(runtime, "ls /proc")).split()


def test_a_group_of_version_2_holds_what_the_spec_says(tmp_path: Path) -> None:
    """As the kernel's documentation of control groups, version 2, names the files."""
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    where = resources.find_hierarchies(tmp_path)
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "memory.swap.max").touch()
    (tmp_path / "name").rename(tmp_path / "made")
    resources.Resources(RuntimeSpec(cpus=1.5, memory_mb=64), "name", where).make()
    assert {file.name: file.read_text() for file in (tmp_path / "name").iterdir()} == {
        "memory.max": "67108864",
        "cpu.max": "150000 100000",
        "pids.max": "4096",
    }


def _own_hierarchies() -> list[resources.Hierarchy]:
    return resources.find_hierarchies(None) or unavailable("no control group can be made here")


async def test_control_groups_are_swept_where_no_folder_is_left(tmp_path: Path) -> None:
    """They kept the name: a rollout that got it again failed, "File exists"."""
    place, hierarchies = sandboxed(tmp_path), _own_hierarchies()
    groups = [each.folder / f"{place.names}-x" for each in hierarchies]
    for group in groups[1:] or groups:
        group.mkdir()
    assert await place.kind.sweep(place.names) == 1
    assert not any(group.exists() for group in groups)
    assert await place.kind.sweep(place.names) == 0


async def test_control_groups_are_swept_by_a_node_restarted_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With version 1 a node's groups are below its own, which a restart may change."""
    place, hierarchies = sandboxed(tmp_path), _own_hierarchies()
    earlier = [replace(each, folder=each.folder / f"earlier-{place.names}") for each in hierarchies]
    for each in earlier:
        each.folder.mkdir()
    try:
        with monkeypatch.context() as then:
            then.setattr(resources, "find_hierarchies", lambda given: earlier)
            runtime = place.runtime(NOWHERE)
            await runtime.start()
        (name,) = os.listdir(tmp_path)
        assert all((each.folder / name).is_dir() for each in earlier)
        assert await place.kind.sweep(place.names) == 1
        assert not any((each.folder / name).exists() for each in earlier) and not os.listdir(tmp_path)
    finally:
        await resources.remove_groups(each.folder / name for each in earlier for name in os.listdir(each.folder) if "-" in name)
        await resources.remove_groups(each.folder for each in earlier)


async def test_a_full_disk_is_told_as_that(small_disk: Path) -> None:
    async with sandboxed(small_disk / "runtimes").started() as runtime:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
            member = tarfile.TarInfo("great")
            member.size = 8 << 20
            opened.addfile(member, io.BytesIO(bytes(8 << 20)))
        # tar says the one where nothing fits any more, the other where a part of its block still did.
        with pytest.raises(DiskFull, match=r"No space left|Wrote only"):
            await runtime.unpack(".", buffer.getvalue())
        await out(runtime, "rm -f great")
        with pytest.raises(DiskFull, match="great"):
            await runtime.upload("great", bytes(8 << 20))


@pytest.mark.cell("L6")
async def test_a_file_may_be_no_greater_than_the_disk_of_the_spec(tmp_path: Path) -> None:
    async with sandboxed(tmp_path).started(disk_mb=1) as runtime:
        assert (await shell(runtime, "head -c 2000000 /dev/zero > great")).exit_code != 0
        with pytest.raises(DiskFull):
            await runtime.upload("great", bytes(2 << 20))


async def test_a_variable_cannot_change_the_sandbox(tmp_path: Path) -> None:
    """Arguments of bubblewrap end with a null byte."""
    async with sandboxed(tmp_path).started() as runtime:
        for env in ({"X": "x\0--bind\0/\0/"}, {"X=Y": "z"}, {"": "z"}):
            assert (await shell(runtime, "true", env=env)).exit_code == 126


def test_settings_come_from_the_environment() -> None:
    env = {
        "VERBATIM_LOCAL_DIR": "/a",
        "VERBATIM_LOCAL_READABLE": "/b:/c",
        "VERBATIM_CONTAINER_COMMAND": "podman",
        "VERBATIM_CONTAINER_RUN_FLAGS": "--ulimit 'nofile=1:1'",
    }
    settings = read_environment(env)
    assert (settings.local_dir, settings.local_readable, settings.container_command) == (Path("/a"), ("/b", "/c"), "podman")
    assert settings.container_run_flags == ("--ulimit", "nofile=1:1")
