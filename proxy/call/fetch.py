"""Fetches images that messages name by address, if the operator allows it: within the bounds of all images, not from private networks.

The engine never fetches anything. Each address that a request leads to is checked where the connection is made: a name that resolves to a
private address is refused as the address is, and so is a redirection to either.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from proxy.errors import RequestError
from proxy.timeline import HARNESS, Waiting

REDIRECTS = 3
AT_ONCE = 8
"""Images that this process fetches at a time."""
CHUNK_BYTES = 2**16
PRIVATE = "it is in a private network (VERBATIM_REMOTE_MEDIA_PRIVATE)"


class ImageFetcher:
    """`private`: networks that are not public may be asked, too."""

    def __init__(self, *, private: bool, most_bytes: int, seconds: float = 30.0) -> None:
        self._private = private
        self._most_bytes = most_bytes
        self._timeout = aiohttp.ClientTimeout(total=seconds)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, url: str) -> bytes:
        """Raises RequestError, which names the address and what is wrong."""
        try:
            async with self._turns, asyncio.timeout(self._timeout.total):
                with Waiting(HARNESS):
                    return await self._follow(url)
        except RequestError:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise _refuse(url, str(error) or type(error).__name__) from error

    async def _follow(self, url: str) -> bytes:
        connector = aiohttp.TCPConnector(resolver=_Resolver(private=self._private), use_dns_cache=False)
        async with aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False) as session:
            for _ in range(REDIRECTS + 1):
                self._check(url)
                async with session.get(url, allow_redirects=False, headers={"accept": "image/*"}) as answer:
                    location = answer.headers.get("location")
                    if 300 <= answer.status < 400 and location:
                        url = urljoin(url, location)
                        continue
                    if answer.status != 200:
                        raise _refuse(url, f"the answer is {answer.status}")
                    return await self._read(url, answer)
        raise _refuse(url, f"more than {REDIRECTS} redirections")

    async def _read(self, url: str, answer: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
            data += chunk
            if len(data) > self._most_bytes:
                raise _refuse(url, f"it has more than {self._most_bytes} bytes (VERBATIM_MAX_IMAGE_BYTES)")
        return bytes(data)

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _refuse(url, "only http and https addresses are fetched")
        # A literal address goes past the resolver.
        try:
            literal = ipaddress.ip_address(parts.hostname)
        except ValueError:
            return
        if not self._private and not _is_public(literal):
            raise _refuse(url, PRIVATE)


class _Resolver(AbstractResolver):
    """Resolves names to public addresses only, unless others are allowed."""

    def __init__(self, *, private: bool) -> None:
        self._private = private
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        found: Sequence[ResolveResult] = await self._resolver.resolve(host, port, family)
        allowed = [each for each in found if self._private or _is_public(ipaddress.ip_address(each["host"]))]
        if not allowed:
            raise _refuse(host, PRIVATE)
        return allowed

    async def close(self) -> None:
        await self._resolver.close()


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None:
        address = mapped
    return address.is_global and not address.is_multicast


def _refuse(url: str, reason: str) -> RequestError:
    # Without its query, which may hold a signature.
    return RequestError(f"the image at {url.partition('?')[0][:200]} cannot be fetched: {reason[:200]}", param="messages")
