"""The connection to Redis that scripts share: everybody gets the answer to what they asked, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio as redis
import redis.exceptions as broken

from proxy.errors import StoreUnavailable
from proxy.store.connection import StoreConnection
from proxy.store.node import Pipe, StoreServer
from tests.support.service.redis_server import SLOW, running_redis


@asynccontextmanager
async def a_node() -> AsyncIterator[StoreServer]:
    with running_redis() as server:
        node = StoreServer(server.url, max_connections=4, connect_seconds=5.0)
        try:
            yield node
        finally:
            await node.close()


async def say(node: StoreServer, word: str) -> bytes:
    (answer,) = await node.send(None, [("EVAL", "return ARGV[1]", 0, word)])
    assert isinstance(answer, bytes)
    return answer


async def scripts_connections(node: StoreServer) -> list[str]:
    """The ids of those over which scripts came last."""
    (listed,) = await node.send(None, [("CLIENT", "LIST")])
    clients = [dict(field.split("=", 1) for field in line.split()) for line in listed.decode().splitlines()]
    return [client["id"] for client in clients if client["cmd"] in ("eval", "evalsha")]


async def test_scripts_of_many_calls_share_one_connection_and_each_gets_its_own_answer() -> None:
    async with a_node() as node:
        words = [f"{number}" * (1 + number % 50) for number in range(500)]
        assert await asyncio.gather(*(say(node, word) for word in words)) == [word.encode() for word in words]
        assert len(await scripts_connections(node)) == 1


async def test_scripts_of_one_turn_of_the_loop_go_out_in_one_write() -> None:
    async with a_node() as node:

        async def reads() -> int:
            (told,) = await node.send(None, [("INFO", "stats")])
            return int(told["total_reads_processed"])

        await say(node, "the connection is open")
        before = await reads()
        await asyncio.gather(*(say(node, f"{number}") for number in range(50)))
        assert await reads() - before < 25


async def test_a_script_that_fails_fails_for_its_own_caller() -> None:
    async with a_node() as node:
        asked = [say(node, "one"), node.send(None, [("EVALSHA", "0" * 40, 0)]), say(node, "two")]
        first, failed, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (first, last) == (b"one", b"two")
        assert isinstance(failed, broken.NoScriptError)


async def test_a_command_that_cannot_be_written_takes_nobody_elses_answer() -> None:
    async with a_node() as node:
        await say(node, "open")
        with pytest.raises(UnicodeEncodeError):
            await say(node, "\ud800")
        first, second = asyncio.create_task(say(node, "one")), asyncio.create_task(say(node, "two"))
        assert await first == b"one"
        assert await second == b"two"


async def test_the_answer_to_someone_who_went_away_is_nobody_elses() -> None:
    async with a_node() as node:
        await say(node, "open")
        leaving = asyncio.create_task(node.send(None, [("EVAL", SLOW % 200_000, 0)]))
        await asyncio.sleep(0)
        others = [asyncio.create_task(say(node, f"{number}")) for number in range(5)]
        await asyncio.sleep(0)
        leaving.cancel()
        assert await asyncio.gather(*others) == [b"0", b"1", b"2", b"3", b"4"]
        assert leaving.cancelled()


async def test_a_connection_that_was_killed_is_opened_again_and_what_waited_is_asked_again() -> None:
    async with a_node() as node:
        await say(node, "open")
        (known,) = await scripts_connections(node)
        await node.send(None, [("CLIENT", "KILL", "ID", known)])
        assert await asyncio.gather(*(say(node, f"{number}") for number in range(5))) == [b"0", b"1", b"2", b"3", b"4"]
        assert await scripts_connections(node) != [known]


async def test_a_connection_that_is_not_trusted_answers_what_it_was_asked_and_is_asked_no_more() -> None:
    async with a_node() as node:
        await say(node, "open")
        (known,) = await scripts_connections(node)
        waiting = asyncio.create_task(node.send(None, [("EVAL", SLOW % 100_000, 0)]))
        await asyncio.sleep(0)
        node.distrust()
        assert await say(node, "new") == b"new"
        assert await waiting == [b"slow"]
        (now,) = await scripts_connections(node)
        assert now != known


async def test_a_pipe_whose_server_says_what_nobody_asked_takes_no_more_commands() -> None:
    gate = asyncio.Event()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asking = asyncio.create_task(gate.wait())
        while not asking.done():
            greeting = asyncio.create_task(reader.read(4096))
            await asyncio.wait((asking, greeting), return_when=asyncio.FIRST_COMPLETED)
            if greeting.done():
                writer.write(b"+OK\r\n" * greeting.result().count(b"*"))
        greeting.cancel()
        writer.write(b"+OK\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = redis.Redis.from_url(f"redis://127.0.0.1:{port}", protocol=2)
        pipe = await Pipe.open(client.connection_pool)
        gate.set()
        while not pipe.lost:
            await asyncio.sleep(0.01)
        with pytest.raises(broken.ConnectionError):
            await pipe.send(("EVAL", "return 1", 0))
        await client.aclose()


async def test_a_node_that_is_closed_opens_nothing_for_who_was_about_to_ask() -> None:
    with running_redis() as server:
        for word in ("EVAL", "ECHO"):
            node = StoreServer(server.url, max_connections=4, connect_seconds=5.0)
            command = (word, "return 1", 0) if word == "EVAL" else (word, "1")
            asking = asyncio.ensure_future(node.send(None, [command]))
            await asyncio.sleep(0)
            await node.close()
            await asyncio.gather(asking, return_exceptions=True)
            with pytest.raises(broken.ConnectionError, match="closed"):
                await node.send(None, [command])
        client = redis.from_url(server.url)
        assert len(await client.client_list()) == 1
        await client.aclose()


async def test_a_store_that_is_closed_connects_no_more() -> None:
    with running_redis() as server:
        store = StoreConnection(server.url)
        asking = asyncio.ensure_future(store.execute("PING"))
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(asking, return_exceptions=True)
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.execute("PING")
        client = redis.from_url(server.url)
        assert len(await client.client_list()) == 1
        await client.aclose()
