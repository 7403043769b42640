"""Runs one command in a container with the network of another process: `python enter.py PID NETWORK_PID USER CALLS NAME=VALUE ARGV...`. A
program of its own, of the standard library only.

PID is a process of the container, USER a number, CALLS the filter of system calls in hexadecimal digits (`seccomp`), empty where there
is none, NAME=VALUE a variable that is set beside the container's own. The command has the container's files, processes, control groups,
limits (`ulimit`) and greatest capabilities, of which those of a user other than root are none. No engine has a word for its own filter.

Whoever the container belongs to must not get at the node through this program, which is the node's root. So its own executable stands
on a mount that cannot be written (`guarded`), and once the container's files are entered nothing more is loaded from files: an error is
told without Python's own account of it, for which Python would read sources and codecs.
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
"""All but the network, which is another's; the files last, after which nothing of the node's own can be opened."""
CGROUPS = "/sys/fs/cgroup"
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def guarded() -> None:
    """Returns once this process runs from a mount of its own that is read-only; for that it starts itself again.

    A program of the container can name /proc/self/exe as its interpreter, which is the node's Python at that moment, and could open it
    for writing once it has ended (CVE-2019-5736)."""
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
        raise OSError(ctypes.get_errno(), "the interpreter cannot be kept from being written")
    os.execv(exe, [sys.executable, *sys.orig_argv[1:]])


def groups(pid: int) -> Iterator[str]:
    """The folders of the control groups that process `pid` is in."""
    with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
        for line in file:
            number, names, path = line.strip().split(":", 2)
            for name in names.removeprefix("name=").split(",") if number != "0" else ("", "unified"):
                yield f"{CGROUPS}/{name}{path}/cgroup.procs"


def joined(pid: int) -> None:
    for path in groups(pid):
        with suppress(OSError), open(path, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))


def limited(pid: int) -> None:
    """Holds this process and what it starts to the limits of `pid`, of which the size of a file is one. Where root may not ask for those of
    another user's process, it may still read them: a line each, in the order of their numbers, soft and hard in columns."""
    with open(f"/proc/{pid}/limits", encoding="utf-8") as file:
        lines = file.read().splitlines()[1:]
    for number, line in enumerate(lines):
        soft, hard = (resource.RLIM_INFINITY if word == "unlimited" else int(word) for word in line[26:].split()[:2])
        resource.setrlimit(number, (soft, hard))


def capabilities(pid: int) -> int:
    """The greatest set that the process and what it starts can have."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapBnd:"))


def environment(pid: int) -> dict[bytes, bytes]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)


class Filter(ctypes.Structure):
    """`struct sock_fprog`: how many instructions of 8 bytes, and where."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filtered(calls: bytes, libc: ctypes.CDLL) -> None:
    """Holds this process and what it starts to the filter. No program gives it more rights than it has from then on."""
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "new privileges cannot be refused")
    given = Filter(len(calls) // 8, calls)
    if calls and libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "system calls cannot be filtered")


def started(argv: list[str], env: dict[bytes, bytes], user: int, kept: int, calls: bytes, libc: ctypes.CDLL) -> int:
    """The exit code of the command, which has no more capabilities than `kept`."""
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
        filtered(calls, libc)
        os.execve(argv[0], argv, env)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def main() -> None:
    guarded()
    pid, network_pid, user = (int(word) for word in sys.argv[1:4])
    calls, argv = bytes.fromhex(sys.argv[4]), sys.argv[6:]
    name, _, value = sys.argv[5].partition("=")
    libc = ctypes.CDLL(None, use_errno=True)
    joined(pid)
    limited(pid)
    kept, env = capabilities(pid), environment(pid)
    env[name.encode()] = value.encode()
    named = [(f"/proc/{network_pid}/ns/net", CLONE_NEWNET), *((f"/proc/{pid}/ns/{space}", kind) for space, kind in SPACES)]
    spaces = [(os.open(path, os.O_RDONLY | os.O_CLOEXEC), kind) for path, kind in named]
    for space, kind in spaces:
        if libc.setns(space, kind) != 0:
            raise OSError(ctypes.get_errno(), f"a namespace of process {pid} cannot be entered")
    code = NOT_EXECUTABLE
    try:
        code = started(argv, env, user, kept, calls, libc)
    except OSError as error:
        code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
        os.write(2, b"%s: %s\n" % (os.fsencode(argv[0]), os.strerror(error.errno or 0).encode()))
    finally:
        # Before Python tells of an error or takes itself down.
        os._exit(code)


if __name__ == "__main__":
    main()
