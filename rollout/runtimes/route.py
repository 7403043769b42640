"""How a runtime without a network reaches the proxy, and nothing else.

The runtime has a network namespace of its own with nothing in it but the loopback device. A listening socket is made in there
(`netns_listener`) and handed to the node, which accepts on it and passes bytes on to the proxy from its own namespace. The image needs
nothing for it, and there is no other way out: no address, no name service, no gateway.

In the runtime the proxy is at 127.0.0.1:`PORT`. With TLS the certificate is the proxy's, so its name must stay what it is: the runtime's
/etc/hosts says that it is 127.0.0.1 (`hosts`), and only the port of the URL changes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from rollout.runtimes.base import Route, RuntimeFailed

PORT = 8700
"""In the runtime. Its namespace is its own, so that it is free."""
_LISTENER = Path(__file__).with_name("netns_listener.py")
_CHUNK_BYTES = 1 << 16
_LISTENER_SECONDS = 60.0
MOST = 256
"""Connections of one command to the proxy at a time. Each takes two of the files that the node may have open for all it does."""


def inside(route: Route, url: str) -> str:
    """`url` as a command in the runtime must spell it. Raises `RuntimeFailed` for TLS to a proxy that has no name."""
    parts = urlsplit(url)
    host = "127.0.0.1"
    if parts.scheme == "https":
        if named(route.host) is None:
            raise RuntimeFailed(f"{url}: TLS to an address cannot be passed on into a runtime; give the proxy a host name")
        host = route.host
    return urlunsplit(parts._replace(netloc=f"{host}:{PORT}"))


def hosts(route: Route) -> str:
    """What /etc/hosts says in the runtime."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    if (name := named(route.host)) is not None and name != "localhost":
        lines.append(f"127.0.0.1 {name}")
    return "".join(f"{line}\n" for line in lines)


def named(host: str) -> str | None:
    """The host where it is a name and no address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return None


async def listening(pid: int) -> socket.socket:
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
            _, told = await asyncio.wait_for(process.communicate(), _LISTENER_SECONDS)
        except TimeoutError as error:
            raise RuntimeFailed(f"no socket came from the network namespace of process {pid}") from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            reason = told.decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeFailed(f"the proxy cannot be made reachable in the runtime: {reason}")
        _, passed, _, _ = socket.recv_fds(ours, 64, 1)
    return socket.socket(fileno=passed[0])


class Passage:
    """Passes on what connects in the network namespace of process `pid` to the proxy; used in an `async with` block."""

    def __init__(self, pid: int, route: Route) -> None:
        self._pid = pid
        self._route = route
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._pass_on, sock=await listening(self._pid))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._server.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MOST:
            writer.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            # Whoever connected sees a closed connection where the proxy is not there, as from any gateway.
            with suppress(OSError):
                onward, out = await asyncio.open_connection(self._route.host, self._route.port)
                await _both_ways((reader, writer), (onward, out))
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _both_ways(one: _Stream, other: _Stream) -> None:
    try:
        await asyncio.gather(_copied(one[0], other[1]), _copied(other[0], one[1]))
    finally:
        other[1].close()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        # One side is gone in mid-flight: the other is to know at once, or a proxy samples for nobody.
        writer.close()
