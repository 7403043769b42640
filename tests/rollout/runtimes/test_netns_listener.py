"""A socket that listens in another network namespace, made while that is still being set up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rollout.runtimes.passage import PORT, open_listener
from tests.support.machine import unavailable

# What a sandbox does in a network namespace of its own once told to, as bubblewrap does it: an address for the loopback device, which
# the kernel refuses where there is one, and then the device set up.
SANDBOX = """
import ctypes, fcntl, os, socket, struct, sys
if ctypes.CDLL(None).unshare(0x50000000) != 0:
    sys.exit("no namespaces here")
print("made", flush=True)
sys.stdin.readline()
lo = socket.if_nametoindex("lo")
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
netlink.bind((0, 0))
def ask(kind, flags, body):
    netlink.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
    error = struct.unpack("=i", netlink.recv(1024)[16:20])[0]
    if error:
        sys.exit(os.strerror(-error))
home = socket.inet_aton("127.0.0.1")
address = struct.pack("=BBBBI", socket.AF_INET, 8, 0x80, 254, lo) + struct.pack("=HH", 8, 2) + home + struct.pack("=HH", 8, 1) + home
ask(20, 0x605, address)
ask(16, 5, struct.pack("=BBHiII", 0, 0, 0, lo, 1, 1))
print("set up", flush=True)
sys.stdin.read()
"""


@contextmanager
def sandbox() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SANDBOX], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        if process.stdout.readline() != "made\n":
            unavailable(process.stderr.read())
        yield process
        process.stdin.close()


async def test_a_sandbox_that_is_still_setting_up_its_loopback_device_is_left_to_it() -> None:
    """Where the listener had been first, bubblewrap ended with "loopback: Failed RTM_NEWADDR", and the command never ran."""
    with sandbox() as process:
        assert process.stdin and process.stdout and process.stderr
        made = asyncio.create_task(open_listener(process.pid))
        done, _ = await asyncio.wait([made], timeout=1)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "set up\n", process.stderr.read()
        assert not done
        with await made as listener:
            assert listener.getsockname() == ("127.0.0.1", PORT)


async def test_a_sandbox_that_ended_before_it_was_set_up_is_not_waited_for() -> None:
    """Its own words tell why; who waits for the listener is not to hide them behind a deadline."""
    with sandbox() as process:
        made = asyncio.create_task(open_listener(process.pid))
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.to_thread(process.wait)
        with await asyncio.wait_for(made, 20) as listener:
            assert listener.getsockname() == ("127.0.0.1", PORT)
