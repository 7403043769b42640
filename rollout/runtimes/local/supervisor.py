"""Runs one command and leaves nothing of it: `python supervisor.py HOLD_FD ARGV...`. A standalone program, standard library only.

It is the subreaper of everything the command starts, so that even a process that detaches itself ends with the command: when the command
has ended, when the supervisor gets SIGTERM (which it passes on to the command; the caller decides the grace time), and when the caller is
gone. The command starts once the caller writes to or closes HOLD_FD, after putting limits on this process. The exit code is the command's,
or 128 + the number of the signal that ended it.
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
"""A variable of the supervisor itself: the name of the runtime, by which a sweep finds it."""
BELL = signal.SIGUSR1
"""The kernel sends it when the caller is gone."""


def find_descendants(root: int) -> list[int]:
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
    for pid in find_descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all() -> None:
    """Kills until nothing is left: a process that forks during one pass is found in the next."""
    while True:
        send(signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def wait_for(child: int) -> int:
    """The exit code of `child`; reaps others that end meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def exit_abandoned(*_: object) -> None:
    end_all()
    os._exit(137)


def main() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    caller = os.getppid()
    signal.signal(BELL, exit_abandoned)
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
    code = wait_for(child)
    end_all()
    return code


if __name__ == "__main__":
    sys.exit(main())
