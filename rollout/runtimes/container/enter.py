"""Runs one command in a container with the network of another process: `python enter.py PID NETWORK_PID USER CALLS NAME=VALUE ARGV...`.
A standalone program that uses the standard library only.

PID is a process of the container, USER a number, CALLS the system call filter in hexadecimal (`seccomp`; empty: none), NAME=VALUE a
variable set in addition to the container's own. The command gets the container's files, processes, control groups, limits (`ulimit`) and
bounding capabilities, which for a user other than root amount to none. It gets a filter of ours because no engine exports its own.

The container must not reach the node through this program, which runs as the node's root. So its executable is on a read-only mount
(`guard_executable`), and once it has entered the container's files it loads nothing more: an error is printed without a traceback, for
which Python would read sources and codecs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 24, 38, 22, 2
SPACES = (("ipc", 0x08000000), ("uts", 0x04000000), ("cgroup", 0x02000000), ("pid", 0x20000000), ("mnt", 0x00020000))
"""All but the network, which is the other process's. Files come last: after them nothing of the node's own can be opened."""
CGROUPS = "/sys/fs/cgroup"
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def guard_executable() -> None:
    """Returns once this process runs from its own read-only mount; to get there it executes itself again.

    A program of the container can name /proc/self/exe as its interpreter, which is the node's Python at that moment, and could otherwise
    open it for writing once this program has ended (CVE-2019-5736)."""
    if os.statvfs("/proc/self/exe").f_flag & os.ST_RDONLY:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    exe = os.fsencode(os.path.realpath("/proc/self/exe"))
    done = libc.unshare(CLONE_NEWNS)
    for source, target, flags in (
        (b"none", b"/", MS_REC | MS_PRIVATE),
        (exe, exe, MS_BIND),
        (exe, exe, MS_REMOUNT | MS_BIND | MS_RDONLY),
    ):
        done = done or libc.mount(source, target, None, ctypes.c_ulong(flags), None)
    if done:
        raise OSError(ctypes.get_errno(), "the interpreter cannot be made read-only")
    os.execv(exe, [sys.executable, *sys.orig_argv[1:]])


def list_groups(pid: int) -> Iterator[str]:
    """The cgroup.procs files of the control groups that process `pid` is in."""
    with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
        for line in file:
            number, names, path = line.strip().split(":", 2)
            for name in names.removeprefix("name=").split(",") if number != "0" else ("", "unified"):
                yield f"{CGROUPS}/{name}{path}/cgroup.procs"


def join_groups(pid: int) -> None:
    for path in list_groups(pid):
        with suppress(OSError), open(path, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))


def copy_limits(pid: int) -> None:
    """Applies the limits of `pid`, such as that on a file's size, to this process and what it starts. They are read as text because root
    may not always query another user's process: one line each, in the order of their numbers, soft and hard in columns."""
    with open(f"/proc/{pid}/limits", encoding="utf-8") as file:
        lines = file.read().splitlines()[1:]
    for number, line in enumerate(lines):
        soft, hard = (resource.RLIM_INFINITY if word == "unlimited" else int(word) for word in line[26:].split()[:2])
        resource.setrlimit(number, (soft, hard))


def read_capabilities(pid: int) -> int:
    """The bounding set: the most that the process and what it starts can have."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapBnd:"))


def read_environment(pid: int) -> dict[bytes, bytes]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)


class BpfProgram(ctypes.Structure):
    """`struct sock_fprog`: the number of 8-byte instructions, and their address."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def apply_filter(calls: bytes, libc: ctypes.CDLL) -> None:
    """Applies the filter to this process and what it starts. From then on no program can gain privileges."""
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "new privileges cannot be refused")
    given = BpfProgram(len(calls) // 8, calls)
    if calls and libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "system calls cannot be filtered")


def run(argv: list[str], env: dict[bytes, bytes], user: int, kept: int, calls: bytes, libc: ctypes.CDLL) -> int:
    """Runs the command with at most the capabilities `kept`; returns its exit code."""
    child = os.fork()
    if child == 0:
        for number in range(64):
            if not kept >> number & 1:
                libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
        for ignored in PYTHON_IGNORES:
            signal.signal(ignored, signal.SIG_DFL)
        os.chdir("/")
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        apply_filter(calls, libc)
        os.execve(argv[0], argv, env)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def main() -> None:
    guard_executable()
    pid, network_pid, user = (int(word) for word in sys.argv[1:4])
    calls, argv = bytes.fromhex(sys.argv[4]), sys.argv[6:]
    name, _, value = sys.argv[5].partition("=")
    libc = ctypes.CDLL(None, use_errno=True)
    join_groups(pid)
    copy_limits(pid)
    kept, env = read_capabilities(pid), read_environment(pid)
    env[name.encode()] = value.encode()
    paths = [(f"/proc/{network_pid}/ns/net", CLONE_NEWNET), *((f"/proc/{pid}/ns/{space}", kind) for space, kind in SPACES)]
    spaces = [(os.open(path, os.O_RDONLY | os.O_CLOEXEC), kind) for path, kind in paths]
    for space, kind in spaces:
        if libc.setns(space, kind) != 0:
            raise OSError(ctypes.get_errno(), f"a namespace of process {pid} cannot be entered")
    code = NOT_EXECUTABLE
    try:
        code = run(argv, env, user, kept, calls, libc)
    except OSError as error:
        code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
        os.write(2, b"%s: %s\n" % (os.fsencode(argv[0]), os.strerror(error.errno or 0).encode()))
    finally:
        # Before Python prints a traceback or runs its shutdown code.
        os._exit(code)


if __name__ == "__main__":
    main()
