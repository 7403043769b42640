"""The contract of the store of images, on a real Redis, plain and cluster."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from proxy.errors import Conflict
from proxy.store import keys
from proxy.store.connection import Script
from proxy.store.media import MediaStore
from proxy.store.states import SessionInfo
from tests.support.service.redis_server import Store

ONE, OTHER = b"one image", b"another"


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def named(*images: bytes) -> dict[str, bytes]:
    return {name(data): data for data in images}


async def opened(store: Store, session_id: str, created_at: float = 100.0) -> MediaStore:
    assert await store.sessions.create(SessionInfo(session_id, b"hash", created_at))
    return MediaStore(store.connection)


async def stored_bytes(store: Store, session_id: str) -> int:
    return int(await store.connection.execute("HGET", keys.state(session_id), "bytes") or 0)


async def test_images_come_back_as_they_were_and_count_once_for_their_session(store: Store) -> None:
    media = await opened(store, "s1")
    for _ in range(2):
        await media.keep("s1", 100.0, named(ONE, OTHER))
    assert await media.load([name(ONE), name(OTHER), "0" * 64]) == named(ONE, OTHER)
    assert await media.sizes("s1", 100.0) == {name(ONE): len(ONE), name(OTHER): len(OTHER)}
    assert await media.count("s1", 100.0) == 2
    assert await stored_bytes(store, "s1") == len(ONE) + len(OTHER)


async def test_the_last_session_takes_an_image_with_it(store: Store) -> None:
    media = await opened(store, "s1")
    await opened(store, "s2")
    await media.keep("s1", 100.0, named(ONE, OTHER))
    await media.keep("s2", 100.0, named(ONE))
    assert await stored_bytes(store, "s2") == len(ONE)
    for _ in range(2):
        await store.sessions.delete("s1")
        await media.release("s1", 100.0)
    assert await media.load([name(ONE), name(OTHER)]) == named(ONE)
    await store.sessions.delete("s2")
    await media.release("s2", 100.0)
    assert await media.load([name(ONE)]) == {}
    assert await media.sizes("s2", 100.0) == {}


async def test_a_deletion_that_died_before_its_images_went_is_finished_later(store: Store) -> None:
    """Meanwhile another session may have the id: its images stay."""
    media = await opened(store, "s1")
    await media.keep("s1", 100.0, named(ONE, OTHER))
    await store.sessions.delete("s1")
    await opened(store, "s1", 200.0)
    await media.keep("s1", 200.0, named(ONE))
    await media.release("s1", 100.0)
    assert await media.load([name(ONE), name(OTHER)]) == named(ONE)
    assert await media.sizes("s1", 200.0) == {name(ONE): len(ONE)}


async def test_a_session_that_is_closed_or_gone_keeps_no_more(store: Store) -> None:
    media = await opened(store, "s1")
    await store.sessions.begin_close("s1")
    await media.keep("s1", 100.0, named(ONE))
    await store.sessions.close("s1", "completed", None, None, 1.0)
    for session_id, created_at in (("s1", 100.0), ("s1", 200.0), ("s2", 100.0)):
        with pytest.raises(Conflict):
            await media.keep(session_id, created_at, named(OTHER))
    assert await media.load([name(OTHER)]) == {}


async def test_a_call_that_stalls_while_its_session_is_deleted_leaves_no_image(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its claim and the bytes the whole deletion takes place; the image of another session stays."""
    media = await opened(store, "s1")
    await opened(store, "s2")
    await media.keep("s2", 100.0, named(ONE))
    run = store.connection.run

    async def deleted_first(script: Script, *args: Any, **kwargs: Any) -> Any:
        if script == Script.read("keep_media"):
            await store.sessions.delete("s1")
            await MediaStore(store.connection).release("s1", 100.0)
        return await run(script, *args, **kwargs)

    monkeypatch.setattr(store.connection, "run", deleted_first)
    with pytest.raises(Conflict, match="deleted"):
        await media.keep("s1", 100.0, named(ONE, OTHER))
    assert await media.load([name(ONE), name(OTHER)]) == named(ONE)
    assert not await store.connection.execute("EXISTS", keys.media_holders(name(OTHER)))
    assert not await store.connection.execute("HEXISTS", keys.media_holders(name(ONE)), keys.media_holder("s1", 100.0))
