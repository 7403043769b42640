"""The bytes of images: once per digest in the store, as long as a session refers to them.

A session's own list of digests is in its slot, the bytes and the sessions that refer to them in the digest's. A call claims a digest for
its session, then keeps the bytes, and only then is recorded; a session that is deleted releases what its list names, and its list goes
last. So whatever process dies in between, no record refers to bytes that are gone, and a repeated deletion finds what is left to release.
A call that kept bytes for a session which was deleted meanwhile releases them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping

from proxy.errors import Conflict, RequestError
from proxy.store import keys
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.keys import parse_hash

AT_ONCE = 16
"""Images that one call sends or loads at a time."""


class MediaStore:
    """`created_at` is the session's: another one of its id has a list of its own. Every method may raise `StoreUnavailable`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def keep(self, session_id: str, created_at: float, images: Mapping[str, bytes]) -> None:
        """The session refers to the images from now on, and their bytes count as its own. Raises Conflict when it is closed or gone."""
        created = repr(created_at)
        args: list[Argument] = [created]
        for digest, data in images.items():
            args += (digest, len(data))
        parts = (keys.state(session_id), keys.media(session_id, created_at))
        if not await self._redis.run(Script.read("claim_media"), parts, args, patient=True):
            raise Conflict(f"session {session_id} was closed before its images were kept")
        name = keys.media_holder(session_id, created_at)
        await self._each(images, lambda digest: self._keep(name, digest, images[digest]))
        # A deletion removes the state before it reads the list: if the state is there, it will release what was kept.
        if await self._redis.execute("HGET", keys.state(session_id), "created_at", patient=True) != created.encode():
            await self._each(images, lambda digest: self._release(name, digest))
            raise Conflict(f"session {session_id} was deleted before its images were kept")

    async def _keep(self, name: str, digest: str, data: bytes) -> None:
        parts, script = (keys.media_bytes(digest), keys.media_holders(digest)), Script.read("keep_media")
        # The bytes are sent only where no session has them.
        if not await self._redis.run(script, parts, (name, b""), durable=True, patient=True):
            await self._redis.run(script, parts, (name, data), durable=True, patient=True)

    async def restore(self, session_id: str, created_at: float, images: Mapping[str, bytes]) -> None:
        """Give a session that is being restored its images; one that exists is left alone. Raises RequestError for an image that is not
        what its digest says."""
        for digest, data in images.items():
            if hashlib.sha256(data).hexdigest() != digest:
                raise RequestError(f"the image {digest} of session {session_id} has another digest", param="media")
        with contextlib.suppress(Conflict):
            await self.keep(session_id, created_at, images)

    async def load(self, digests: Iterable[str]) -> dict[str, bytes]:
        """The bytes of those that the store has."""
        found: dict[str, bytes] = {}

        async def load_one(digest: str) -> None:
            data = await self._redis.execute("GET", keys.media_bytes(digest))
            if data is not None:
                found[digest] = data

        await self._each(digests, load_one)
        return found

    async def sizes(self, session_id: str, created_at: float) -> dict[str, int]:
        """Bytes of each image that the session refers to, by digest."""
        listed = parse_hash(await self._redis.execute("HGETALL", keys.media(session_id, created_at)))
        return {digest.decode(): int(size) for digest, size in listed.items()}

    async def count(self, session_id: str, created_at: float) -> int:
        return int(await self._redis.execute("HLEN", keys.media(session_id, created_at)))

    async def release(self, session_id: str, created_at: float) -> None:
        """The session is deleted: images that no other session refers to go with it."""
        name = keys.media_holder(session_id, created_at)
        listed = await self.sizes(session_id, created_at)
        await self._each(listed, lambda digest: self._release(name, digest))
        if listed:
            await self._redis.execute("DEL", keys.media(session_id, created_at))

    async def _release(self, name: str, digest: str) -> None:
        await self._redis.run(Script.read("release_media"), (keys.media_bytes(digest), keys.media_holders(digest)), (name,))

    async def _each(self, digests: Iterable[str], work: Callable[[str], Awaitable[None]]) -> None:
        limit = asyncio.Semaphore(AT_ONCE)

        async def run(digest: str) -> None:
            async with limit:
                await work(digest)

        await asyncio.gather(*map(run, digests))
