"""A lease that is sent while it is built: what stands in memory, and what is left when the answer breaks off. On a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from proxy import rows
from proxy.api import leased_rows
from proxy.api.leased_rows import BatchResponse, EncodedBatch, RowTerms, encode_groups
from proxy.api.requests import Encoding
from proxy.errors import RequestError
from proxy.store.delivery import LeaseQuery
from proxy.store.groups import LeaseRecord, Nothing
from reconstruct.errors import ReconstructError
from tests.proxy.api.test_control_api import Service, service

__all__ = ["service"]

SESSIONS = [f"s{number}" for number in range(17)]
"""More than 15: msgpack writes the length of such an array in another way."""


class Recorder:
    """The caller of a lease, who hangs up after `leaves_after` chunks. `events` has the session ids that were built, and "sent" for each
    chunk."""

    def __init__(self, leaves_after: int | None = None) -> None:
        self.events: list[str] = []
        self.chunks: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}
        self.ended = False
        self.turns: list[int] = []
        """The turn of the loop in which each chunk was sent."""
        self._left, self._leaves_after, self._turn = asyncio.Event(), leaves_after, 0

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
            self._count_turns()
            return
        self.ended = not message["more_body"]
        if message["body"]:
            self.events.append("sent")
            self.chunks.append(message["body"])
            self.turns.append(self._turn)
        if len(self.chunks) == self._leaves_after:
            self._left.set()

    def _count_turns(self) -> None:
        self._turn += 1
        if not self.ended:
            asyncio.get_running_loop().call_soon(self._count_turns)

    def watch(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        """Notes which sessions are built; those of `fails` cannot be."""
        build = rows.session_rows

        async def noted(services: Any, state: Any, *more: Any) -> Any:
            self.events.append(state.info.session_id)
            if state.info.session_id == fails:
                raise ReconstructError("its records contradict each other")
            return await build(services, state, *more)

        monkeypatch.setattr(rows, "session_rows", noted)


@pytest.fixture
async def ready(service: Service) -> Service:
    """SESSIONS are ready to be leased, each a group of its own."""
    for session_id in SESSIONS:
        await service.finished(session_id)
    return service


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built before an answer begins, and what is sent at a time, is less than a group."""
    monkeypatch.setattr(leased_rows, "WHOLE_BYTES", 1)
    monkeypatch.setattr(leased_rows, "CHUNK_BYTES", 64)


async def take(service: Service) -> LeaseRecord:
    now = await service.services.clock.now()
    query = LeaseQuery(consumer="t", max_groups=len(SESSIONS), lease_seconds=600, max_deliveries=1, now=now)
    lease = await service.services.delivery.lease(query)
    assert not isinstance(lease, Nothing)
    return lease


async def answer(service: Service, lease: LeaseRecord, form: Encoding, caller: Recorder) -> bytes:
    terms = RowTerms(form)
    groups, left = await encode_groups(service.services, lease, terms)
    batch = EncodedBatch(lease, 0, {"": 0}, terms, groups, left)
    await BatchResponse(service.services, batch)({"type": "http"}, caller.receive, caller.send)
    return b"".join(caller.chunks)


async def leased_again(service: Service) -> Sequence[str]:
    """What the next consumer gets. `max_deliveries` is 1: a group that was delivered would not come again."""
    lease = await take(service)
    return [group.session_ids[0] for group in lease.groups]


@pytest.mark.parametrize("form", Encoding)
async def test_a_large_batch_is_sent_while_it_is_built_and_has_the_bytes_of_a_whole_one(
    ready: Service, monkeypatch: pytest.MonkeyPatch, form: Encoding
) -> None:
    """The old bug: 50 million tokens stood in the service's memory before the first byte was sent."""
    lease, whole, streamed = await take(ready), Recorder(), Recorder()
    expected = await answer(ready, lease, form, whole)
    assert int(whole.headers[b"content-length"]) == len(expected)
    batch = msgspec.json.decode(expected) if form is Encoding.JSON else msgpack.unpackb(expected)
    assert [group["group_id"] for group in batch["groups"]] == SESSIONS
    monkeypatch.setattr(leased_rows, "WHOLE_BYTES", 1)
    monkeypatch.setattr(leased_rows, "CHUNK_BYTES", 64)
    streamed.watch(monkeypatch)
    assert await answer(ready, lease, form, streamed) == expected
    assert streamed.ended and b"content-length" not in streamed.headers
    built = [place for place, event in enumerate(streamed.events) if event != "sent"]
    assert [streamed.events[place] for place in built] == SESSIONS
    between = [streamed.events[one + 1 : following] for one, following in pairwise(built)]
    assert all("sent" in sent for sent in between), "no group is built before the one before it is sent"


async def test_other_work_has_its_turn_after_every_chunk(ready: Service, small: None) -> None:
    """The old bug: a client that read fast was sent all of a batch in one turn of the loop."""
    caller = Recorder()
    await answer(ready, await take(ready), Encoding.PACKED, caller)
    assert len(set(caller.turns)) == len(caller.turns) > len(SESSIONS)


async def test_a_batch_whose_later_group_is_gone_breaks_off_and_the_others_are_leased_again(
    ready: Service, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Recorder()
    caller.watch(monkeypatch, fails="s3")
    content = await answer(ready, await take(ready), Encoding.PACKED, caller)
    assert caller.chunks and not caller.ended
    with pytest.raises(ValueError, match="incomplete input"):
        msgpack.unpackb(content)
    assert caller.events[-1] == "s3" and not {"s4", "s5"} & set(caller.events)
    letters, _ = await ready.services.delivery.dead_letters()
    assert [letter.session_ids for letter in letters] == [["s3"]]
    assert await leased_again(ready) == [each for each in SESSIONS if each != "s3"]


async def test_a_caller_who_hangs_up_in_the_middle_of_a_batch_leaves_it_to_the_next(
    ready: Service, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Recorder(leaves_after=3)
    caller.watch(monkeypatch)
    await answer(ready, await take(ready), Encoding.PACKED, caller)
    assert not caller.ended and SESSIONS[-1] not in caller.events
    assert await leased_again(ready) == SESSIONS


async def test_a_builder_that_fails_on_a_later_group_is_refused_before_the_answer_begins(
    ready: Service, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Recorder()
    caller.watch(monkeypatch, fails="s5")
    with pytest.raises(RequestError, match="the builder 'merged' makes no rows of group s5"):
        await encode_groups(ready.services, await take(ready), RowTerms(Encoding.PACKED, builder="merged"))


@pytest.mark.parametrize("form", [Encoding.JSON, Encoding.MSGPACK])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 40, 2**16 - 1, 2**16, 2**16 + 1])
def test_a_list_of_numbers_has_the_same_bytes_in_pieces(monkeypatch: pytest.MonkeyPatch, form: Encoding, size: int) -> None:
    """The old bug: 50,000 numbers were a list of Python's, which the collector looked through and the encoder held the lock for."""
    encoder: Any = msgspec.json if form is Encoding.JSON else msgspec.msgpack
    encode, sizes = encoder.encode, [0]

    def encode_part(part: Any) -> Any:
        sizes.append(len(part))
        return encode(part)

    ids = np.arange(size, dtype=np.int32) * 37 % 151_936
    for array in (ids, ids.astype(np.float32) / -3, (ids % 2).astype(np.int8)):
        whole = encode(array.tolist())
        with monkeypatch.context() as patch:
            patch.setattr(encoder, "encode", encode_part)
            assert bytes(leased_rows.spell_numbers(array, form)) == whole
    assert max(sizes) == min(size, leased_rows.SPELLED_NUMBERS)
