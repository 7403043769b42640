"""Routes: exact paths, each dialect's own shape for what goes wrong, and what clients knock at before their first call."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proxy.call.http import MethodNotAllowed, Routes
from proxy.dialects.catalogue import dialects
from proxy.errors import NotFound
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session

ROUTES = Routes(dialects().values())

CALLS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1beta/models/policy:generateContent": "gemini",
    "/v1/models/policy:streamGenerateContent": "gemini",
    "/v1alpha/models/org/policy:generateContent": "gemini",
}


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_server.url) as service:
        yield service


@pytest.fixture
def session(service: RunningService) -> Session:
    return service.session()


def root_of(session: Session) -> str:
    return session.base_url.removesuffix("/v1")


def ask(session: Session, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {session.api_key}", **more.pop("headers", {})}
    return plain_http.request(method, root_of(session) + path, headers=headers, **more)


@pytest.mark.parametrize("prefix", ["", "/s/one"])
@pytest.mark.parametrize("path", CALLS)
def test_a_call_goes_to_the_dialect_of_its_path(path: str, prefix: str) -> None:
    route = ROUTES.find("POST", prefix + path, {})
    assert (route.dialect, route.action, route.session) == (CALLS[path], "call", "one" if prefix else None)
    assert ROUTES.is_harness("POST", prefix + path)


@pytest.mark.parametrize("prefix", ["", "/s/one"])
@pytest.mark.parametrize("path", CALLS)
def test_a_base_url_of_another_kind_and_a_slash_at_the_end_lead_to_the_same_endpoint(path: str, prefix: str) -> None:
    """OpenAI's base URLs end in /v1 and Anthropic's do not: a client that is given the other says it twice or not at all."""
    wanted = ROUTES.find("POST", path, {})
    written = [f"/v1{path}", f"{path}/"]
    if path.startswith("/v1/"):
        written += [path.removeprefix("/v1"), path.removeprefix("/v1") + "/"]
    for other in written:
        route = ROUTES.find("POST", prefix + other, {})
        assert (route.dialect, route.action, route.path) == (wanted.dialect, "call", wanted.path), other
        assert ROUTES.guess_dialect(prefix + other) == (CALLS[path] if CALLS[path] != "completions" else "chat")
        assert prefix == "" or ROUTES.is_harness("POST", prefix + other)
    for other in (f"/v1/v1{path}", f"{path}//", f"/v2{path}", f"{path}/more/of/it"):
        with pytest.raises(NotFound):
            ROUTES.find("POST", prefix + other, {})


def test_a_client_with_a_base_url_of_another_kind_is_answered(session: Session) -> None:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
    for path in ("/v1/v1/chat/completions", "/chat/completions", "/v1/chat/completions/", "/v1/v1/messages", "/messages/"):
        assert ask(session, "POST", path, json=asked).status_code == 200, path
    assert [call["dialect"] for call in session.calls] == ["chat", "chat", "chat", "messages", "messages"]
    for path in ("/models", "/v1/models/", "/models/policy/"):
        assert ask(session, "GET", path).status_code == 200, path


def test_a_client_of_azure_is_let_in_by_its_header(session: Session, service: RunningService) -> None:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
    for key, status in ((session.api_key, 200), ("vb-no", 401)):
        answer = plain_http.post(f"{service.url}/chat/completions", json=asked, headers={"api-key": key})
        assert answer.status_code == status, answer.text


def test_the_input_of_a_response_is_counted_and_nothing_is_recorded(session: Session) -> None:
    counted = session.client.responses.input_tokens.count(model="policy", input="hello")
    assert counted.object == "response.input_tokens" and session.calls == []
    answer = session.client.responses.create(model="policy", input="hello", max_output_tokens=5)
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_google_path_names_model_and_method() -> None:
    assert ROUTES.find("POST", "/v1beta/models/org/m-1:streamGenerateContent", {}).path == {
        "model": "org/m-1",
        "method": "streamGenerateContent",
    }


@pytest.mark.parametrize(
    ("path", "dialect", "action"),
    [
        ("/v1/messages/count_tokens", "messages", "count"),
        ("/v1/models/policy:countTokens", "gemini", "count"),
        ("/v1beta/models/policy:countTokens", "gemini", "count"),
    ],
)
def test_tokens_are_counted_in_the_dialects_that_have_a_word_for_it(path: str, dialect: str, action: str) -> None:
    route = ROUTES.find("POST", path, {})
    assert (route.dialect, route.action) == (dialect, action)


def test_the_list_of_models_has_the_shape_of_the_client_that_asks() -> None:
    assert ROUTES.find("GET", "/v1/models", {}).dialect == "chat"
    assert ROUTES.find("GET", "/v1/models", {"anthropic-version": "2023-06-01"}).dialect == "messages"
    assert ROUTES.find("GET", "/v1beta/models", {}).dialect == "gemini"
    assert ROUTES.find("GET", "/v1/models/org/m", {}).path == {"model": "org/m"}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions//", "/v1/chat", "/v1//messages", "/v1/embeddings", "/v1beta/models/m:embed"]
)
def test_a_path_that_is_not_listed_is_no_endpoint(path: str) -> None:
    with pytest.raises(NotFound):
        ROUTES.find("POST", path, {})


def test_another_method_is_named_as_such() -> None:
    with pytest.raises(MethodNotAllowed, match="takes POST, not GET"):
        ROUTES.find("GET", "/v1/messages", {})


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/s/a/v1/messages/batches", "messages"),
        ("/s/a/v1beta/cachedContents", "gemini"),
        ("/v1/models/m:embedContent", "gemini"),
        ("/v1/responses/r/cancel", "responses"),
        ("/v1/files", "chat"),
    ],
)
def test_an_unknown_path_is_refused_in_the_dialect_it_looks_like(path: str, dialect: str) -> None:
    assert ROUTES.guess_dialect(path) == dialect


@pytest.mark.parametrize("path", ["/sessions", "/batches/lease", "/healthz", "/v2/x", "/api/other", "/sx/v1"])
def test_the_control_side_keeps_its_own_paths(path: str) -> None:
    assert not ROUTES.is_harness("GET", path)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/api/hello", "/v1/messages", "/v1/models"])
def test_a_head_probe_is_answered_without_a_key_and_without_a_body(session: Session, path: str) -> None:
    answer = plain_http.head(root_of(session) + path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_head_probe_at_an_unknown_path_is_404(session: Session) -> None:
    assert plain_http.head(root_of(session) + "/v1/nothing").status_code == 404


def test_an_upgrade_to_websocket_is_answered_426_at_once(session: Session) -> None:
    upgrade = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13", "sec-websocket-key": "eA=="}
    answer = ask(session, "GET", "/v1/responses", headers=upgrade)
    assert answer.status_code == 426
    assert answer.json()["error"]["code"] == "upgrade_refused"


SHAPES = {
    "/v1/nothing": lambda body: body["error"]["code"] == "not_found",
    "/v1/responses/x/cancel": lambda body: body["error"]["code"] == "not_found",
    "/v1/messages/batches": lambda body: body["type"] == "error" and body["error"]["type"] == "not_found_error",
    "/v1beta/files": lambda body: body["error"]["status"] == "NOT_FOUND" and body["error"]["code"] == 404,
}


@pytest.mark.parametrize("path", SHAPES)
def test_an_unknown_endpoint_is_404_in_the_dialects_shape_and_logged(
    session: Session, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "proxy.call.door"):
        answer = ask(session, "POST", path, json={})
    assert answer.status_code == 404
    assert SHAPES[path](answer.json())
    assert any(path in record.getMessage() and "404" in record.getMessage() for record in caplog.records)
    assert session.calls == []


def test_every_refusal_says_whether_to_ask_again(session: Session) -> None:
    session.close("cancelled")
    for path in CALLS:
        body = {"model": "policy", "messages": [], "input": "", "prompt": "", "contents": []}
        answer = ask(session, "POST", path, content=json.dumps(body))
        assert answer.headers["x-should-retry"] == "false", path


def test_a_model_is_looked_up_by_name_in_each_shape(session: Session) -> None:
    for path, headers in (("/v1", {}), ("/v1", {"anthropic-version": "2023-06-01"}), ("/v1beta", {})):
        assert "policy" in ask(session, "GET", path + "/models", headers=headers).text
        assert "policy" in ask(session, "GET", path + "/models/policy", headers=headers).text
        assert "other" in ask(session, "GET", path + "/models/other", headers=headers).text
    assert session.calls == []


def test_a_developer_message_is_rendered_as_the_system_message(session: Session, service: RunningService) -> None:
    session.ask([{"role": "developer", "content": "be brief"}, {"role": "user", "content": "q"}])
    assert session.calls[0]["messages"][0] == {"role": "system", "content": "be brief"}
