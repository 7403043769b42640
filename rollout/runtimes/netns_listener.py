"""Makes a listening socket in another process's network namespace: `python netns_listener.py PID PORT SOCKET_FD`. A program of its own,
of the standard library only: entering a user namespace takes a process that has but one thread.

The socket listens on 127.0.0.1:PORT and is passed over the Unix socket SOCKET_FD. Whoever accepts on it gets the connections made in
that namespace, wherever it is itself. The loopback device there is set up by whoever made the namespace, which may still be at it:
bubblewrap tells of its child first. Two at it would be one too many, since the kernel gives the device its address when it is set up,
and who then brings the same address is refused.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import time
from contextlib import suppress

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NS_GET_USERNS = 0xB701
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
LOOPBACK_SECONDS = 30.0


def entered(space: int, kind: int, what: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(space, kind) != 0:
        raise OSError(ctypes.get_errno(), f"{what} cannot be entered")


def loopback_up(within: socket.socket, pid: int) -> None:
    """Waits until the device is up; sets it up where process `pid` is gone, or has not for long."""
    deadline = time.monotonic() + LOOPBACK_SECONDS
    while not (flags := loopback_flags(within)) & IFF_UP:
        if time.monotonic() > deadline or not os.path.exists(f"/proc/{pid}"):
            fcntl.ioctl(within, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
            return
        time.sleep(0.001)


def loopback_flags(within: socket.socket) -> int:
    flags: int = struct.unpack("16sh14x", fcntl.ioctl(within, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0)))[1]
    return flags


def main() -> None:
    pid, port, passed = (int(each) for each in sys.argv[1:4])
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    # Root enters at once; others are allowed to within the user namespace that the network belongs to. That is not the process's own:
    # bubblewrap makes a second one in the first, for the number of its user.
    if os.geteuid() != 0:
        with suppress(OSError):
            entered(fcntl.ioctl(network, NS_GET_USERNS), CLONE_NEWUSER, f"the user namespace of process {pid}'s network")
    entered(network, CLONE_NEWNET, f"the net namespace of process {pid}")
    with socket.socket() as listener, socket.socket(fileno=passed) as channel:
        loopback_up(listener, pid)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        socket.send_fds(channel, [b"listening"], [listener.fileno()])


if __name__ == "__main__":
    main()
