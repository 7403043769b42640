"""Forks `python -m MODULE ARGS...` off a server that has imported what the module needs (`tests.support.service.forked`).

It works wherever this folder is on Python's path and TESTS_FORK_OFF names the server. The interpreter that was started stands for the
program: it passes signals on and ends as the program does; where it is killed, so is the program.
"""

import os
import sys


def stand_for(name: str, argv: list[str]) -> None:
    import json
    import signal
    import socket

    with socket.socket(socket.AF_UNIX) as channel, channel.makefile("rb") as answers:
        channel.connect(f"\0{name}")
        theirs, _ = os.pipe()
        socket.send_fds(channel, [b"."], [0, 1, 2, theirs])
        order = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "new_session": True}
        channel.sendall(json.dumps(order).encode() + b"\n")
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = os.waitstatus_to_exitcode(int(answers.readline()))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if "TESTS_FORK_OFF" in os.environ and sys.orig_argv[1:2] == ["-m"]:
    stand_for(os.environ["TESTS_FORK_OFF"], sys.orig_argv)
