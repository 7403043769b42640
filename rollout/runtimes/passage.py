"""The passage from a runtime without a network to the proxy, and to nothing else.

The runtime's network namespace holds nothing but a loopback device. `netns_listener` makes a listening socket there and hands it to the
node, which accepts on it and forwards bytes to the proxy from its own namespace. The image needs nothing for this, and there is no other
way out: no address, no name service, no gateway.

Inside, the proxy is at 127.0.0.1:`PORT`. With TLS the proxy's name must stay as in its certificate: the runtime's /etc/hosts maps it to
127.0.0.1 (`render_hosts`), and only the port of the URL changes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from rollout.runtimes.base import ProxyAddress, RuntimeFailed

PORT = 8700
"""In the runtime. Its namespace is its own, so this port is free."""
MAX_CONNECTIONS = 256
"""At a time, from one command to the proxy. Each takes two of the file descriptors that the node may have open in total."""
_LISTENER = Path(__file__).with_name("netns_listener.py")
_LISTENER_SECONDS = 60.0
_CHUNK_BYTES = 1 << 16


def map_url(proxy: ProxyAddress, url: str) -> str:
    """`url` as a command in the runtime must spell it. Raises `RuntimeFailed` for TLS to a proxy without a name."""
    parts = urlsplit(url)
    host = "127.0.0.1"
    if parts.scheme == "https":
        if host_name(proxy.host) is None:
            raise RuntimeFailed(f"{url}: TLS to an address cannot be forwarded into a runtime; give the proxy a host name")
        host = proxy.host
    return urlunsplit(parts._replace(netloc=f"{host}:{PORT}"))


def render_hosts(proxy: ProxyAddress) -> str:
    """/etc/hosts of the runtime."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    if (name := host_name(proxy.host)) is not None and name != "localhost":
        lines.append(f"127.0.0.1 {name}")
    return "".join(f"{line}\n" for line in lines)


def host_name(host: str) -> str | None:
    """The host if it is a name, None if it is an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return None


class Passage:
    """Forwards connections made in the network namespace of process `pid` to the proxy; used in an `async with` block."""

    def __init__(self, pid: int, proxy: ProxyAddress) -> None:
        self._pid = pid
        self._proxy = proxy
        self._tasks: set[asyncio.Task[Any] | None] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._forward, sock=await open_listener(self._pid))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._server.close()
        tasks = [task for task in self._tasks if task is not None and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        try:
            # If the proxy is down the client sees a closed connection, as from any gateway.
            with suppress(OSError):
                onward, out = await asyncio.open_connection(self._proxy.host, self._proxy.port)
                try:
                    await asyncio.gather(_copy(reader, out), _copy(onward, writer))
                finally:
                    out.close()
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()
            self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        # One side is gone in the middle: the other must know at once, or the proxy goes on sampling.
        writer.close()


async def open_listener(pid: int) -> socket.socket:
    """A socket that listens in the network namespace of process `pid`. Raises `RuntimeFailed`."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_LISTENER), str(pid), str(PORT), str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, stderr = await asyncio.wait_for(process.communicate(), _LISTENER_SECONDS)
        except TimeoutError as error:
            raise RuntimeFailed(f"no socket came from the network namespace of process {pid}") from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            reason = stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeFailed(f"the proxy cannot be made reachable in the runtime: {reason}")
        _, descriptors, _, _ = socket.recv_fds(ours, 64, 1)
    return socket.socket(fileno=descriptors[0])
