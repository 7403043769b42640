"""The program that starts a command in a container with a network: it is the node's root among files that are the agent's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollout.runtimes import disk, processes
from rollout.runtimes.base import Executed, Runtime
from rollout.runtimes.container import runtime as container
from tests.support.machine import unavailable
from tests.support.runtimes.runtime_places import contained, out, shell

pytestmark = pytest.mark.asyncio(loop_scope="module")

GUARD = """
import os, sys
sys.path.insert(0, sys.argv[1])
import enter
enter.guard_executable()
print(os.statvfs("/proc/self/exe").f_flag & os.ST_RDONLY)
"""
CODEC = "open('/tmp/taken', 'w').write(open('/proc/self/status').read())\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    """Its files are held to a megabyte."""
    async with contained(tmp_path_factory.mktemp("containers")).started(disk_mb=1) as runtime:
        yield runtime


async def run(*argv: str) -> Executed:
    """Runs the interpreter of these tests with these arguments."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    stdout, stderr = await process.communicate()
    return Executed(process.returncode or 0, stdout, stderr)


@pytest.mark.parametrize(("program", "code"), [("/no/such/program", 127), ("/etc/hosts", 126)])
async def test_nothing_of_the_container_is_run_where_its_program_cannot_be(runtime: Runtime, program: str, code: int) -> None:
    """Python would print where an error came from: it would look for this program's text among the container's files, and load the
    codec that the text asks for from there, with all that root may do."""
    codecs = Path(os.__file__).parent / "encodings"
    await runtime.upload(str(container._ENTER), b"# coding: taken\n" * 200)
    await runtime.upload(str(codecs / "taken.py"), CODEC.encode())
    first = runtime._processes.first  # type: ignore[attr-defined]
    done = await run(str(container._ENTER), str(first), str(os.getpid()), "0", "", "MARK=x", program)
    assert await out(runtime, "cat /tmp/* 2>/dev/null || true") == ""
    assert (done.exit_code, done.stdout) == (code, b"")
    assert program.encode() in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.cell("D6")
async def test_a_step_with_the_network_has_the_limits_of_the_others(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores two signals, which what it starts is not to do."""
    monkeypatch.setattr(disk, "WATCH_SECONDS", 3600.0)
    limits = [await out(runtime, "ulimit -a", network=network) for network in ("proxy", "full")]
    assert limits[0] == limits[1]
    done = await shell(runtime, "head -c 2000000 /dev/zero > great", network="full")
    assert done.exit_code != 0
    assert await out(runtime, "stat -c %s great && rm great") == f"{1 << 20}\n"
    shown = "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status"
    status = [await out(runtime, shown, network=network) for network in ("proxy", "full")]
    assert status[0] == status[1] and "NoNewPrivs:\t1\nSeccomp:\t2\n" in status[0]
    ignored = int((await out(runtime, "grep SigIgn /proc/self/status", network="full")).split()[1], 16)
    assert not any(ignored >> number - 1 & 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))


@pytest.mark.cell("D4")
async def test_the_nodes_own_interpreter_cannot_be_written_by_what_it_starts() -> None:
    """A program of the container that names /proc/self/exe as its interpreter is the node's, and who has it open may write it once
    it has ended."""
    if os.geteuid() != 0:
        unavailable("containers need root")
    done = await run("-c", GUARD, str(container._ENTER.parent))
    assert (done.stdout, done.stderr) == (b"1\n", b"")
    assert not os.statvfs(sys.executable).f_flag & os.ST_RDONLY


async def test_what_replaces_a_commands_script_is_no_error_of_the_node(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the name. A folder there can be neither a script that was not read nor removed as one."""
    assert await out(runtime, 'mkdir "/run/verbatim/$VERBATIM_EXEC"; echo made') == "made\n"
    passed = runtime._passed  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime._kind, "grace_seconds", 0.1)  # type: ignore[attr-defined]
    line = 'trap "" TERM; mkdir "/run/verbatim/$VERBATIM_EXEC"; while :; do sleep 1; done'
    running = asyncio.ensure_future(shell(runtime, line))
    while sum(each.is_dir() for each in passed.iterdir()) < 2 and not running.done():
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await out(runtime, "echo here") == "here\n"


async def test_the_end_of_a_command_leaves_alone_what_the_first_process_of_its_container_waits_in(runtime: Runtime) -> None:
    """The end of every command once killed that `sleep`, and each one that the first process started in its place."""
    first = runtime._processes.first  # type: ignore[attr-defined]
    while not (waits := processes.find_descendants([first])):
        await asyncio.sleep(0.01)
    await out(runtime, "sleep 600 & true")
    assert processes.find_descendants([first]) == waits
