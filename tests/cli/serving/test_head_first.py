"""The head of an answer goes out with what follows it, and at the loop's next turn where nothing does."""

from __future__ import annotations

import asyncio
from typing import cast

from cli.serving.connection import HeadFirst

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Written(asyncio.Transport):
    """A transport that remembers what was written at once, and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return b"closed" in self.writes

    def close(self) -> None:
        self.writes.append(b"closed")

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.writes))


def held_back(transport: Written) -> asyncio.Transport:
    return cast("asyncio.Transport", HeadFirst(transport, asyncio.get_running_loop()))


async def test_a_head_and_its_body_are_one_write() -> None:
    transport = Written()
    answer = held_back(transport)
    for body in (b"one", b"two"):
        answer.write(HEAD)
        answer.write(body)
    answer.write(b"more")
    await asyncio.sleep(0)
    assert transport.writes == [HEAD + b"one", HEAD + b"two", b"more"]


async def test_a_head_alone_waits_no_longer_than_a_turn_of_the_loop() -> None:
    transport = Written()
    held_back(transport).write(HEAD)
    assert transport.writes == []
    await asyncio.sleep(0)
    assert transport.writes == [HEAD]


async def test_a_held_head_is_sent_before_the_end_and_counts_as_unsent() -> None:
    transport = Written()
    answer = held_back(transport)
    answer.write(HEAD)
    assert answer.get_write_buffer_size() == len(HEAD)
    answer.write(HEAD)
    answer.close()
    await asyncio.sleep(0)
    assert transport.writes == [HEAD, HEAD, b"closed"]


async def test_a_head_of_a_connection_that_was_lost_is_not_written() -> None:
    transport = Written()
    held_back(transport).write(HEAD)
    transport.close()
    await asyncio.sleep(0)
    assert transport.writes == [b"closed"]
