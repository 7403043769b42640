"""The one gate for requests to URLs that a caller names: choosers of a lookahead, callbacks of tasks.

Whoever opens sessions or submits tasks should not reach, through the service, what only the service can reach. So each *connection* is
checked, by the address that the system is about to connect to: whatever spelling, name or DNS answer has led there makes no difference.
Redirects are not followed. Time and bytes of an answer are bounded, and no proxy of the environment is used.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from proxy.addresses import PUBLIC, AllowList

LOOPBACK = ("127.0.0.0/8", "::1/128")
ANSWER_BYTES = 2**20
"""The most that is read of an answer."""


class OutboundFailed(OSError):
    """The URL was not asked, or gave no answer within bounds."""


class Outbound:
    """Without `allowed`, public addresses are; and, where the service itself listens on loopback alone, those of the machine: whoever
    reaches such a service reaches them without it."""

    def __init__(self, allowed: Sequence[str] | None, *, on_loopback: bool) -> None:
        self._allowed = AllowList([PUBLIC, *(LOOPBACK if on_loopback else ())] if allowed is None else allowed)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, seconds: float) -> tuple[int, bytes]:
        """The status and the body of the answer. Raises OutboundFailed, also after `seconds` and for more than ANSWER_BYTES."""
        try:
            async with asyncio.timeout(seconds):
                return await self._post(url, body, headers)
        except TimeoutError as error:
            raise OutboundFailed(f"no answer within {seconds:g} s") from error
        except OutboundFailed:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise OutboundFailed(f"{type(error).__name__}: {error}") from error

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        guard = _Guard(self._allowed)
        try:
            return await _send(guard, url, body, headers)
        except OutboundFailed:
            raise
        except (aiohttp.ClientError, OSError):
            if guard.refused is None:
                raise
            raise guard.refused from None


async def _send(guard: _Guard, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    connector = aiohttp.TCPConnector(resolver=guard, socket_factory=guard.open_socket, use_dns_cache=False, force_close=True)
    unlimited = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=unlimited, trust_env=False, auto_decompress=False) as client,
        client.post(url, data=body, headers={"accept-encoding": "identity", **headers}, allow_redirects=False) as answer,
    ):
        content = bytearray()
        async for piece in answer.content.iter_any():
            content += piece
            if len(content) > ANSWER_BYTES:
                raise OutboundFailed(f"the answer has more than {ANSWER_BYTES} bytes")
        return answer.status, bytes(content)


class _Guard(AbstractResolver):
    """Opens the sockets of one request, once it has seen where each is to be connected."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._resolver = aiohttp.ThreadedResolver()
        self._named: set[str] = set()
        """Addresses of names that are allowed whatever they resolve to."""
        self.refused: OutboundFailed | None = None

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        if self._allowed.has_name(host):
            self._named |= {each["host"] for each in found}
        return found

    async def close(self) -> None:
        await self._resolver.close()

    def open_socket(self, target: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, (address, *_) = target
        if address not in self._named and not self._allowed.admits(address):
            self.refused = OutboundFailed(f"{address} is no address that this service may call (VERBATIM_OUTBOUND_ALLOW)")
            raise self.refused
        return socket.socket(family=family, type=kind, proto=protocol)
