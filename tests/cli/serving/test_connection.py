"""Clients that send too much, too slowly or nothing, and clients that do not listen: none of them keeps its connection."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cli.serving.connection import BODY_GRACE_SECONDS, HttpConnection, HttpTimeouts
from proxy.limits import ProcessLimits
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import ADMIN, Serving, wait_until

NOWHERE = "http://127.0.0.1:9"
SECONDS = 0.5
HEAD_BYTES = 8192


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    """Gives requests all the time they need."""
    patience = HttpTimeouts(header_bytes=HEAD_BYTES, headers=32, write_seconds=SECONDS)
    with RunningService(NOWHERE, redis_server.url, protocol=partial(HttpConnection, patience=patience)) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(redis_server: RedisServer) -> Iterator[RunningService]:
    """Gives requests hardly any time."""
    patience = HttpTimeouts(header_seconds=SECONDS, body_seconds=SECONDS + BODY_GRACE_SECONDS)
    protocol = partial(HttpConnection, patience=patience)
    with RunningService(NOWHERE, redis_server.url, protocol=protocol, body_timeout_seconds=SECONDS) as running:
        yield running


@contextlib.contextmanager
def connected(service: RunningService | Serving, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    parts = urlsplit(service.url)
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(30)
        connection.connect((parts.hostname, parts.port))
        yield connection


def heard(connection: socket.socket) -> bytes:
    """All that comes until the service closes the connection; fails when it never does."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            answer += part
    return answer


def answered(connection: socket.socket) -> bytes:
    """One answer, head and body."""
    answer = b""
    while not (found := re.search(rb"content-length: (\d+)\r\n(?:.+\r\n)*\r\n", answer)) or len(answer) < found.end() + int(
        found[1]
    ):
        part = connection.recv(65536)
        assert part, answer
        answer += part
    return answer


def trickled(connection: socket.socket, content: bytes, read: Callable[[socket.socket], bytes] = heard) -> bytes:
    """What `read` gets from the service while `content` is sent byte by byte, again and again; all, until it closes the connection."""
    ended = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while True:
                for byte in content:
                    connection.sendall(bytes([byte]))
                    if ended.wait(0.05):
                        return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        return read(connection)
    finally:
        ended.set()
        dripping.join()


def serves(service: RunningService) -> bool:
    return service.request("GET", "/healthz").status_code == 200


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: x", *headers, "", "")).encode()


def opened(service: RunningService) -> tuple[str, str]:
    """(path of its chat completions, Authorization header) of a new session."""
    made = service.request("POST", "/sessions", json={}).json()
    return f"/s/{made['session_id']}/v1/chat/completions", f"Authorization: Bearer {made['api_key']}"


# What is no request


@pytest.mark.parametrize(
    ("request_line", "headers", "why"),
    [
        ("GET /healthz", (), "must end in HTTP/1.1"),
        ("GET /healthz", ("Host: x",), "must end in HTTP/1.1"),
        ("GET /healthz HTTP/0.9", ("Host: x",), ""),
        ("GET /healthz HTTP/2.0", ("Host: x",), ""),
        ("GET /healthz HTTP/1.1", (), "0 Host headers"),
        ("GET /healthz HTTP/1.1", ("Host: x", "Host: y"), "2 Host headers"),
        ("POST /sessions HTTP/1.1", ("Content-Length: 2",), "0 Host headers"),
    ],
)
def test_a_head_without_a_version_or_a_host_is_refused_and_the_connection_closed(
    service: RunningService, request_line: str, headers: tuple[str, ...], why: str
) -> None:
    with connected(service) as connection:
        connection.sendall("\r\n".join((request_line, *headers, "", "")).encode())
        answer = heard(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") and why.encode() in answer
    assert b'"status"' not in answer and serves(service)


def test_an_http_1_0_client_needs_no_host(service: RunningService) -> None:
    with connected(service) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert heard(connection).startswith(b"HTTP/1.1 200 ")


# Too slow


def test_a_connection_on_which_nothing_comes_is_closed(hasty: RunningService) -> None:
    with connected(hasty) as connection:
        assert heard(connection) == b""
    assert serves(hasty)


@pytest.mark.parametrize("begun", [b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: b"])
def test_a_head_that_stays_incomplete_is_given_up(hasty: RunningService, begun: bytes) -> None:
    with connected(hasty) as connection:
        connection.sendall(begun)
        assert heard(connection).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_comes_byte_by_byte_is_given_up(hasty: RunningService) -> None:
    with connected(hasty) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        assert trickled(connection, b"X-A: b\r\n").startswith(b"HTTP/1.1 408 ")


def test_empty_lines_keep_no_connection_open(hasty: RunningService) -> None:
    for before in (b"", head("/healthz", method="GET")):
        with connected(hasty) as connection:
            connection.sendall(before)
            answer = trickled(connection, b"\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ") if before else answer == b""


def test_a_second_request_on_a_connection_is_given_its_own_time(hasty: RunningService) -> None:
    """It is sent when a younger connection has already been closed, for no request had come."""
    with connected(hasty) as connection:
        connection.sendall(head("/healthz", method="GET"))
        assert answered(connection).startswith(b"HTTP/1.1 200 ")
        with connected(hasty) as silent:
            assert heard(silent) == b""
        connection.sendall(head("/healthz", method="GET"))
        assert answered(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHo")
        assert heard(connection).startswith(b"HTTP/1.1 408 ")


def test_a_harness_whose_body_does_not_come_is_told_so_in_its_dialect(hasty: RunningService) -> None:
    path, key = opened(hasty)
    for name, shape in ((path, '"code":"request_timeout"'), (path.replace("chat/completions", "messages"), '"type":"error"')):
        with connected(hasty) as connection:
            connection.sendall(head(name, key, "Content-Length: 1000"))
            connection.sendall(b"{")
            answer = answered(connection).decode()
            assert answer.startswith("HTTP/1.1 408 ") and shape in answer


def test_a_body_that_comes_byte_by_byte_is_given_up(hasty: RunningService) -> None:
    path, key = opened(hasty)
    for name, secret in ((path, key), ("/sessions", f"Authorization: Bearer {ADMIN}")):
        with connected(hasty) as connection:
            connection.sendall(head(name, secret, "Content-Length: 100000"))
            assert b" 408 " in trickled(connection, b" ", answered).partition(b"\r\n")[0]


def test_a_connection_whose_body_is_never_whole_is_cut_whatever_the_application_does(redis_url: str) -> None:
    """The application has its own time first, and then some to answer."""
    assert HttpTimeouts().body_seconds == ProcessLimits().body_timeout_seconds + BODY_GRACE_SECONDS
    hasty = partial(HttpConnection, patience=HttpTimeouts(body_seconds=SECONDS))
    with RunningService(NOWHERE, redis_url, protocol=hasty, body_timeout_seconds=600) as service:
        key = f"Authorization: Bearer {service.session().api_key}"
        for name, secret in (("/v1/chat/completions", key), ("/sessions", f"Authorization: Bearer {ADMIN}")):
            with connected(service) as connection:
                connection.sendall(head(name, secret, "Content-Length: 100000"))
                assert trickled(connection, b" ") == b""


def test_a_body_is_not_waited_for_when_the_caller_has_no_key(service: RunningService) -> None:
    path, _ = opened(service)
    for name in (path, "/sessions", "/batches/lease"):
        with connected(service) as connection:
            connection.sendall(head(name, "Content-Length: 1000"))
            assert answered(connection).startswith(b"HTTP/1.1 401 ")


# Too much


@pytest.mark.parametrize(
    "lines",
    [
        ["X-Large: " + "a" * (HEAD_BYTES + 1)],
        [f"X-{number}: " + "a" * 500 for number in range(20)],
        [f"X-{number}: a" for number in range(40)],
        ["X" * (HEAD_BYTES + 1) + ": a"],
    ],
)
def test_a_head_that_is_too_large_is_refused(service: RunningService, lines: list[str]) -> None:
    with connected(service) as connection:
        connection.sendall(head("/healthz", *lines, method="GET"))
        assert heard(connection).startswith(b"HTTP/1.1 431 ")
    assert serves(service)


def test_a_path_that_is_too_long_is_refused(service: RunningService) -> None:
    with connected(service) as connection:
        connection.sendall(head("/" + "a" * HEAD_BYTES, method="GET"))
        assert heard(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\nX-Endless: ", b"GET / HTTP/1.1\r\nX"])
def test_an_endless_head_is_cut_off_soon(service: RunningService, begin: bytes) -> None:
    with connected(service) as connection:
        assert endless(connection, begin, b"a" * 65536) < 16 * 2**20
    assert serves(service)


@pytest.mark.parametrize("after", [b"0\r\nX-Trailer: ", b"0\r\n", b"1;extension="])
def test_an_endless_trailer_or_chunk_extension_is_cut_off_soon(service: RunningService, after: bytes) -> None:
    path, key = opened(service)
    begin = head(path, key, "Transfer-Encoding: chunked") + b"1\r\n{\r\n" + after
    piece = b"X-Many: a\r\n" * 6000 if after == b"0\r\n" else b"a" * 65536
    with connected(service) as connection:
        assert endless(connection, begin, piece) < 16 * 2**20
    assert serves(service)


def endless(connection: socket.socket, begin: bytes, piece: bytes) -> int:
    """How many bytes the service took before it closed the connection."""
    connection.sendall(begin)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 64 * 2**20:
            connection.sendall(piece)
            sent += len(piece)
    return sent


def test_a_head_of_ordinary_size_with_a_large_body_is_taken(service: RunningService) -> None:
    body = json.dumps({"metadata": {"a": "b" * 3_000_000}}).encode()
    lines = [
        f"Authorization: Bearer {ADMIN}",
        f"Content-Length: {len(body)}",
        *(f"X-{number}: {'a' * 200}" for number in range(20)),
    ]
    with connected(service) as connection:
        connection.sendall(head("/sessions", *lines) + body)
        assert answered(connection).startswith(b"HTTP/1.1 201 ")


def test_requests_that_come_at_once_are_answered_in_turn(service: RunningService) -> None:
    body = json.dumps({"metadata": {"a": "b" * 50_000}}).encode()
    one = head("/sessions", f"Authorization: Bearer {ADMIN}", f"Content-Length: {len(body)}") + body
    last = head("/healthz", "Connection: close", method="GET")
    with connected(service) as connection:
        connection.sendall(one * 3 + last)
        answer = heard(connection)
    assert (answer.count(b"HTTP/1.1 201 "), answer.count(b"HTTP/1.1 200 ")) == (3, 1)


# Ambiguous and malformed


@pytest.mark.parametrize(
    "request_bytes",
    [
        head("/healthz", "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        head("/healthz", "Content-Length: 5", "Content-Length: 6") + b"hello!",
        head("/healthz", "X-A: a\rb", method="GET"),
        head("/healthz", "X-A: a\0b", method="GET"),
        head("/healthz", "X A: b", method="GET"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /healthz HTTP/9.9\r\n\r\n",
    ],
)
def test_what_two_servers_could_read_differently_is_refused(service: RunningService, request_bytes: bytes) -> None:
    with connected(service) as connection:
        connection.sendall(request_bytes)
        answer = heard(connection)
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert serves(service)


def test_a_line_break_in_a_path_makes_no_header_and_no_line_of_the_log(tmp_path: Path) -> None:
    with Serving("--engine", NOWHERE, data_dir=tmp_path / "data") as service, connected(service) as connection:
        connection.sendall(
            head("/v1/none%0d%0aSet-Cookie:%20a=b%0a2026-01-01%20ERROR%20forged", "Connection: close", method="GET")
        )
        answer = heard(connection)
    assert answer.startswith(b"HTTP/1.1 404 ") and b"\r\nset-cookie" not in answer.lower()
    lines = service.stderr.splitlines()
    assert not any(line.startswith("2026-01-01 ERROR forged") for line in lines)


# A client that does not listen


def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(service: RunningService) -> None:
    for _ in range(3):
        assert service.request("POST", "/sessions", json={"metadata": {"a": "b" * 6_000_000}}).status_code == 201
    with connected(service, receive_bytes=4096) as connection:
        connection.sendall(head("/sessions", f"Authorization: Bearer {ADMIN}", method="GET"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: not is_held(connection), 60, "the service has given the connection up")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        assert len(heard(connection)) < 18_000_000
    assert serves(service)


def is_held(connection: socket.socket) -> bool:
    """Whether the process at the other end still has the connection open. A client that does not read is not told of the end."""
    ports = [f"{address[1]:04X}" for address in (connection.getpeername(), connection.getsockname())]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if [address.rpartition(":")[2] for address in fields[1:3]] == ports:
            # The inode of a socket that belongs to no process is 0.
            return fields[9] != "0"
    return False


def test_limits_of_zero_wait_for_ever(hasty: RunningService, redis_url: str) -> None:
    patient = partial(HttpConnection, patience=HttpTimeouts(header_seconds=0, body_seconds=0, write_seconds=0))
    with (
        RunningService(NOWHERE, redis_url, protocol=patient, body_timeout_seconds=0) as service,
        connected(service) as connection,
    ):
        path, key = opened(service)
        for part in (head(path, key, "Content-Length: 2"), b"{}"):
            # For as long as another service waits.
            with connected(hasty) as silent:
                assert heard(silent) == b""
            connection.sendall(part)
        assert answered(connection).startswith(b"HTTP/1.1 400 ")
