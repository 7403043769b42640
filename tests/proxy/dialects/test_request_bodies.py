"""Request bodies: taken apart without decoding what the session has sent before, and whatever JSON can write is read."""

from __future__ import annotations

import json

import httpx
import pytest

from proxy.dialects.fields import decode, split_body
from proxy.errors import RequestError
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service import plain_http
from tests.support.service.running_service import RunningService


def test_the_fields_are_decoded_and_the_items_of_the_history_left_raw() -> None:
    fields, items = split_body(b'{"model": "m", "n": 2, "messages": [{"a":  1}, {"b": [2]}]}', "messages")
    assert fields == {"model": "m", "n": 2}
    assert [json.loads(item) for item in items] == [{"a": 1}, {"b": [2]}]


@pytest.mark.parametrize("body", [b"{}", b'{"messages": null}', b'{"messages": []}'])
def test_an_absent_history_is_empty(body: bytes) -> None:
    assert split_body(body, "messages")[1] == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"{'a': 1}",
        b'{"a": tru}',
        b"\xff\xfe",
        b'{"messages": {}}',
        b'{"a": NaN}',
        b'{"messages": [NaN]}',
    ],
)
def test_what_is_no_json_object_with_a_list_is_the_callers_error(body: bytes) -> None:
    with pytest.raises(RequestError):
        split_body(body, "messages")


def test_nesting_without_end_is_the_callers_error() -> None:
    with pytest.raises(RequestError):
        split_body(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "messages")


def test_a_lone_surrogate_becomes_the_replacement_character_and_a_pair_stays_a_character() -> None:
    assert decode(rb'{"content": "a\ud800b \ud83d\ude00"}') == {"content": "a\ufffdb \U0001f600"}


def test_a_lone_surrogate_in_tool_output_is_taken_and_the_next_turn_continues(redis_url: str) -> None:
    """Harnesses cut tool output at a number of UTF-16 units, in the middle of an emoji where one stands there."""
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url) as service:
        session = service.session()
        engine.say("hello")
        history = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [_call("call_1")]},
            {"role": "tool", "tool_call_id": "call_1", "content": "SURROGATE"},
        ]
        assert _post(session, history).status_code == 200
        engine.say("again")
        history += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
        assert _post(session, history).status_code == 200
        first, second = session.calls
        assert second["parent_id"] == first["call_id"]


def _call(call_id: str) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": "read", "arguments": "{}"}}


def _post(session: object, messages: list[dict[str, object]]) -> httpx.Response:
    client = session.client  # type: ignore[attr-defined]
    body = json.dumps({"model": "policy", "messages": messages}).replace("SURROGATE", "cut \\ud83d")
    return plain_http.post(
        f"{client.base_url}chat/completions",
        content=body,
        headers={"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"},
        timeout=120,
    )
