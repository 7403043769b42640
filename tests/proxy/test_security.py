"""Who gets in and who does not: every endpoint for every kind of caller, bodies made to break the service, paths made to escape."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from proxy.app import create_app
from proxy.call.http import Routes
from proxy.dialects.catalogue import dialects
from proxy.dialects.fields import MAX_DEPTH
from proxy.settings import Settings
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, NODE, TRAINER, RunningService, Session, wait_until
from tests.support.service.ui_sessions import PAGES
from tests.support.sessions.questions import QUESTIONS

LIMIT = 300_000
CALLERS = ("admin", "trainer", "node", "session", "other session", "wrong", "malformed", "missing")

CONTROL = {
    ("GET", "/openapi.json"): "anyone",
    ("GET", "/healthz"): "anyone",
    ("GET", "/readyz"): "anyone",
    ("GET", "/metrics"): "anyone",
    ("POST", "/sessions"): "admin",
    ("GET", "/sessions"): "admin",
    ("GET", "/sessions/{session_id}"): "admin",
    ("DELETE", "/sessions/{session_id}"): "admin",
    ("GET", "/sessions/{session_id}/calls"): "admin",
    ("GET", "/sessions/{session_id}/trajectories"): "admin",
    ("GET", "/sessions/{session_id}/media/{digest}"): "trainer",
    ("POST", "/sessions/{session_id}/reward"): "admin",
    ("POST", "/sessions/{session_id}/close"): "admin",
    ("PUT", "/sessions/{session_id}/log"): "admin",
    ("PUT", "/sessions/{session_id}/review"): "admin",
    ("GET", "/sessions/{session_id}/trace_entries"): "admin",
    ("GET", "/sessions/{session_id}/scores"): "admin",
    ("POST", "/sessions/{session_id}/scores"): "admin",
    ("POST", "/sessions/{session_id}/feedback"): "admin",
    ("GET", "/sessions/{session_id}/records"): "admin",
    ("POST", "/sessions/{session_id}/records"): "admin",
    ("POST", "/projects"): "admin",
    ("GET", "/projects"): "admin",
    ("DELETE", "/projects/{project}"): "admin",
    ("POST", "/projects/{project}/secrets"): "admin",
    ("PUT", "/projects/{project}/rollouts/{name}"): "admin",
    ("GET", "/groups"): "admin",
    ("GET", "/groups/{group_id:path}"): "admin",
    ("GET", "/batches/dead"): "admin",
    ("POST", "/batches/dead/{group:path}/retry"): "admin",
    ("DELETE", "/batches/dead/{group:path}"): "admin",
    ("GET", "/batches"): "trainer",
    ("POST", "/batches/lease"): "trainer",
    ("POST", "/batches/{lease_id}/ack"): "trainer",
    ("POST", "/batches/{lease_id}/nack"): "trainer",
    ("POST", "/batches/{lease_id}/extend"): "trainer",
    ("POST", "/weights"): "trainer",
    ("GET", "/weights"): "trainer",
    ("GET", "/weights/group"): "trainer",
    ("POST", "/weights/group"): "trainer",
    ("GET", "/run"): "trainer",
    ("GET", "/runs"): "trainer",
    ("GET", "/runs/{run}"): "trainer",
    ("PATCH", "/runs/{run}"): "trainer",
    ("GET", "/engines"): "admin",
    ("POST", "/engines"): "admin",
    ("DELETE", "/engines/{name:path}"): "admin",
}
"""Every endpoint of the control side and who may call it. A new one has to be entered here."""

PLACES = ("{session_id}", "{project}", "{name}", "{digest}", "{lease_id}", "{group:path}", "{group_id:path}", "{name:path}")

BODILESS = {"/batches/{lease_id}/ack", "/batches/{lease_id}/nack", "/batches/dead/{group:path}/retry"}
"""Endpoints that take POST and read no body."""

HARNESS = {
    ("POST", "chat", "call"): "/v1/chat/completions",
    ("POST", "responses", "call"): "/v1/responses",
    ("POST", "messages", "call"): "/v1/messages",
    ("POST", "gemini", "call"): "/v1beta/models/policy:generateContent",
    ("POST", "completions", "call"): "/v1/completions",
    ("POST", "messages", "count"): "/v1/messages/count_tokens",
    ("POST", "responses", "count"): "/v1/responses/input_tokens",
    ("POST", "gemini", "count"): "/v1beta/models/policy:countTokens",
    ("GET", "responses", "stored"): "/v1/responses/resp_unknown",
    ("GET", "responses", "items"): "/v1/responses/resp_unknown/input_items",
    ("GET", "chat", "models"): "/v1/models",
    ("GET", "chat", "model"): "/v1/models/policy",
    ("GET", "gemini", "models"): "/v1beta/models",
    ("GET", "gemini", "model"): "/v1beta/models/policy",
}
"""A path of every endpoint of the harness side; all of them take the session's own key and no other secret."""

HISTORY = {"chat": "messages", "messages": "messages", "responses": "input", "gemini": "contents", "completions": "prompt"}
BODIES = {dialect: body for dialect, (_, body) in QUESTIONS.items()}


@dataclass(frozen=True)
class Running:
    engine: ScriptedEngine
    service: RunningService


@pytest.fixture(scope="module")
def running(redis_server: RedisServer) -> Iterator[Running]:
    redis_server.flushall()
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_server.url, max_body_bytes=LIMIT, weights_roots=["/srv/weights"]) as service,
    ):
        yield Running(engine, service)


@pytest.fixture
def service(running: Running) -> RunningService:
    running.engine.reset()
    return running.service


@pytest.fixture
def session(service: RunningService) -> Session:
    return service.session()


def secret_of(caller: str, session: Session, other: Session) -> str | None:
    return {
        "admin": ADMIN,
        "trainer": TRAINER,
        "node": NODE,
        "session": session.api_key,
        "other session": other.api_key,
        "wrong": f"vb-{'0' * 40}-{session.session_id}",
        "malformed": "vb-no key at all",
        "missing": None,
    }[caller]


def carriers(secret: str | None) -> list[tuple[dict[str, str], dict[str, str]]]:
    """(headers, query) for every place where a harness may send its key."""
    if secret is None:
        return [({}, {})]
    headers = [{"Authorization": f"Bearer {secret}"}, {"x-api-key": secret}, {"x-goog-api-key": secret}, {"api-key": secret}]
    return [*((header, {}) for header in headers), ({}, {"key": secret})]


def ask(service: RunningService, method: str, path: str, *, headers: dict[str, str], **more: Any) -> httpx.Response:
    return plain_http.request(method, service.url + path, headers=headers, **more)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def endpoints_of(app: Any) -> set[tuple[str, str]]:
    """(method, path) of all routes, those of routers included. HEAD is GET without its body."""
    found = set()
    for route in app.routes:
        for method in (getattr(route, "methods", None) or {"*"}) - {"HEAD"}:
            found.add((method, route.path))
    return found


# Every endpoint, every caller


def test_every_endpoint_there_is_has_an_entry_here() -> None:
    app = create_app(Settings(redis="redis://127.0.0.1:1"))
    assert endpoints_of(app._control) == {*CONTROL, *PAGES}
    table = Routes(dialects().values())
    plain = [each for each in table.entries if each.endpoint.header is None]
    assert {(each.endpoint.method, each.dialect, each.endpoint.action) for each in plain} == set(HARNESS)
    for (method, dialect, action), path in HARNESS.items():
        route = table.find(method, path, {})
        assert (route.dialect, route.action) == (dialect, action)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("endpoint", CONTROL, ids=" ".join)
def test_the_control_side_opens_to_its_role_alone(service: RunningService, endpoint: tuple[str, str], caller: str) -> None:
    session, other = service.session(), service.session()
    needed, secret = CONTROL[endpoint], secret_of(caller, session, other)
    allowed = needed == "anyone" or caller == "admin" or caller == needed
    refusal = 401 if caller in ("malformed", "missing") else 403
    path = endpoint[1]
    for place in PLACES:
        path = path.replace(place, "nowhere")
    for headers, query in carriers(secret):
        answer = ask(service, endpoint[0], path, headers=headers, params=query)
        assert answer.status_code < 500, answer.text
        if allowed and (not query or needed == "anyone"):
            assert answer.status_code not in (401, 403), answer.text
        else:
            # A token in the URL would be in every log on its way, and opens nothing.
            assert answer.status_code == (401 if query else refusal), answer.text
            assert set(answer.json()) == {"error"}
        if secret is not None:
            assert secret not in answer.text


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("endpoint", HARNESS, ids="-".join)
def test_the_harness_side_opens_to_the_sessions_own_key_alone(
    running: Running, service: RunningService, endpoint: tuple[str, str, str], caller: str
) -> None:
    session, other = service.session(), service.session()
    method, dialect, action = endpoint
    body = BODIES[dialect] if method == "POST" else None
    for headers, query in carriers(secret_of(caller, session, other)):
        path = f"/s/{session.session_id}{HARNESS[endpoint]}"
        answer = ask(service, method, path, headers=headers, params=query, json=body)
        if caller == "session":
            assert answer.status_code == (404 if action in ("stored", "items") else 200), answer.text
        else:
            assert answer.status_code == 401, answer.text
            assert answer.json()["error"]["message"]
    assert len(session.calls) == (5 if caller == "session" and action == "call" else 0)
    assert other.calls == []
    if caller != "session":
        assert running.engine.generations == []


@pytest.mark.parametrize("endpoint", HARNESS, ids="-".join)
def test_a_key_opens_nothing_any_more_when_its_session_is_closed_or_deleted(
    running: Running, service: RunningService, endpoint: tuple[str, str, str]
) -> None:
    method, dialect, _ = endpoint
    session = service.session()
    session.ask("q")
    asked = len(running.engine.generations)

    def answer() -> httpx.Response:
        return session.request(method, HARNESS[endpoint], json=BODIES[dialect] if method == "POST" else None)

    session.close()
    assert answer().status_code == 409
    assert len(session.calls) == 1
    assert service.request("DELETE", f"/sessions/{session.session_id}").status_code == 204
    assert answer().status_code == 404
    assert len(running.engine.generations) == asked


def test_a_session_of_the_same_name_has_another_key_also_where_the_first_is_in_memory(
    running: Running, service: RunningService, redis_server: RedisServer
) -> None:
    """Two processes: one has the first session in memory, the other deletes it and opens another one of its name."""
    with RunningService(running.engine.url, redis_server.url) as elsewhere:
        first = service.session(session_id="again")
        first.ask("q")
        assert elsewhere.request("DELETE", "/sessions/again").status_code == 204
        second = elsewhere.session(session_id="again")
        for path in ("/v1/models", "/v1/chat/completions"):
            asked: Any = ("POST", path, BODIES["chat"]) if "chat" in path else ("GET", path, None)
            for session, statuses in ((first, (401, 404)), (second, (200,)), (first, (401,))):
                assert session.request(*asked[:2], at=service, json=asked[2]).status_code in statuses
        assert len(second.calls) == 1


def test_a_wrong_key_makes_the_service_read_nothing_of_the_session(
    service: RunningService, running: Running, redis_server: RedisServer
) -> None:
    session = service.session()
    session.ask("q")
    with RunningService(running.engine.url, redis_server.url) as fresh, redis_server.client() as client:
        client.config_resetstat()
        answer = ask(fresh, "GET", f"/s/{session.session_id}/v1/models", headers=bearer(f"vb-{'0' * 40}-{session.session_id}"))
        assert answer.status_code == 401
        assert "cmdstat_lrange" not in client.info("commandstats")


@pytest.mark.parametrize("second", ["the key", "another"])
@pytest.mark.parametrize("name", ["authorization", "Authorization", "x-api-key", "x-goog-api-key", "api-key"])
def test_a_secret_that_is_sent_twice_is_refused_by_both_sides(
    running: Running, service: RunningService, session: Session, name: str, second: str
) -> None:
    """The last one counted: a gateway that had checked the first let the other through."""
    for url, key in ((f"{session.base_url}/chat/completions", session.api_key), (f"{service.url}/sessions", ADMIN)):
        prefix = "Bearer " if name.lower() == "authorization" else ""
        headers = [(name, prefix + (key if second == "the key" else "vb-other")), (name.lower(), prefix + key)]
        refused = plain_http.post(
            url, headers=headers, json={"model": "policy", "messages": [{"role": "user", "content": "q"}]}
        )
        assert refused.status_code == 400 and f"has 2 {name.lower()} headers" in refused.text
    assert session.calls == []


def test_a_key_that_the_url_says_twice_is_refused(service: RunningService, session: Session) -> None:
    url = f"{session.base_url}/chat/completions?key=vb-other&key={session.api_key}"
    refused = plain_http.post(url, json={"model": "policy", "messages": [{"role": "user", "content": "q"}]})
    assert refused.status_code == 400 and "several key=" in refused.text


def test_what_one_session_was_answered_is_not_another_sessions_to_read(running: Running, service: RunningService) -> None:
    running.engine.say("the secret of the first")
    first, second = service.session(), service.session()
    reply = first.post("/v1/responses", BODIES["responses"]).json()["id"]
    assert "the secret" in first.request("GET", f"/v1/responses/{reply}").text
    for path in (f"/v1/responses/{reply}", f"/v1/responses/{reply}/input_items"):
        answer = second.request("GET", path)
        assert answer.status_code == 404 and "the secret" not in answer.text
    for path in (
        f"/s/{first.session_id}/v1/responses/{reply}",
        f"/s/{second.session_id}/../{first.session_id}/v1/responses/{reply}",
        f"/s/{second.session_id}%2F..%2F{first.session_id}/v1/responses/{reply}",
        f"/s/{second.session_id}/v1/responses/..%2F..%2F..%2F{first.session_id}%2Fv1%2Fresponses%2F{reply}",
    ):
        answer = raw_path(service, "GET", path, second.api_key)
        assert answer.status_code in (401, 404) and "the secret" not in answer.text
    going_on = {**BODIES["responses"], "previous_response_id": reply}
    answer = second.post("/v1/responses", going_on)
    assert answer.status_code in (400, 404) and "the secret" not in answer.text
    assert second.calls == []


def raw_path(service: RunningService, method: str, path: str, secret: str, body: Any = None) -> httpx.Response:
    """The path goes out as it is written, without a client's tidying."""
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=120)
    with contextlib.closing(connection):
        content = json.dumps(body).encode() if body is not None else None
        connection.request(method, path, content, bearer(secret))
        answer = connection.getresponse()
        return httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read())


ESCAPES = [
    "..",
    ".",
    "%2e%2e",
    "..%2f..",
    "%2e%2e%2fsessions",
    "%00",
    "%0d%0aSet-Cookie:%20a=b",
    "%7d:state",
    "%ff",
    "%c0%ae",
    "%25",
    "a%2fb",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_a_name_in_a_path_is_a_name_and_leads_nowhere(service: RunningService, session: Session, name: str) -> None:
    for (method, path), role in CONTROL.items():
        if role == "anyone" or "{" not in path:
            continue
        body = {"status": "completed", "reward": 1} if method == "POST" else None
        for place in PLACES:
            path = path.replace(place, name)
        answer = raw_path(service, method, path, ADMIN, body)
        assert answer.status_code in (200, 307, 400, 404, 405), (path, answer.text)
        assert "set-cookie" not in answer.headers
        assert answer.status_code != 200 or set(answer.json()) & {"sessions", "groups", "dead_letters"}
    for (method, dialect, action), path in HARNESS.items():
        named = (f"/s/{name}{path}", f"/s/{session.session_id}{path.replace('policy', name).replace('resp_unknown', name)}")
        for place in named:
            answer = raw_path(service, method, place, session.api_key, BODIES[dialect] if method == "POST" else None)
            assert answer.status_code < 500, (place, answer.text)
            assert "set-cookie" not in answer.headers
            assert place != named[0] or answer.status_code in (401, 404, 405), (place, action, answer.text)
    assert service.request("GET", f"/sessions/{session.session_id}").json()["status"] == "open"


@pytest.mark.parametrize("session_id", ["..", ".", "a/b", "a b", "", "x" * 129, "a\r\nb", "}:state", "ä", "\0"])
def test_a_session_of_a_name_that_no_path_carries_is_not_opened(service: RunningService, session_id: str) -> None:
    assert service.request("POST", "/sessions", json={"session_id": session_id}).status_code == 400


# Bodies


def posts() -> list[str]:
    control = [path for (method, path), _ in CONTROL.items() if method == "POST" and path not in BODILESS]
    return [*control, *("/s/{session_id}" + path for (method, _, _), path in HARNESS.items() if method == "POST")]


def send(service: RunningService, path: str, content: bytes, session: Session) -> httpx.Response:
    """As somebody who may call the endpoint."""
    secret = session.api_key if path.startswith("/s/") else ADMIN
    path = path.replace("{session_id}", session.session_id).replace("{lease_id}", "nowhere")
    headers = {**bearer(secret), "content-type": "application/json"}
    return plain_http.post(service.url + path, content=content, headers=headers, timeout=60)


@pytest.mark.parametrize("path", posts())
def test_a_body_beyond_the_limit_is_refused_by_every_endpoint_that_reads_one(
    service: RunningService, session: Session, path: str
) -> None:
    answer = send(service, path, b'{"a": "' + b"x" * LIMIT + b'"}', session)
    assert answer.status_code == 413, answer.text
    assert str(LIMIT) in answer.text


def nested(depth: int) -> list[bytes]:
    """JSON so deep: of lists, of objects, of both, and of what is never closed."""
    lists = b"[" * depth + b"]" * depth
    objects = b'{"a":' * depth + b"1" + b"}" * depth
    both = b'[{"[{":' * (depth // 2 + 1) + b"1" + b"}]" * (depth // 2 + 1)
    return [lists, objects, both, b"[" * depth]


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 990, 20_000])
@pytest.mark.parametrize("path", posts())
def test_a_deeply_nested_body_is_a_bad_request_to_every_endpoint(
    service: RunningService, session: Session, path: str, depth: int
) -> None:
    dialect = next((name for (_, name, _), place in HARNESS.items() if path.endswith(place)), None)
    for deep in nested(depth):
        contents = [deep, b'{"session_id": ' + deep + b"}", b'{"metadata": ' + deep + b"}"]
        if dialect is not None:
            plain = msgspec.json.encode(BODIES[dialect])[:-1]
            history = HISTORY[dialect].encode()
            contents = [
                deep,
                plain + b', "tools": [{"type": "function", "function": {"name": "f", "parameters": ' + deep + b"}}]}",
                b'{"model": "policy", "max_tokens": 4, "' + history + b'": ' + deep + b"}",
                b'{"model": "policy", "max_tokens": 4, "' + history + b'": [{"role": "user", "content": ' + deep + b"}]}",
            ]
        for content in contents:
            answer = send(service, path, content, session)
            assert answer.status_code in (400, 404), (content[:80], answer.status_code, answer.text[:300])
            assert "Traceback" not in answer.text
    assert service.request("GET", "/healthz").status_code == 200


@pytest.mark.parametrize("depth", [150, 990, 20_000])
@pytest.mark.parametrize("path", posts())
def test_depth_that_hides_behind_brackets_in_strings_does_no_harm(
    service: RunningService, session: Session, path: str, depth: int
) -> None:
    deep = b'{"]}]}]}":' * depth + b"1" + b"}" * depth
    for content in (deep, b'{"metadata": ' + deep + b', "tools": ' + deep + b"}"):
        assert send(service, path, content, session).status_code < 500
    assert service.request("GET", "/healthz").status_code == 200


def test_a_part_of_an_import_that_is_nested_deeply_is_a_bad_request(service: RunningService, session: Session) -> None:
    for deep in (b"\x91" * 5000 + b"\x01", b"\x81\xa1a" * 5000 + b"\x01", b"\xdd\xff\xff\xff\xff"):
        for content in (deep, b"\x81\xa7session" + deep, b"\x81\xa7intents\x91\x81\xa1a" + deep):
            assert send(service, "/sessions/{session_id}/records", content, session).status_code == 400


def test_a_tool_schema_of_ordinary_depth_is_taken(service: RunningService, session: Session) -> None:
    schema: dict[str, Any] = {"type": "string", "description": "[[[{{{" * 30}
    for _ in range(12):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "array", "items": {"type": "string"}}}}
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": schema}} for number in range(4)]
    assert session.ask("q", tools=tools, max_tokens=4).choices


@pytest.mark.parametrize("arguments", ["[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000])
def test_arguments_that_hold_deep_json_do_no_harm(running: Running, service: RunningService, arguments: str) -> None:
    """A model that repeats itself writes such a thing, and harnesses send it back. To this service it is text; an engine's template may
    fail on it."""
    session = service.session()
    call = {"id": "call_x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_x", "content": "done"},
    ]
    body = {"model": "policy", "messages": history, "max_tokens": 4}
    answer = session.post("/v1/chat/completions", body)
    assert answer.status_code in (200, 400, 502), answer.text[:300]
    assert session.ask("something else", max_tokens=4).choices
    assert service.request("GET", f"/sessions/{session.session_id}/trajectories").status_code == 200


def test_a_model_that_nests_its_arguments_without_end_is_recorded(running: Running, service: RunningService) -> None:
    deep = '{"a":' * 600 + "1" + "}" * 600
    running.engine.say(f'<tool_call>\n{{"name": "f", "arguments": {deep}}}\n</tool_call>')
    session = service.session()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    message = session.answer("q", tools=tools)
    (call,) = session.calls
    assert call["status"] == "finished" and message["tool_calls"]
    rows, accounting = session.trajectories()
    assert accounting["exported_tokens"] == len(call["completion_ids"]) and len(rows) == 1


# What is fetched and read


REMOTE = "http://127.0.0.1:9/picture.png"
PICTURES: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "policy",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": REMOTE}}]}],
    },
    "responses": {"model": "policy", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": REMOTE}]}]},
    "messages": {
        "model": "policy",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": REMOTE}}]}],
    },
    "gemini": {"contents": [{"role": "user", "parts": [{"fileData": {"mimeType": "image/png", "fileUri": REMOTE}}]}]},
}
OTHER_SPELLINGS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": REMOTE},
    {"image_url": REMOTE},
    {"type": "video_url", "video_url": {"url": "HTTPS://example.org/v"}},
    {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": " data:image/png;base64,AA=="}},
]


@pytest.mark.parametrize("api", ["token", "chat"])
def test_media_named_by_address_are_not_passed_on(redis_url: str, api: str) -> None:
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url, engine_api=api) as service:
        session = service.session()

        def answer(dialect: str, body: Any) -> httpx.Response:
            return session.post(HARNESS["POST", dialect, "call"], body)

        for dialect, body in PICTURES.items():
            refused = answer(dialect, body)
            assert refused.status_code == 400 and "send the bytes, as base64" in refused.text, dialect
        for part in OTHER_SPELLINGS:
            body = {"model": "policy", "messages": [{"role": "user", "content": [part]}]}
            refused = answer("chat", body)
            assert refused.status_code == 400, part
            assert REMOTE not in refused.text
        assert engine.generations == [] and session.calls == []


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_an_engine_is_not_told_of_another_engine_to_fetch_from(running: Running, service: RunningService, dialect: str) -> None:
    session = service.session()
    body = {**BODIES[dialect], "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}}
    answer = session.post(HARNESS["POST", dialect, "call"], body)
    assert answer.status_code == 400 and "kv_transfer_params" in answer.text
    assert running.engine.generations == []


def test_weights_come_from_the_folders_named_and_no_links_lead_out(redis_url: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "weights", tmp_path / "outside"
    (root / "v1").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "v1")
    paths = [outside, root / ".." / "outside", root / "link", root / "link" / "deeper", f"{root}-else", "/", "relative"]
    texts = [
        *map(str, paths),
        f"{root}/v1/../../outside",
        f"{root}/v1/..",
        f"{root}/\0",
        f"file://{root}/v1",
        "https://e.org/w",
    ]
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url, weights_roots=[root]) as service:
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 120, "ready")
        for path in texts:
            answer = service.request("POST", "/weights", TRAINER, json={"version": 1, "path": path})
            assert answer.status_code == 400, (path, answer.text)
        assert service.request("GET", "/weights", TRAINER).json()["current"]["version"] == 0
        pushed = service.request("POST", "/weights", TRAINER, json={"version": 1, "path": str(root / "inner")})
        assert pushed.status_code == 200, pushed.text


# Calls at one time


def test_calls_beyond_the_limits_wait_their_turn_in_the_dialects_shape(redis_url: str) -> None:
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, redis_url, call_limits={"at_once": 3, "per_session": 2}) as service,
        ThreadPoolExecutor(4) as pool,
    ):
        gate = threading.Event()
        engine.script = lambda generation, index: Say("hello", gate=gate, gate_after=0)
        first, second, third = service.session(), service.session(), service.session()
        held = [pool.submit(first.ask, "q") for _ in range(2)]
        engine.wait_for(lambda: len(engine.generations) == 2)
        for dialect, body in BODIES.items():
            refused = first.post(HARNESS["POST", dialect, "call"], body)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert said(dialect, refused.json()) == RATE_LIMITED[dialect]
        held.append(pool.submit(second.ask, "q"))
        engine.wait_for(lambda: len(engine.generations) == 3)
        full = third.post("/v1/chat/completions", BODIES["chat"])
        assert full.status_code == 429 and "this process" in full.json()["error"]["message"]
        gate.set()
        assert [call.result().choices[0].message.content for call in held] == ["hello"] * 3
        assert first.ask("again").choices and third.ask("at last").choices
        assert len(first.calls) == 3


RATE_LIMITED = {
    "chat": "too_many_calls",
    "responses": "too_many_calls",
    "completions": "too_many_calls",
    "messages": "rate_limit_error",
    "gemini": "RESOURCE_EXHAUSTED",
}


def said(dialect: str, body: dict[str, Any]) -> str:
    """By what the vendor's clients know the error."""
    return str(body["error"][{"messages": "type", "gemini": "status"}.get(dialect, "code")])


# Open to this machine


def test_an_open_service_needs_no_secret_from_programs_and_gives_web_pages_nothing(redis_url: str) -> None:
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url, open=True) as service:
        made = plain_http.post(f"{service.url}/sessions", json={"session_id": "first"})
        assert made.status_code == 201
        url = f"{service.url}/s/first/v1/chat/completions"
        for headers in ({}, bearer("sk-anything"), bearer(made.json()["api_key"])):
            assert plain_http.post(url, json=BODIES["chat"], headers=headers).status_code == 200
        page = {"origin": "https://evil.example"}
        rebound = {"host": "evil.example:8700"}
        for headers in (page, rebound):
            assert plain_http.post(url, json=BODIES["chat"], headers=headers).status_code == 403
            assert plain_http.post(f"{service.url}/sessions", content=json.dumps({}), headers=headers).status_code == 403
            assert plain_http.get(f"{service.url}/weights", headers=headers).status_code == 403
            own = {**headers, **bearer(made.json()["api_key"])}
            assert plain_http.post(url, json=BODIES["chat"], headers=own).status_code == 200
        assert plain_http.post(f"{service.url}/v1/chat/completions", json=BODIES["chat"]).status_code == 401
        other = plain_http.post(f"{service.url}/sessions", json={}).json()
        assert plain_http.post(url, json=BODIES["chat"], headers=bearer(other["api_key"])).status_code == 401
