"""The Messages dialect alone: how bodies are read, how a reply is told in any pieces, and that junk is refused, never an accident."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from proxy.call.draft import Draft
from proxy.call.session import Session
from proxy.dialects.base import Choice, Delta, Incoming, Reply, Request, seal, tool_call_id
from proxy.dialects.fields import arguments_object
from proxy.dialects.messages import MessagesDialect
from proxy.errors import (
    Conflict,
    ContextTooLong,
    EngineFailed,
    EngineUnavailable,
    Forbidden,
    NotFound,
    RequestError,
    StoreUnavailable,
    TooLarge,
    Unauthorized,
    VerbatimError,
)
from proxy.store.states import SessionInfo
from reconstruct.messages import projection

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CALL = "0123456789abcdef01234567"
DIALECT = MessagesDialect()


def session() -> Draft:
    return Draft(Session(SessionInfo("s", b"", 0.0)))


def parsed(tree: Draft | None = None, **fields: Any) -> Request:
    body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}], **fields}
    return DIALECT.parse(Incoming(json.dumps(body).encode()), tree or session())


def between(content: Any) -> list[dict[str, Any]]:
    """A history in which the assistant said this between two messages of the user."""
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}, {"role": "user", "content": "r"}]


def choice(
    text: str = "",
    reasoning: str = "",
    calls: Sequence[tuple[str, str]] = (),
    finish: str = "stop",
    stop: str | int | None = None,
) -> Choice:
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        made = [{"name": name, "arguments": arguments} for name, arguments in calls]
        message["tool_calls"] = [
            {"id": tool_call_id(CALL, position), "type": "function", "function": function}
            for position, function in enumerate(made)
        ]
    return Choice(0, CALL, message, finish, 7, stop_reason=stop)


def reply_of(told: Choice, prompt_tokens: int = 20, cached: int = 5) -> Reply:
    return Reply(CALL, "policy", 0, prompt_tokens, [told], cached)


def rendered(told: Choice, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(DIALECT.render(parsed(**fields), reply_of(told)))
    Message.model_validate(answer)
    return answer


def in_events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream but for pings, each one valid by the SDK's own types."""
    found = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENT.validate_python(event, strict=True)
            found.append(event)
    return found


def accumulated(stream: bytes) -> dict[str, Any]:
    """What the SDK makes of the stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in in_events(stream):
        made = EVENT.validate_python(event)
        snapshot = accumulate_event(event=made, current_snapshot=snapshot, json_bufs=buffers)
    whole: dict[str, Any] = snapshot.model_dump(exclude_none=True)
    return whole


def streamed(told: Choice, deltas: Sequence[Delta], **fields: Any) -> bytes:
    stream = DIALECT.open_stream(parsed(stream=True, **fields), CALL, 0, 20)
    return stream.open() + b"".join(stream.write(delta) for delta in deltas) + stream.close(reply_of(told))


# Any pieces make the whole

PROSE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
ARGUMENTS = st.dictionaries(PROSE, st.one_of(st.integers(), PROSE, st.lists(st.booleans(), max_size=3)), max_size=3)


@st.composite
def told_in_pieces(draw: st.DrawFn) -> tuple[Choice, list[Delta]]:
    """A reply, and the deltas of one way to tell it: every text cut anywhere, neighbours told at once or one by one."""
    calls = [("f", json.dumps(arguments)) for arguments in draw(st.lists(ARGUMENTS, max_size=3))]
    whole = choice(
        draw(st.one_of(st.just(""), PROSE)), draw(st.one_of(st.just(""), PROSE)), calls, "tool_calls" if calls else "stop"
    )
    pieces = [Delta(0, reasoning=part) for part in draw(cut(whole.message.get("reasoning_content", "")))]
    pieces += [Delta(0, part) for part in draw(cut(whole.message["content"] or ""))]
    for position, (name, arguments) in enumerate(calls):
        named = {"index": position, "id": tool_call_id(CALL, position), "type": "function"}
        first, *rest = ["", *draw(cut(arguments))]
        pieces.append(Delta(0, tool_calls=[{**named, "function": {"name": name, "arguments": first}}]))
        pieces += [Delta(0, tool_calls=[{"index": position, "function": {"arguments": part}}]) for part in rest]
    return whole, draw(merged(pieces))


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=4)))
    return [part for start, end in zip([0, *places], [*places, len(text)], strict=True) if (part := text[start:end])]


@st.composite
def merged(draw: Any, pieces: list[Delta]) -> list[Delta]:
    """Some neighbours as one delta, as an engine that says more than one thing at a time."""
    made: list[Delta] = []
    for piece in pieces:
        if made and draw(st.booleans()):
            last = made[-1]
            late = (piece.reasoning and (last.content or last.tool_calls)) or (piece.content and last.tool_calls)
            if not late:
                together = [*last.tool_calls, *piece.tool_calls]
                made[-1] = Delta(0, last.content + piece.content, last.reasoning + piece.reasoning, together)
                continue
        made.append(piece)
    return made


@settings(max_examples=50)
@given(told_in_pieces(), st.sampled_from(["shown", "omitted", "none"]))
def test_any_split_of_a_reply_adds_up_to_the_unstreamed_one(told: tuple[Choice, list[Delta]], thinking: str) -> None:
    whole, deltas = told
    asked: dict[str, Any] = {
        "shown": {"thinking": {"type": "adaptive"}},
        "omitted": {"thinking": {"type": "enabled", "display": "omitted"}},
        "none": {},
    }[thinking]
    expected = {key: value for key, value in rendered(whole, **asked).items() if value is not None}
    assert accumulated(streamed(whole, deltas, **asked)) == expected
    assert accumulated(streamed(whole, [], **asked)) == expected, "what no delta carried is told at the end"


@settings(max_examples=50)
@given(told_in_pieces())
def test_a_reply_that_is_sent_back_reads_as_what_was_said(told: tuple[Choice, list[Delta]]) -> None:
    whole, _ = told
    content = rendered(whole, thinking={"type": "adaptive"})["content"]
    seen = parsed(messages=between(content)).history[1]
    assert projection(whole.message, seen.message) in ("exact", "arguments")
    names = whole.message.get("tool_calls") or whole.message.get("reasoning_content")
    assert set(seen.minted) == ({CALL} if names else set())


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_arguments_of_any_shape_are_read_back_as_they_were(arguments: str) -> None:
    whole = choice(calls=[("f", arguments)], finish="tool_calls")
    (use,) = rendered(whole)["content"]
    assert use["input"] == arguments_object(arguments)
    assert projection(whole.message, parsed(messages=between([use])).messages[1]) in ("exact", "arguments")


def test_a_stream_tells_malformed_arguments_in_the_models_own_text() -> None:
    told = streamed(choice(calls=[("f", '{"a": tru')], finish="tool_calls"), [])
    pieces = [event["delta"]["partial_json"] for event in in_events(told) if event["type"] == "content_block_delta"]
    assert pieces == ['{"a": tru']


def test_thinking_after_text_is_a_block_of_its_own() -> None:
    whole = choice("ab", "xy")
    deltas = [Delta(0, reasoning="x"), Delta(0, "a"), Delta(0, reasoning="y"), Delta(0, "b")]
    content = accumulated(streamed(whole, deltas, thinking={"type": "adaptive"}))["content"]
    assert [block["type"] for block in content] == ["thinking", "text"] * 2
    assert projection(whole.message, parsed(messages=between(content)).messages[1]) == "exact"


def test_thinking_that_is_not_shown_is_a_sign_of_life() -> None:
    stream = DIALECT.open_stream(parsed(stream=True), CALL, 0, 20)
    assert stream.write(Delta(0, reasoning="x")) == stream.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_a_piece_for_a_call_whose_block_is_closed_ends_in_an_error() -> None:
    calls = [{"index": position, "function": {"name": "f", "arguments": "{"}} for position in (0, 1)]
    deltas = [Delta(0, tool_calls=calls), Delta(0, tool_calls=[{"index": 0, "function": {"arguments": "}"}}])]
    told = streamed(choice(calls=[("f", "{}"), ("f", "{")]), deltas)
    assert b"event: error" in told and b"message_stop" not in told


@pytest.mark.parametrize(
    ("told", "ending"),
    [
        (choice("a"), ("end_turn", None)),
        (choice("a", stop=151645), ("end_turn", None)),
        (choice("a", stop="STOP"), ("stop_sequence", "STOP")),
        (choice("a", finish="length"), ("max_tokens", None)),
        (choice(calls=[("f", "{}")], finish="tool_calls"), ("tool_use", None)),
        (choice(calls=[("f", "{}")], finish="stop"), ("tool_use", None)),
        (choice(calls=[("f", "{}")], stop="STOP"), ("tool_use", None)),
        (choice(calls=[("f", '{"a')], stop="STOP"), ("stop_sequence", "STOP")),
        (choice(calls=[("f", '{"a')], finish="length"), ("max_tokens", None)),
    ],
)
def test_why_a_reply_ended(told: Choice, ending: tuple[str, str | None]) -> None:
    answer = rendered(told)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ending
    assert answer["usage"] == {
        "input_tokens": 15,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": 7,
    }


# How bodies are read


def test_content_of_a_user_becomes_parts() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    document = {
        "type": "document",
        "title": "T",
        "context": "C",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    blocks = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "E"}]}}
    found = {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "F"}]}
    content = [{"type": "text", "text": "see", "cache_control": {"type": "ephemeral"}}, image, document, blocks, found]
    (message,) = parsed(messages=[{"role": "user", "content": content}]).messages
    assert message["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image", "digest": hashlib.sha256(b"hi").hexdigest()},
        {"type": "text", "text": "T\nC\nD"},
        {"type": "text", "text": "E"},
        {"type": "text", "text": "T\nS\nF"},
    ]
    (single,) = parsed(messages=[{"role": "user", "content": [{"type": "text", "text": "one"}]}]).messages
    assert single == {"role": "user", "content": "one"}


def test_results_of_one_reply_stand_in_the_order_of_its_calls() -> None:
    """Claude Code writes results down as they come in; a template without ids would give each call another's result."""

    def content(*ids: str) -> list[Any]:
        return [{"type": "tool_result", "tool_use_id": identifier, "content": identifier[-1]} for identifier in ids]

    def read(*ids: str) -> list[str]:
        return [message["content"] for message in parsed(messages=[{"role": "user", "content": content(*ids)}]).messages]

    ours = [f"toolu_{CALL}_{position}" for position in range(11)]
    assert read(ours[2], ours[10], ours[0]) == ["0", "2", "0"]
    assert read("toolu_theirs2", "toolu_theirs1") == ["2", "1"]
    assert read(ours[1], "toolu_theirs0") == ["1", "0"]


def test_a_sealed_thought_that_was_redacted_is_ours_again() -> None:
    content = [{"type": "redacted_thinking", "data": seal(CALL, "thought")}, {"type": "text", "text": "a"}]
    seen = parsed(messages=between(content)).history[1]
    assert (seen.message["reasoning_content"], seen.minted) == ("thought", (CALL,))


@pytest.mark.parametrize(
    "content",
    [
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}},
        {"type": "document", "source": {"type": "url", "url": "http://x"}},
        {"type": "container_upload", "file_id": "f"},
        {"type": "text"},
        {"type": "tool_result"},
        {"type": "tool_result", "tool_use_id": "t", "content": 7},
        {},
    ],
)
def test_content_that_no_engine_takes_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        parsed(messages=[{"role": "user", "content": [content]}])


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"messages": []},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": [{"role": "system"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": ["q"]},
        {"messages": [{"role": "user"}]},
        {"messages": between([{"type": "tool_use", "name": "f"}])},
        {"system": 7},
        {"system": [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {}}}]},
        {"tools": [{"input_schema": {}}]},
        {"tools": [{"name": "f", "input_schema": []}]},
        {"tools": [{"name": "f", "type": 7}]},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "some"}, "tools": [{"name": "f"}]},
        {"thinking": {"type": "hard"}},
        {"output_config": {"effort": "most"}},
        {"output_config": {"format": {"type": "regex"}}},
        {"stop_sequences": [1]},
        {"max_tokens": 0},
        {"stream": "yes"},
    ],
)
def test_a_field_that_breaks_a_rule_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        parsed(**fields)


def test_what_the_vendor_would_do_to_the_history_is_counted_not_forgotten() -> None:
    keeping = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    cutting = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    server = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "unheard_of_20270101", "name": "x"}]
    assert parsed(context_management=keeping).dropped_tools == []
    assert parsed(context_management=cutting, mcp_servers=[{"name": "m"}], tools=server).dropped_tools == [
        "web_search",
        "other",
        "mcp_servers",
        "context_management",
    ]


def test_a_choice_of_tools_without_tools_is_left_out() -> None:
    server = [{"type": "web_search_20250305", "name": "web_search"}]
    assert parsed(tools=server, tool_choice={"type": "auto"}).forward == {}


def test_tools_that_the_client_runs_have_their_documented_parameters() -> None:
    tools = [
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
    ]
    first, second, computer = [tool["function"] for tool in parsed(tools=tools).tools]
    assert "undo_edit" in first["parameters"]["properties"]["command"]["enum"]
    assert "insert_text" in second["parameters"]["properties"] and "insert_text" not in first["parameters"]["properties"]
    assert "800 by 600" in computer["description"] and "zoom" not in computer["parameters"]["properties"]["action"]["enum"]


def test_template_arguments_of_the_body_win() -> None:
    off = {"type": "disabled"}
    assert parsed(thinking=off).template_kwargs == {"enable_thinking": False}
    assert parsed(thinking=off, chat_template_kwargs={"enable_thinking": True}).template_kwargs == {"enable_thinking": True}
    assert parsed().template_kwargs == {}


def test_a_history_is_decoded_once_per_session() -> None:
    tree = session()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    one, again = parsed(tree, system="top", messages=messages), parsed(tree, system="top", messages=messages)
    assert [seen is other for seen, other in zip(one.history, again.history, strict=True)] == [True, True]


def test_lone_surrogates_are_replaced() -> None:
    body = (
        b'{"model": "policy", "messages": [{"role": "system", "content": "\\ud800"}, {"role": "user", "content": "a\\ud83d"}]}'
    )
    request = DIALECT.parse(Incoming(body), session())
    assert [message["content"] for message in request.messages] == ["\ufffd", "a\ufffd"]


# Errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (Conflict("x"), 409, "invalid_request_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (VerbatimError("x"), 500, "api_error"),
        (EngineFailed("x"), 502, "api_error"),
        (EngineUnavailable("x"), 529, "overloaded_error"),
        (StoreUnavailable("x"), 529, "overloaded_error"),
    ],
)
def test_errors_have_the_vendors_status_and_type(error: VerbatimError, status: int, kind: str) -> None:
    answer = DIALECT.render_error(error)
    body = json.loads(answer.body)
    assert (answer.status, body["type"], body["error"]) == (status, "error", {"type": kind, "message": "x"})
    assert body["request_id"] == answer.headers["request-id"]
    if status > 500:
        assert answer.headers["retry-after"] == "1"
    stream = DIALECT.open_stream(parsed(stream=True), CALL, 0, 20)
    name, data = stream.fail(error).decode().strip().split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == kind


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ContextTooLong("no numbers"), "prompt is too long: no numbers"),
        (ContextTooLong("x", tokens=9, window=8), "prompt is too long: 9 tokens > 8 maximum"),
    ],
)
def test_a_prompt_that_does_not_fit_is_recognised_by_its_words(error: ContextTooLong, message: str) -> None:
    assert json.loads(DIALECT.render_error(error).body)["error"]["message"] == message


# Junk


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = ("text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "search_result", "other")
NAMES = ("text", "source", "content", "id", "tool_use_id", "name", "input", "thinking", "signature", "data", "title", "tool")
BLOCK = st.builds(
    lambda kind, rest: {"type": kind, **rest}, st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), JUNK)
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | JUNK,
        "content": st.lists(BLOCK | JUNK, max_size=3) | JUNK,
    }
)
FIELDS = (
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "stop_sequences",
    "max_tokens",
    "stream",
    "temperature",
)
TOOL = st.dictionaries(st.sampled_from(["name", "type", "input_schema", "description"]), JUNK)
BODY = st.builds(
    lambda rest, messages, tools: {"model": "policy", "tools": tools, **rest, "messages": messages},
    st.dictionaries(st.sampled_from(FIELDS), JUNK),
    st.lists(MESSAGE | JUNK, max_size=3) | JUNK,
    st.lists(TOOL, max_size=2) | JUNK,
)


@settings(max_examples=100)
@given(BODY)
def test_a_junk_body_is_read_or_refused(body: Any) -> None:
    try:
        request = DIALECT.parse(Incoming(msgspec.json.encode(body)), session())
    except RequestError:
        return
    assert all(isinstance(message["content"], (str, list, type(None))) for message in request.messages)
