"""What the clients of the service promise, the sync one and the async one alike: errors, retries, lost answers, tokens."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.client import NEVER_STARTED, ONCE, PATIENT, TRANSIENT, AsyncServiceClient, Attempts, RetryRule, ServiceClient
from contract.errors import (
    AuthenticationFailed,
    ClientClosed,
    HeldBack,
    NoAnswer,
    RequestRefused,
    ResourceConflict,
    ResourceNotFound,
    ServiceError,
    ServiceUnavailable,
)
from tests.support.service.scripted_service import Answer, ScriptedService, error_answer, json_answer, serving

AWAY = "http://127.0.0.1:9"
GOOD = json_answer({"good": True})
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedService]:
    with serving(ScriptedService()) as made:
        yield made


@pytest.fixture
def service(scripted: ScriptedService) -> ScriptedService:
    return scripted.reset()


class InThreads:
    """The sync client as its tests call both: each method in a thread."""

    def __init__(self, client: ServiceClient) -> None:
        self.closing = client.closing
        self._client = client

    async def request(self, *args: Any, consume: Callable[..., Any] = httpx.Response.read, **asked: Any) -> httpx.Response:
        return await asyncio.to_thread(self._client.request, *args, consume=consume, **asked)

    async def stream(self, *args: Any, **asked: Any) -> AsyncIterator[str]:
        for line in await asyncio.to_thread(lambda: list(self._client.stream(*args, **asked))):
            yield line

    @asynccontextmanager
    async def keep_open(self) -> AsyncIterator[None]:
        with self._client.keep_open():
            yield

    async def close(self) -> None:
        self._client.close()


Client = InThreads | AsyncServiceClient


@pytest.fixture(params=["sync", "async"])
async def client(service: ScriptedService, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    made = InThreads(ServiceClient(service.url, "t")) if request.param == "sync" else AsyncServiceClient(service.url, "t")
    yield made
    await made.close()


def ask_sync(url: str, *args: Any, token: Any = "t", made: dict[str, Any] | None = None, **asked: Any) -> httpx.Response:
    client = ServiceClient(url, token, **(made or {}))
    try:
        return client.request(*args, **asked)
    finally:
        client.close()


def ask_async(url: str, *args: Any, token: Any = "t", made: dict[str, Any] | None = None, **asked: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with AsyncServiceClient(url, token, **(made or {})) as client:
            return await client.request(*args, **asked)

    return asyncio.run(run())


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param  # type: ignore[no-any-return]


def test_a_request_carries_its_token_type_parameters_and_body(service: ScriptedService, ask: Ask) -> None:
    service.script("POST /things", GOOD)
    answer = ask(service.url, "POST", "/things", token="key\n", body={"a": 1}, accept="text/plain", params={"of": "b c"})
    assert answer.json() == {"good": True}
    (request,) = service.received
    assert (request.body, request.headers["authorization"], request.headers["accept"]) == ({"a": 1}, "Bearer key", "text/plain")


def test_a_token_that_changes_is_asked_for_with_every_attempt(service: ScriptedService, ask: Ask) -> None:
    service.script("GET /things", error_answer(503, "", "", retry_after="0.1"), GOOD)
    tokens = iter(["old", "new"])
    ask(service.url, "GET", "/things", token=lambda: next(tokens))
    assert [request.headers["authorization"] for request in service.received] == ["Bearer old", "Bearer new"]


@pytest.mark.parametrize("client", [ServiceClient, AsyncServiceClient])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(client: Any) -> None:
    with pytest.raises(ValueError, match="a token is made of") as raised:
        client(AWAY, "sécret")
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, RequestRefused) for status in (400, 413, 422)),
        *((status, AuthenticationFailed) for status in (401, 403)),
        (404, ResourceNotFound),
        (409, ResourceConflict),
        (429, HeldBack),
        *((status, ServiceUnavailable) for status in (408, 502, 503, 504)),
        *((status, ServiceError) for status in (302, 418, 500)),
    ],
)
def test_each_status_is_an_error_that_names_the_request_and_quotes_the_service(
    service: ScriptedService, ask: Ask, status: int, kind: type[ServiceError]
) -> None:
    service.script("POST /things", error_answer(status, "odd", "it is odd", retry_after="7"))
    with pytest.raises(ServiceError) as raised:
        ask(service.url, "POST", "/things", retry=ONCE)
    error = raised.value
    assert type(error) is kind
    assert str(error) == f"POST {service.url}/things: {status} it is odd"
    assert (error.status, error.code, error.reason, error.retry_after_seconds) == (status, "odd", "it is odd", 7.0)
    assert error.lost == (status in (408, 502, 503, 504)), "a gateway may have given up on what the service did"


@pytest.mark.parametrize("content", [b"<html>busy</html>", b'{"error": "busy"}', b'[{"error": {}}]', b""])
def test_an_error_of_something_else_is_quoted_as_it_is(service: ScriptedService, ask: Ask, content: bytes) -> None:
    service.script("GET /things", Answer(500, content))
    with pytest.raises(ServiceError) as raised:
        ask(service.url, "GET", "/things")
    assert str(raised.value) == f"GET {service.url}/things: 500 {content.decode()}".rstrip()
    assert (raised.value.code, raised.value.reason) == ("", "")


@pytest.mark.parametrize("status", [408, 502, 503, 504])
def test_what_may_pass_is_retried(service: ScriptedService, ask: Ask, status: int) -> None:
    service.script("GET /things", error_answer(status, "", ""), Answer(drop=True), GOOD)
    assert ask(service.url, "GET", "/things").json() == {"good": True}
    assert len(service.received) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 409, 429, 500])
def test_what_cannot_pass_is_told_at_once(service: ScriptedService, ask: Ask, status: int) -> None:
    service.script("GET /things", error_answer(status, "", ""), GOOD)
    with pytest.raises(ServiceError):
        ask(service.url, "GET", "/things")
    assert len(service.received) == 1


def test_whoever_is_patient_waits_while_requests_are_held_back(service: ScriptedService, ask: Ask) -> None:
    held = error_answer(429, "backpressure", "trainers are behind", retry_after="0.1")
    service.script("POST /things", held, held, GOOD)
    ask(service.url, "POST", "/things", retry=PATIENT, made={"retry_seconds": 0.05})
    assert len(service.received) == 3


def test_work_that_may_have_begun_is_not_begun_again(service: ScriptedService, ask: Ask) -> None:
    service.script("POST /things", error_answer(503, "", "", retry_after="0.1"), Answer(drop=True), GOOD)
    with pytest.raises(NoAnswer) as raised:
        ask(service.url, "POST", "/things", retry=NEVER_STARTED)
    assert (raised.value.lost, raised.value.attempts, raised.value.status) == (True, 2, None)
    assert len(service.received) == 2


def test_a_service_that_is_not_there_is_named_and_lost_nothing(ask: Ask) -> None:
    with pytest.raises(NoAnswer, match=rf"^GET {AWAY}/things: no answer: ") as raised:
        ask(AWAY, "GET", "/things", made={"retry_seconds": 0.01})
    assert not raised.value.lost


def test_an_answer_may_take_longer_than_the_usual_silence_where_the_request_says_so(service: ScriptedService, ask: Ask) -> None:
    service.script("GET /things", Answer(200, b"{}", delay_seconds=1.5))
    made = {"timeout_seconds": 0.5, "retry_seconds": 0.0}
    assert ask(service.url, "GET", "/things", answer_seconds=60.0, made=made).json() == {}
    with pytest.raises(NoAnswer) as raised:
        ask(service.url, "GET", "/things", made=made)
    assert raised.value.lost


@pytest.mark.parametrize("body", [{"reward": math.nan}, {"text": "\ud800"}])
def test_a_body_that_cannot_be_written_is_refused_without_being_sent(ask: Ask, body: Any) -> None:
    with pytest.raises(RequestRefused, match="cannot be written as JSON"):
        ask(AWAY, "POST", "/things", body=body)


def test_retry_after_may_be_a_date(service: ScriptedService, ask: Ask) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=40), usegmt=True)
    service.script("GET /things", error_answer(503, "", "", retry_after=date))
    with pytest.raises(ServiceUnavailable) as raised:
        ask(service.url, "GET", "/things", made={"retry_seconds": 5.0})
    assert 20 < (raised.value.retry_after_seconds or 0) <= 40
    assert len(service.received) == 1, "the wait would outlast the time for retries"


# Streams, answers read as they arrive, closing


async def test_the_lines_of_a_stream_arrive_whole_whatever_is_in_them(service: ScriptedService, client: Client) -> None:
    lines = [json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False), "", "end"]
    service.script("POST /lines", Answer(200, "\n".join(lines).encode()))
    assert [line async for line in client.stream("POST", "/lines", silence_seconds=30, body={})] == lines
    service.script("POST /lines", error_answer(409, "conflict", "not now"), GOOD)
    with pytest.raises(ResourceConflict, match="not now"):
        [line async for line in client.stream("POST", "/lines", silence_seconds=30)]


async def test_an_answer_that_breaks_off_is_read_again_from_its_beginning(service: ScriptedService, client: Client) -> None:
    service.script("GET /long", Answer(200, b"half", cut=True), Answer(200, b"whole"))
    read: list[bytes] = []

    async def collect(response: httpx.Response) -> None:
        async for piece in response.aiter_bytes():
            read.append(piece)

    consume: Any = (lambda response: read.extend(response.iter_bytes())) if isinstance(client, InThreads) else collect
    await client.request("GET", "/long", consume=consume)
    assert read == [b"half", b"whole"]


async def test_a_closed_client_lets_requests_in_flight_end_and_takes_no_others(
    service: ScriptedService, client: Client
) -> None:
    service.script("GET /things", GOOD)
    async with client.keep_open():
        await client.close()
        assert (await client.request("GET", "/things")).json() == {"good": True}
    with pytest.raises(ClientClosed):
        await client.request("GET", "/things")


async def test_closing_ends_the_wait_for_another_attempt(service: ScriptedService, client: Client) -> None:
    service.script("GET /things", error_answer(503, "", "", retry_after="50"))
    asking = asyncio.create_task(client.request("GET", "/things", until=client.closing.is_set))
    await asyncio.to_thread(service.wait_for, lambda: len(service.received) == 1)
    await client.close()
    with pytest.raises(ServiceUnavailable):
        await asking
    assert len(service.received) <= 2


async def test_nothing_is_retried_that_nobody_waits_for(service: ScriptedService, client: Client) -> None:
    service.script("GET /things", error_answer(503, "", "", retry_after="0.1"), GOOD)
    with pytest.raises(ServiceUnavailable):
        await client.request("GET", "/things", until=lambda: True)
    assert len(service.received) == 1


# The core


def failing(status: int | None, after: float | None) -> ServiceError:
    kind = NoAnswer if status is None else {429: HeldBack, 409: ResourceConflict}.get(status, ServiceUnavailable)
    return kind("it failed", status=status, retry_after_seconds=after)


ERRORS = st.tuples(st.sampled_from([None, 409, 429, 502, 503]), st.none() | st.floats(0, 1e6))


@given(
    st.lists(ERRORS, max_size=30),
    st.lists(st.floats(0, 300), min_size=30, max_size=30),
    st.sampled_from([TRANSIENT, PATIENT, NEVER_STARTED, ONCE]),
    st.floats(0, 500),
)
def test_attempts_end_in_time_and_after_an_error_that_cannot_pass(
    errors: list[tuple[int | None, float | None]], takes: list[float], rule: RetryRule, retry_seconds: float
) -> None:
    """Whatever fails, and however long each attempt takes: from the first failure since a request was last held back to the beginning of
    the last attempt is less than `retry_seconds`."""
    now, begun = 0.0, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("contract.client.time.monotonic", lambda: now)
        attempts = Attempts(rule, retry_seconds)
        for count, ((status, after), seconds) in enumerate(zip(errors, takes, strict=False), 1):
            now += seconds
            error = failing(status, after)
            held = rule.waits and status == 429
            if held:
                begun = None
            elif begun is None:
                begun = now
            try:
                pause = attempts.pause_after(error)
            except ServiceError as raised:
                assert raised is error and error.attempts == count
                return
            assert held or rule.may_pass(error)
            assert 0 <= pause <= 60
            now += pause
            assert begun is None or now - begun < retry_seconds


def test_a_failure_after_a_long_hold_is_a_new_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a session held back for an hour is given up when the service restarts, if it had restarted before, too."""
    now = iter([0.0, 3600.0])
    monkeypatch.setattr("contract.client.time.monotonic", lambda: next(now))
    attempts = Attempts(PATIENT, 120.0)
    assert attempts.pause_after(failing(503, 1.0)) == 1.0
    assert attempts.pause_after(failing(429, 60.0)) == 60.0
    assert attempts.pause_after(failing(503, 1.0)) == 1.0
