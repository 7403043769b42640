"""The Responses dialect without a service: what its requests mean, what its items read back as, and what junk does to it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.base import (
    Choice,
    Delta,
    Divide,
    HistoryMessage,
    Incoming,
    ItemReader,
    ParsedMessage,
    Reply,
    Request,
    Seals,
    seal,
    tool_call_id,
)
from proxy.dialects.raw_history import SplitBody
from proxy.dialects.responses import ResponsesDialect
from proxy.dialects.splitting import split_body
from proxy.errors import RequestError, UnknownCall
from reconstruct.messages import digest_message, minted_call_ids, projection
from reconstruct.records import Call
from tests.support.service.responses_client import EVENT, RESPONSE, check_order, read_events

CALL_ID = "0123456789ab0123456789ab"
FUNCTION = {
    "type": "function",
    "name": "lookup",
    "description": "Looks up.",
    "parameters": {"type": "object", "properties": {}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}
TEAM = {"type": "namespace", "name": "team", "description": "Others.", "tools": [{"type": "function", "name": "wait"}, PATCH]}
TOOLS = [FUNCTION, PATCH, TEAM, {"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
TOOLS_OF_BUILT_INS = [FUNCTION, TEAM, {"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]


class Remembered:
    """A session whose one call answered `reply`."""

    def __init__(self, reply: dict[str, Any] | None = None) -> None:
        self._reply = reply
        self.refreshed = True
        self.seals = Seals()

    def split(self, body: bytes, listed: str, divide: Divide) -> SplitBody:
        return split_body(body, listed)

    def read(self, split: SplitBody, divide: Divide) -> tuple[list[HistoryMessage], list[bytes]]:
        units = list(divide(split.items()))
        messages = [seen for unit in units if unit.read is not None for seen in self.read_item(unit.raw, unit.read)]
        return messages, [unit.raw for unit in units if unit.read is None]

    def convert(self, given: Any, convert: Callable[[Any], Any]) -> Any:
        return convert(given)

    def read_item(self, raw: bytes, read: ItemReader) -> list[HistoryMessage]:
        return [self._seen(heard) for heard in read(raw, self)]

    def _seen(self, heard: ParsedMessage) -> HistoryMessage:
        minted = (*minted_call_ids(heard.message), *([heard.minted] if heard.minted else []))
        return HistoryMessage(heard.message, digest_message(heard.message), minted)

    def call(self, call_id: str) -> Call:
        raise UnknownCall(f"no call {call_id}")

    def reply(self, call_id: str) -> dict[str, Any]:
        if self._reply is None or call_id != CALL_ID:
            raise UnknownCall(f"no call {call_id}")
        return self._reply

    def history(self, call_id: str) -> list[HistoryMessage]:
        raise UnknownCall(f"no call {call_id}")


def parse(past: Remembered | None = None, dialect: ResponsesDialect | None = None, **fields: Any) -> Request:
    body = msgspec.json.encode({"model": "policy", "input": "q", **fields})
    return (dialect or ResponsesDialect()).parse(Incoming(body), past or Remembered())


def reply_of(message: dict[str, Any], finish_reason: str = "stop", logprobs: Any = None) -> Reply:
    return Reply(CALL_ID, "policy", 1, 5, [Choice(0, CALL_ID, message, finish_reason, 3, logprobs)])


def items_of(request: Request, message: dict[str, Any]) -> list[dict[str, Any]]:
    rendered = ResponsesDialect().render(request, reply_of(message))
    RESPONSE.validate_json(rendered, strict=True)
    return list(json.loads(rendered)["output"])


def message_of(content: str | None, reasoning: str = "", calls: Any = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": tool_call_id(CALL_ID, at), "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ]
    return message


# What a request means


def test_instructions_and_leading_system_items_are_one_system_message() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]},
        {"type": "message", "role": "system", "content": "c"},
        {"role": "user", "content": "q"},
        {"role": "developer", "content": "later"},
    ]
    request = parse(instructions="first", input=items, dialect=ResponsesDialect())
    assert request.messages == [
        {"role": "system", "content": "first\n\na\nb\n\nc"},
        {"role": "user", "content": "q"},
        {"role": "user", "content": "later"},
    ]
    assert request.marks["instructions"] == "5"
    assert [tool["function"]["name"] for tool in request.tools] == ["lookup"]


def test_the_fields_reach_the_engine_under_its_own_names() -> None:
    request = parse(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "minimal"},
        text={"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "lookup"},
        parallel_tool_calls=False,
        client_metadata={"x": "y"},
    )
    assert request.sampling == {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
    assert request.forward == {
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
        "tool_choice": {"type": "function", "function": {"name": "lookup"}},
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("choice", "forwarded"),
    [
        ("auto", None),
        ("none", "none"),
        ("required", "required"),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}),
        ({"type": "function", "name": "wait"}, {"type": "function", "function": {"name": "team__wait"}}),
        ({"type": "function", "name": "wait", "namespace": "team"}, {"type": "function", "function": {"name": "team__wait"}}),
        ({"type": "local_shell"}, {"type": "function", "function": {"name": "local_shell"}}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "lookup"}]}, None),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "lookup"}]},
            {"type": "function", "function": {"name": "lookup"}},
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": [FUNCTION, PATCH]}, "required"),
    ],
)
def test_a_choice_of_tools_is_the_engines(choice: Any, forwarded: Any) -> None:
    assert (
        parse(tools=[FUNCTION, PATCH, TEAM, {"type": "local_shell"}], tool_choice=choice).forward.get("tool_choice")
        == forwarded
    )


def test_every_kind_of_tool_is_a_function_to_the_model() -> None:
    request = parse(
        tools=[*TOOLS_OF_BUILT_INS, {"type": "web_search_preview_2025_03_11"}, {"type": "mcp"}, {"type": "made up"}]
    )
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["lookup", "team__wait", "team__apply_patch", "local_shell", "shell", "apply_patch"]
    assert "start: x" in request.tools[2]["function"]["description"]
    assert request.tools[2]["function"]["parameters"]["required"] == ["input"]
    assert list(request.dropped_tools) == ["web_search", "mcp", "unknown"]


def test_a_shell_that_runs_elsewhere_is_not_offered() -> None:
    request = parse(tools=[{"type": "shell", "environment": {"type": "container_auto"}}])
    assert (request.tools, list(request.dropped_tools)) == ([], ["shell"])


def test_answers_of_tools_are_tool_messages() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "high"}
    outputs = [
        {"type": "function_call_output", "call_id": "a", "output": "text"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "see"}, image]},
        {"type": "local_shell_call_output", "id": f"lsh_{CALL_ID}_2", "output": "{}"},
        {
            "type": "shell_call_output",
            "call_id": "d",
            "output": [{"stdout": "x", "stderr": "", "outcome": {"type": "timeout"}}],
        },
        {"type": "apply_patch_call_output", "call_id": "e", "status": "failed", "output": "no such file"},
    ]
    messages = parse(input=[{"role": "user", "content": "q"}, *outputs]).messages[1:]
    assert [message["tool_call_id"] for message in messages] == ["a", "b", "c", f"call_{CALL_ID}_2", "d", "e"]
    contents = [message["content"] for message in messages]
    assert contents[:2] == ["text", "one"]
    assert contents[2][1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "high"}}
    assert json.loads(contents[4])[0]["stdout"] == "x"
    assert contents[5] == "failed\nno such file"


def test_what_one_agent_says_to_another_is_a_users_message() -> None:
    """Codex keeps a message between agents as `encrypted_content`; what a model of ours said there is plain text."""
    content = [{"type": "input_text", "text": "Task:\n"}, {"type": "encrypted_content", "encrypted_content": "look around"}]
    # "/root" is what Codex calls its main agent; the others are named below it.
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/kid", "content": content}
    assert parse(input=[item]).messages == [{"role": "user", "content": "Task:\nlook around"}]


def test_items_of_other_replies_are_messages_of_their_own() -> None:
    other = "f" * 24
    items = [
        {"role": "user", "content": "q"},
        {"type": "message", "role": "assistant", "id": f"msg_{CALL_ID}", "content": [{"type": "output_text", "text": "cut"}]},
        {"type": "reasoning", "id": f"rs_{other}", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": f"msg_{other}", "content": "whole"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "one"},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
    ]
    request = parse(input=items)
    assert [message["role"] for message in request.messages] == ["user", "assistant", "assistant", "user", "assistant"]
    assert [seen.minted for seen in request.history] == [(), (CALL_ID,), (other,), (), ()]
    assert request.messages[2] == {"role": "assistant", "content": "whole", "reasoning_content": "hm"}
    assert request.messages[4]["tool_calls"][0]["function"]["name"] == "f"


def test_sealed_reasoning_alone_names_its_reply_and_holds_its_thought() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal(CALL_ID, "a thought")}
    (seen,) = parse(input=[sealed]).history
    assert (seen.message["reasoning_content"], seen.minted) == ("a thought", (CALL_ID,))


def test_calls_that_are_nowhere_known_are_looked_for_once() -> None:
    past = Remembered()
    past.refreshed = False
    called = {"type": "custom_tool_call", "name": "apply_patch", "input": "x"}
    items = [{**called, "call_id": tool_call_id(call_id, 0)} for call_id in (CALL_ID, CALL_ID[::-1])]
    with pytest.raises(UnknownCall):
        parse(past, input=items)
    past.refreshed = True
    calls = [call for message in parse(past, input=items).messages for call in message["tool_calls"]]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"input": "x"}] * 2


def test_lone_surrogates_are_replaced() -> None:
    body = rb'{"model": "policy", "input": [{"role": "user", "content": "a\ud800b"}], "instructions": "c\udfff"}'
    messages = ResponsesDialect().parse(Incoming(body), Remembered()).messages
    assert messages == [{"role": "system", "content": "c\ufffd"}, {"role": "user", "content": "a\ufffdb"}]


def test_nothing_is_marked_of_a_response_that_is_not_stored() -> None:
    assert parse(store=False, tools=TOOLS, instructions="i", metadata={"a": "b"}).marks == {"store": "false"}


# Items and messages, both ways

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=5,
)
shell_arguments = st.fixed_dictionaries(
    {"command": st.lists(texts, max_size=2)}, optional={"workdir": texts | st.none(), "timeout_ms": st.integers(0, 9)}
)
patches = st.fixed_dictionaries(
    {"type": st.sampled_from(["create_file", "delete_file"]), "path": texts}, optional={"diff": texts}
)
arguments = st.one_of(
    texts, st.builds(json.dumps, st.builds(lambda text: {"input": text}, texts) | shell_arguments | patches | json_values)
)
names = st.sampled_from(["lookup", "apply_patch", "team__wait", "team__apply_patch", "local_shell", "shell", "unheard_of"])
messages = st.builds(
    message_of, st.none() | texts | st.sampled_from(["\n\n", " a\n"]), texts, st.lists(st.tuples(names, arguments), max_size=3)
)


@given(messages, st.sampled_from([TOOLS, TOOLS_OF_BUILT_INS, []]), st.booleans(), st.booleans(), st.data())
def test_the_items_of_any_reply_read_back_as_the_reply(
    message: dict[str, Any], tools: list[Any], summary: bool, sealed: bool, data: st.DataObject
) -> None:
    how: dict[str, Any] = {"reasoning": {"summary": "auto"}} if summary else {}
    request = parse(tools=tools, **how, include=["reasoning.encrypted_content"] if sealed else [])
    items = items_of(request, message)
    bare = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
    shown = data.draw(st.sampled_from([items, bare]))
    (seen,) = parse(Remembered(message), input=shown, tools=tools).history
    used = projection(message, seen.message)
    # White space alone beside other items is left out of them.
    assert used == "exact" or (used == "trimmed" and not (message["content"] or "").strip())
    if shown is items or message.get("tool_calls"):
        assert CALL_ID in seen.minted
    for item in items:
        if item.get("encrypted_content"):
            assert Seals().open(item["encrypted_content"]) == (CALL_ID, message["reasoning_content"])


@st.composite
def split_replies(draw: st.DrawFn) -> tuple[dict[str, Any], list[Delta]]:
    """A message and the deltas of one way to stream it, its end perhaps left to the message."""
    message = draw(messages)
    pieces: list[Delta] = [Delta(0, reasoning=part) for part in draw(pieces_of(message.get("reasoning_content") or ""))]
    pieces += [Delta(0, part) for part in draw(pieces_of(message["content"] or ""))]
    for at, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        for part in draw(pieces_of(function["name"])):
            pieces.append(Delta(0, tool_calls=[{"index": at, "id": call["id"], "function": {"name": part}}]))
        for part in draw(pieces_of(function["arguments"])):
            pieces.append(Delta(0, tool_calls=[{"index": at, "function": {"arguments": part}}]))
    return message, pieces[: draw(st.integers(0, len(pieces)))]


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=3))})
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


def streamed(request: Request, message: dict[str, Any], deltas: list[Delta]) -> list[dict[str, Any]]:
    """All events of the streamed reply."""
    stream = ResponsesDialect().open_stream(request, CALL_ID, 1, 0)
    told = stream.open() + b"".join(stream.write(delta) for delta in deltas) + stream.close(reply_of(message))
    events = read_events(told.decode().split("\n"))
    for event in events:
        EVENT.validate_json(json.dumps(event), strict=True)
    check_order(events)
    return events


@settings(max_examples=40)
@given(split_replies(), st.sampled_from([TOOLS, []]), st.booleans())
def test_any_split_of_a_reply_gives_the_items_of_the_whole(
    split: tuple[dict[str, Any], list[Delta]], tools: list[Any], summary: bool
) -> None:
    message, deltas = split
    request = parse(tools=tools, stream=True, reasoning={"summary": "auto"} if summary else {})
    events = streamed(request, message, deltas)
    assert events[-1]["response"] == json.loads(ResponsesDialect().render(request, reply_of(message)))


@settings(max_examples=40)
@given(split_replies(), st.randoms(use_true_random=False))
def test_pieces_in_any_order_still_make_one_reply(split: tuple[dict[str, Any], list[Delta]], random: Any) -> None:
    """Text behind a call, or thoughts behind text, become further items: the text of each kind stays in its order."""
    message, deltas = split
    message.pop("tool_calls", None)
    pieces = [delta for delta in deltas if not delta.tool_calls]
    thoughts, words = [delta for delta in pieces if delta.reasoning], [delta for delta in pieces if delta.content]
    mixed = []
    while thoughts or words:
        mixed.append((thoughts if not words or (thoughts and random.random() < 0.5) else words).pop(0))
    items = streamed(parse(stream=True), message, mixed)[-1]["response"]["output"]
    (seen,) = parse(input=items).history
    assert projection(message, seen.message) in ("exact", "trimmed")
    assert seen.minted == (CALL_ID,)


# Junk

known_types = st.sampled_from(
    [
        *("message", "reasoning", "function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"),
        *("function_call_output", "local_shell_call_output", "shell_call_output", "apply_patch_call_output", "item_reference"),
        *("additional_tools", "agent_message", "compaction", "web_search_call", "function", "namespace", "custom", "shell"),
        *("input_text", "output_text", "input_image", "json_schema", "allowed_tools"),
    ]
)


def things(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = ["role", "id", "call_id", "content", "name", "arguments", "input", "output", "action", "operation", "tools", "text"]
    keys += ["encrypted_content", "summary", "namespace", "format", "schema", "effort", "mode", "parameters", "image_url"]
    ids = st.sampled_from([f"fc_{CALL_ID}_0", f"call_{CALL_ID}_0", f"msg_{CALL_ID}", f"resp_{CALL_ID}", "user", "assistant"])
    fields: dict[str, Any] = {"type": known_types | inner}
    return st.fixed_dictionaries({}, optional={**fields, **dict.fromkeys(keys, inner | ids)})


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False, allow_infinity=False) | texts | known_types,
    lambda inner: st.lists(inner, max_size=3) | things(inner),
    max_leaves=8,
)


body_fields = [
    "input",
    "tools",
    "instructions",
    "tool_choice",
    "previous_response_id",
    "reasoning",
    "text",
    "include",
    "stream",
]
body_fields += ["store", "max_output_tokens", "temperature", "top_p", "metadata", "parallel_tool_calls", "truncation"]
body_fields += ["top_logprobs", "stop", "prompt"]
bodies = st.fixed_dictionaries(
    {"model": st.just("policy")},
    optional={**dict.fromkeys(body_fields, values), "input": st.lists(things(values), max_size=4) | values},
)


@settings(max_examples=50)
@given(bodies | values, st.binary(max_size=4))
def test_junk_is_refused_as_the_callers_fault(body: Any, noise: bytes) -> None:
    """Anything but a RequestError here would be a 500."""
    dialect = ResponsesDialect()
    for raw in (msgspec.json.encode(body), msgspec.json.encode(body)[:-1] + noise, noise):
        try:
            request = dialect.parse(Incoming(raw), Remembered())
        except RequestError as error:
            assert 400 <= dialect.render_error(error).status < 500
        else:
            assert request.history
            json.loads(dialect.render(request, reply_of(message_of("a"))))
