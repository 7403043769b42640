"""The command lines of a `bwrap_container`. Nothing of the project is imported here: a program that only enters one starts at once."""

from __future__ import annotations

import os
from collections.abc import Mapping

ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def view(binds: Mapping[str, str], *, network: bool) -> list[str]:
    """Arguments of bwrap; `binds` are writable: path inside -> path of the machine."""
    words = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--ro-bind", "/usr", "/usr"]
    words += [] if network else ["--unshare-net"]
    for path in _SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    words += ["--dir", "/etc", "--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--dir", "/tmp"]
    words += ["--dir", "/root", "--perms", "1777", "--dir", "/run/verbatim"]
    for name in sorted(os.listdir("/etc")):
        if name not in ("hosts", "shadow", "gshadow"):
            words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for inside, outside in ({"/etc/hosts": "/etc/hosts"} | dict(binds)).items():
        words += ["--bind", outside, inside]
    return words


def as_user(number: int) -> list[str]:
    """A command line before another's, which then is that user's, with no privilege that root has."""
    return ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", "--no-new-privs"] if number else []


_FILTERED = """
import ctypes, os, sys
class Filter(ctypes.Structure): _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))
calls, libc = bytes.fromhex(sys.argv[1]), ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Filter(len(calls) // 8, calls)), 0, 0) == 0
os.execvp(sys.argv[2], sys.argv[2:])
"""


def filtered(calls: bytes) -> list[str]:
    """A command line before another's, which then has that system call filter."""
    return ["python3", "-I", "-S", "-c", _FILTERED, calls.hex()]


def entering(pid: int, *also: str) -> list[str]:
    """A command line before another's, which makes that run in the container whose first process `pid` is."""
    return ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", *also]
