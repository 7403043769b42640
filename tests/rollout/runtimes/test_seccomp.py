"""The system calls that a sandbox leaves, in real sandboxes; and the list's numbers, as the kernel's headers have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout.runtimes import seccomp
from tests.support.machine import unavailable
from tests.support.runtimes.runtime_places import python, sandboxed

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
CALL = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
def told(number, *arguments):
    done = libc.syscall(number, *(ctypes.c_long(each) for each in arguments))
    return "done" if done >= 0 else errno.errorcode[ctypes.get_errno()]
"""


@pytest.mark.parametrize("machine", sorted(HEADERS))
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        unavailable(f"{HEADERS[machine]} is not here (linux-libc-dev)")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()))
    known = {name: int(defined.get(name, number)) for name, number in seccomp.MACHINES[machine].calls.items()}
    assert len(set(known) & set(defined)) > 30
    assert dict(seccomp.MACHINES[machine].calls) == known


@pytest.mark.cell("L4")
async def test_a_sandbox_makes_no_namespaces_and_mounts_nothing(tmp_path: Path) -> None:
    """In a user namespace of its own a command was root, with file systems in memory that nothing counts."""
    machine = seccomp.find_machine()
    if machine is None:
        unavailable("the calls of this machine are not known")
    refused = (
        "unshare",
        "setns",
        "mount",
        "fsopen",
        "open_tree",
        "bpf",
        "keyctl",
        "userfaultfd",
        "perf_event_open",
        "io_uring_setup",
    )
    numbers = [machine.calls[name] for name in refused]
    program = f"""{CALL}
print([told(number, 0x10000000, 0, 0, 0, 0) for number in {numbers}])
print([told({machine.calls["clone"]}, flag | 17, 0, 0, 0, 0) for flag in (0x20000, 0x10000000, 0x40000000)])
print(told({machine.calls["clone3"]}, 0, 0), told({seccomp.NEWEST + 1}), told({seccomp.NEWEST}, -1, -1, -1) != "ENOSYS")
"""
    async with sandboxed(tmp_path).started() as runtime:
        done = await python(runtime, program)
    assert done.stdout.decode().splitlines() == [str(["EPERM"] * len(refused)), str(["EPERM"] * 3), "ENOSYS ENOSYS True"], done


@pytest.mark.cell("L4")
async def test_sockets_are_of_families_that_end_in_the_sandbox(tmp_path: Path) -> None:
    """A vsock is not of a network namespace: in a virtual machine it reaches the host."""
    program = """
import errno, socket
told = []
for family, kind in ((socket.AF_UNIX, 1), (socket.AF_INET, 1), (socket.AF_NETLINK, 3), (socket.AF_VSOCK, 1), (38, 5), (17, 3)):
    try: told.append(socket.socket(family, kind).close())
    except OSError as error: told.append(errno.errorcode[error.errno])
print(told)
"""
    async with sandboxed(tmp_path).started() as runtime:
        done = await python(runtime, program)
    assert done.stdout.decode() == f"{[None] * 3 + ['EAFNOSUPPORT'] * 3}\n", done


@pytest.mark.parametrize("counted", [True, False])
async def test_segments_of_shared_memory_are_small_where_nothing_counts_them(counted: bool, tmp_path: Path) -> None:
    machine = seccomp.find_machine()
    if machine is None:
        unavailable("the calls of this machine are not known")
    place = sandboxed(tmp_path / "runtimes", **({} if counted else {"cgroup": tmp_path / "no" / "group"}))
    if counted and "control groups below" not in place.kind.describe_limits():
        unavailable("no control group can be made here")
    sizes = (1 << 16, (1 << 16) + 1, 1 << 28, (1 << 32) + 1)
    program = f"{CALL}\nprint([told({machine.calls['shmget']}, 0, size, 0o1600) for size in {sizes}])"
    async with place.started() as runtime:
        done = await python(runtime, program)
    told = ["done"] * 4 if counted else ["done", "ENOMEM", "ENOMEM", "ENOMEM"]
    assert done.stdout.decode() == f"{told}\n", done


async def test_what_programs_need_goes_on(tmp_path: Path) -> None:
    """Threads, processes, pipes, locks, a debugger's look, files in memory: interpreters and compilers start with these."""
    program = """
import concurrent.futures, ctypes, fcntl, multiprocessing, os, subprocess, sys, tempfile, threading
def double(x): return 2 * x
if __name__ == "__main__":
    with concurrent.futures.ThreadPoolExecutor(4) as threads: assert list(threads.map(double, range(9)))[-1] == 16
    with multiprocessing.Pool(2) as pool: assert pool.map(double, range(9))[-1] == 16
    assert subprocess.run(["sh", "-c", "echo a | cat"], capture_output=True).stdout == b"a\\n"
    os.write(os.memfd_create("x"), b"x")
    with tempfile.TemporaryFile() as file: fcntl.flock(file, fcntl.LOCK_EX)
    assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0
    print("well")
"""
    async with sandboxed(tmp_path).started() as runtime:
        await runtime.upload("program.py", program.encode())
        done = await runtime.exec(["python3", "program.py"], timeout_seconds=120)
    assert done.stdout == b"well\n", done
