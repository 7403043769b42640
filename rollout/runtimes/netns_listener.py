"""Makes a listening socket in another process's network namespace: `python netns_listener.py PID PORT SOCKET_FD`. A standalone program that
uses the standard library only: only a process with a single thread may enter a user namespace.

The socket listens on 127.0.0.1:PORT and is passed over the Unix socket SOCKET_FD. Whoever accepts on it gets the connections made in that
namespace. Bringing up the loopback device is left to the namespace's maker, who may still be at it: bubblewrap reports its child before
that. If both did it, the second would fail, since the kernel assigns the device's address once it is up and refuses the same address again.
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


def enter_namespace(descriptor: int, kind: int, what: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, kind) != 0:
        raise OSError(ctypes.get_errno(), f"{what} cannot be entered")


def bring_loopback_up(within: socket.socket, pid: int) -> None:
    """Waits until the device is up; brings it up itself if process `pid` is gone or takes too long."""
    deadline = time.monotonic() + LOOPBACK_SECONDS
    while not (flags := read_loopback_flags(within)) & IFF_UP:
        if time.monotonic() > deadline or not os.path.exists(f"/proc/{pid}"):
            fcntl.ioctl(within, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
            return
        time.sleep(0.005)


def read_loopback_flags(within: socket.socket) -> int:
    flags: int = struct.unpack("16sh14x", fcntl.ioctl(within, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0)))[1]
    return flags


def main() -> None:
    pid, port, passed = (int(each) for each in sys.argv[1:4])
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    # Root may enter at once, others from within the user namespace that owns the network. That is not the process's own: bubblewrap makes
    # a second one inside the first to map its user's number.
    if os.geteuid() != 0:
        with suppress(OSError):
            enter_namespace(
                fcntl.ioctl(network, NS_GET_USERNS), CLONE_NEWUSER, f"the user namespace of process {pid}'s network"
            )
    enter_namespace(network, CLONE_NEWNET, f"the net namespace of process {pid}")
    with socket.socket() as listener, socket.socket(fileno=passed) as channel:
        bring_loopback_up(listener, pid)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        socket.send_fds(channel, [b"listening"], [listener.fileno()])


if __name__ == "__main__":
    main()
