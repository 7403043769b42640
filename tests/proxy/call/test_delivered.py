"""A call is delivered when all of its answer went out to a harness that was still there.

The system between service and harness takes a few kilobytes of these long answers: what the harness does not read stays in the
service.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import APIStatusError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cli.serving.connection import HttpConnection, HttpTimeouts
from proxy.settings import Settings
from proxy.store.connection import StoreConnection
from proxy.store.sessions import SessionStore
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, wait_until

OWN = partial(HttpConnection, patience=HttpTimeouts())
FEW_BYTES = 4096
LONG = "hello world " * 600
"""With its logprobs some hundred kilobytes."""
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "logprobs": True, "top_logprobs": 5}

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
LAST = pytest.mark.parametrize("header", ["", "Connection: close\r\n"], ids=["kept open", "last"])


@contextmanager
def serving(
    redis_server: RedisServer, protocol: Any = OWN, said: str = LONG
) -> Iterator[tuple[ScriptedEngine, RunningService]]:
    redis_server.flushall()
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url, protocol=protocol, send_bytes=FEW_BYTES) as service,
    ):
        yield engine.say(said), service


@contextmanager
def asking(
    session: Session, stream: bool, header: str = "", path: str = "chat/completions", body: dict[str, Any] = BODY, **fields: Any
) -> Iterator[socket.socket]:
    """A connection on which the call was asked for; closed on exit, with what is unread."""
    parts = urlsplit(session.base_url)
    content = json.dumps({**body, "stream": stream, **fields}).encode()
    head = (
        f"POST {parts.path}/{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {session.api_key}\r\nContent-Length: {len(content)}\r\n{header}\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, FEW_BYTES)
        connection.settimeout(60)
        connection.connect((parts.hostname, parts.port))
        connection.sendall(head.encode() + content)
        yield connection


def recorded(session: Session) -> bool:
    return [call["status"] for call in session.calls] == ["finished"]


@contextmanager
def answered(redis_server: RedisServer, stream: bool, header: str) -> Iterator[tuple[Session, socket.socket]]:
    """A call that is recorded, and of whose answer one letter was read."""
    with serving(redis_server) as (_, service):
        session = service.session()
        with asking(session, stream, header) as connection:
            assert connection.recv(1) == b"H"
            wait_until(lambda: recorded(session), 120, "the call is recorded")
            yield session, connection


def whole(connection: socket.socket, stream: bool) -> bytes:
    """The answer but for its first letter."""
    answer, end = b"", None
    while not (answer.endswith(b"0\r\n\r\n") if stream else end is not None and len(answer) == end):
        more = connection.recv(65536)
        assert more, f"the answer broke off after {len(answer)} bytes"
        answer += more
        if end is None and (found := re.search(rb"content-length: (\d+)\r\n(?:.+\r\n)*\r\n", answer)):
            end = found.end() + int(found[1])
    return answer


async def delivered(redis_server: RedisServer, session_id: str) -> int:
    """How many calls, once nothing runs any more that could say so."""
    connection = StoreConnection.to(Settings(), redis_server.url)
    try:
        return len(await SessionStore(connection, "test").load_delivered(session_id))
    finally:
        await connection.close()


@STREAMED
@LAST
async def test_an_answer_that_its_harness_did_not_wait_for_is_not_delivered(
    redis_server: RedisServer, stream: bool, header: str
) -> None:
    with answered(redis_server, stream, header) as (session, _):
        pass
    assert await delivered(redis_server, session.session_id) == 0


@STREAMED
@LAST
async def test_an_answer_that_its_harness_takes_slowly_is_delivered(
    redis_server: RedisServer, stream: bool, header: str
) -> None:
    with answered(redis_server, stream, header) as (session, connection):
        assert not session.calls[0]["delivered"]
        assert len(whole(connection, stream)) > 100_000
        wait_until(lambda: session.calls[0]["delivered"], 120, "the delivery is noted")


@STREAMED
async def test_a_reply_on_its_way_when_another_process_closes_its_session_stays_undelivered(
    redis_server: RedisServer, stream: bool
) -> None:
    """It was marked afterwards, and the rows of the closed session were others than those that its group had counted."""
    with serving(redis_server) as (engine, service), RunningService(engine.url, redis_server.url) as other:
        session = service.session()
        with asking(session, stream) as connection:
            assert connection.recv(1) == b"H"
            wait_until(lambda: recorded(session), 120, "the call is recorded")
            path = f"/sessions/{session.session_id}"
            assert other.request("POST", f"{path}/close", json={"status": "completed", "reward": 1.0}).status_code == 200
            whole(connection, stream)
    assert await delivered(redis_server, session.session_id) == 0


RESPONSE: dict[str, Any] = {"model": "policy", "input": "q", "include": ["message.output_text.logprobs"], "top_logprobs": 5}


@STREAMED
def test_a_reply_that_is_fetched_after_its_answer_was_lost_is_delivered(redis_server: RedisServer, stream: bool) -> None:
    """It stayed undelivered, and was trained as an attempt that nobody had seen."""
    with serving(redis_server) as (_, service):
        session = service.session()
        with asking(session, stream, path="responses", body=RESPONSE) as connection:
            assert connection.recv(1) == b"H"
            wait_until(lambda: recorded(session), 120, "the call is recorded")
        (call,) = session.calls
        assert not call["delivered"]
        # Its items are what the harness itself had sent.
        session.client.responses.input_items.list(f"resp_{call['call_id']}")
        assert not session.calls[0]["delivered"]
        fetched = session.client.responses.retrieve(f"resp_{call['call_id']}")
        assert fetched.output_text == LONG
        wait_until(lambda: session.calls[0]["delivered"], 120, "the delivery is noted")
        session.close(reward=1.0)
        _, accounting = session.trajectories()
        assert accounting["quarantined"] == []


def test_a_reply_that_is_fetched_once_its_session_is_closed_changes_no_row(redis_server: RedisServer) -> None:
    with serving(redis_server) as (_, service):
        session = service.session()
        with asking(session, stream=True, path="responses", body=RESPONSE) as connection:
            assert connection.recv(1) == b"H"
            wait_until(lambda: recorded(session), 120, "the call is recorded")
        session.close(reward=1.0)
        with pytest.raises(APIStatusError):
            session.client.responses.retrieve(f"resp_{session.calls[0]['call_id']}")
        assert not session.calls[0]["delivered"]


async def test_a_harness_that_is_given_up_has_not_got_its_answer(redis_server: RedisServer) -> None:
    impatient = partial(HttpConnection, patience=HttpTimeouts(write_seconds=0.1))
    with ExitStack() as harness:
        with serving(redis_server, impatient) as (_, service):
            session = service.session()
            harness.enter_context(asking(session, stream=False))
            wait_until(lambda: recorded(session), 120, "the call is recorded")
        assert await delivered(redis_server, session.session_id) == 0


class Another(HttpToolsProtocol):
    """A server that tells nothing of what went out, and lets an answer wait as soon as the system takes no more of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)


async def test_where_the_server_does_not_say_a_harness_that_left_before_the_end_counts(redis_server: RedisServer) -> None:
    with serving(redis_server, Another, LONG * 4) as (_, service):
        session = service.session()
        with asking(session, stream=True, logprobs=False, top_logprobs=None) as connection:
            assert connection.recv(1) == b"H"
            wait_until(lambda: recorded(session), 120, "the call is recorded")
    assert await delivered(redis_server, session.session_id) == 0
