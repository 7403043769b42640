"""Runs one command in a container with the network of the node: `python enter.py PID NAME=VALUE ARGV...`. A program of its own, of the
standard library only.

PID is a process of the container, NAME=VALUE a variable that is set beside the container's own. The command has the container's
files, processes, control groups, limits (`ulimit`) and greatest capabilities; the engine's system call filter it has not, for which no
engine has a word.

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

LIMITS = 16
"""How many resources Linux knows limits of."""
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
PR_CAPBSET_DROP = 24
SPACES = (("ipc", 0x08000000), ("uts", 0x04000000), ("cgroup", 0x02000000), ("pid", 0x20000000), ("mnt", 0x00020000))
"""All but the network; the files last, after which nothing of the node's own can be opened."""
CGROUPS = "/sys/fs/cgroup"
CLONE_NEWNS = 0x00020000
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
    """Holds this process and what it starts to the limits of `pid`, of which the size of a file is one."""
    for number in range(LIMITS):
        resource.setrlimit(number, resource.prlimit(pid, number))


def capabilities(pid: int) -> int:
    """The greatest set that the process and what it starts can have."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapBnd:"))


def environment(pid: int) -> dict[bytes, bytes]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)


def started(argv: list[str], env: dict[bytes, bytes], kept: int, libc: ctypes.CDLL) -> int:
    """The exit code of the command, which has no more capabilities than `kept`."""
    child = os.fork()
    if child == 0:
        for number in range(64):
            if not kept >> number & 1:
                libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
        for ignored in PYTHON_IGNORES:
            signal.signal(ignored, signal.SIG_DFL)
        os.chdir("/")
        os.execve(argv[0], argv, env)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def main() -> None:
    guarded()
    pid = int(sys.argv[1])
    name, _, value = sys.argv[2].partition("=")
    libc = ctypes.CDLL(None, use_errno=True)
    joined(pid)
    limited(pid)
    kept, env = capabilities(pid), environment(pid)
    env[name.encode()] = value.encode()
    spaces = [(os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY | os.O_CLOEXEC), kind) for space, kind in SPACES]
    for space, kind in spaces:
        if libc.setns(space, kind) != 0:
            raise OSError(ctypes.get_errno(), f"a namespace of process {pid} cannot be entered")
    code = NOT_EXECUTABLE
    try:
        code = started(sys.argv[3:], env, kept, libc)
    except OSError as error:
        code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
        os.write(2, b"%s: %s\n" % (os.fsencode(sys.argv[3]), os.strerror(error.errno or 0).encode()))
    finally:
        # Before Python tells of an error or takes itself down.
        os._exit(code)


if __name__ == "__main__":
    main()
