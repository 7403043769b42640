"""Runs one command and leaves nothing of it: `python supervisor.py HOLD_FD ARGV...`. A program of its own, of the standard library only.

It is the reaper of everything the command starts, so that what detaches itself still ends with the command: when that has ended, when
the supervisor is told to stop (SIGTERM: the command is told, and has the grace time that its caller gives it), and when the caller is
gone. The command starts once HOLD_FD is closed by the caller, who may put limits on this process before. The exit code is the
command's, 128 + number where a signal ended it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MARK = "VERBATIM_RUNTIME"
"""In the supervisor's own environment: the name of the runtime, by which it is found."""
BELL = signal.SIGUSR1
"""Sent by the system when the caller is gone."""


def below(root: int) -> list[int]:
    """Every process below `root`."""
    parents = {}
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            with open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(name)] = int(parent)
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {root})


def send(number: int) -> None:
    for pid in below(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all() -> None:
    """Kills until nothing is left: what forks while it is looked for is found the next time."""
    while True:
        send(signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def waited(child: int) -> int:
    """The exit code of `child`; others that end meanwhile are reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def abandoned(*_: object) -> None:
    end_all()
    os._exit(137)


def main() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    caller = os.getppid()
    signal.signal(BELL, abandoned)
    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGTERM))
    libc.prctl(PR_SET_PDEATHSIG, BELL, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != caller:
        return 137
    hold = int(sys.argv[1])
    os.read(hold, 1)
    os.close(hold)
    os.environ.pop(MARK, None)
    child = os.fork()
    if child == 0:
        signal.signal(BELL, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.execv(sys.argv[2], sys.argv[2:])
    code = waited(child)
    end_all()
    return code


if __name__ == "__main__":
    sys.exit(main())
