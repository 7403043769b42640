"""The Google dialect alone: what each field becomes, what is refused, and that no split of a reply changes what is told."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from itertools import pairwise
from typing import Any

import pytest
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.call.draft import Draft
from proxy.call.http import MethodNotAllowed, UpgradeRefused
from proxy.call.session import Session
from proxy.dialects.base import Choice, Delta, Incoming, Reply, Request, seal
from proxy.dialects.gemini import GeminiDialect
from proxy.errors import (
    Conflict,
    ContextTooLong,
    EngineFailed,
    EngineUnavailable,
    Forbidden,
    NotFound,
    RequestError,
    TooLarge,
    Unauthorized,
    VerbatimError,
)
from proxy.store.states import SessionInfo
from tests.support.engine.template_families import FAMILIES

DIALECT = GeminiDialect()
CALL_ID = "0123456789abcdef01234567"
HI = [{"role": "user", "parts": [{"text": "hi"}]}]


def parsed(body: Any, *, method: str = "generateContent", tree: Draft | None = None, **query: str) -> Request:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = Incoming(content, {"model": "models/policy", "method": method}, query)
    return DIALECT.parse(asked, tree or Draft(Session(SessionInfo("s", b"", 0.0))))


def counted(body: Any) -> Request:
    """A request to count tokens, whose contents may end in one of the model."""
    asked = Incoming(json.dumps(body).encode(), {"model": "models/policy", "method": "countTokens"}, {})
    return DIALECT.parse_count(asked, Draft(Session(SessionInfo("s", b"", 0.0))))


def heard(contents: Any) -> list[dict[str, Any]]:
    return counted({"contents": contents}).messages


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def text(said: object, **more: Any) -> dict[str, Any]:
    return {"text": said, **more}


def call(name: str, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": arguments or {}, **more}}


def response(name: str, said: Any, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": said, **more}}


# Contents


def test_contents_become_messages() -> None:
    body = {
        "systemInstruction": {"parts": [text("Be kind."), text("Be brief.")]},
        "contents": [
            {"parts": [text("find a")]},
            model(text("hm", thought=True), text("I "), text("look"), call("f", {"k": 1}, id="one"), call("g", id="two")),
            user(response("f", {"output": "A"}, id="one"), response("g", {"error": "no"}, id="two"), text("and?")),
            model(text("done")),
            user(text("go on")),
        ],
    }
    assert parsed(body).messages == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "find a"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "one", "type": "function", "function": {"name": "f", "arguments": '{"k": 1}'}},
                {"id": "two", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "one", "content": "A"},
        {"role": "tool", "tool_call_id": "two", "content": '{"error": "no"}'},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "go on"},
    ]


@pytest.mark.parametrize("said", ["Be kind.", text("Be kind."), [text("Be kind.")], {"parts": text("Be kind.")}])
@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
def test_a_system_instruction_may_be_a_string_a_part_or_a_content(said: Any, name: str) -> None:
    instruction = {"parts": said} if isinstance(said, dict) and "text" in said else said
    messages = parsed({name: instruction, "contents": HI}).messages
    assert messages[0] == {"role": "system", "content": "Be kind."}


def test_an_empty_system_instruction_is_none() -> None:
    assert [message["role"] for message in parsed({"systemInstruction": "", "contents": HI}).messages] == ["user"]


def test_a_lone_object_counts_as_a_list_of_it() -> None:
    body = {"contents": {"parts": text("hi")}, "tools": {"functionDeclarations": {"name": "f"}}}
    request = parsed(body)
    assert request.messages == [{"role": "user", "content": "hi"}]
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]


def test_a_reply_kept_in_pieces_is_one_message() -> None:
    """Streaming clients keep one content per chunk, some of them empty."""
    pieces = [
        model(text("th", thought=True)),
        model(text("")),
        model(text("I lo")),
        model(text("ok"), call("f")),
        model(text("")),
    ]
    whole = [model(text("th", thought=True), text("I look"), call("f"))]
    after = [user(response("f", {"result": "A"}))]
    assert heard([*HI, *pieces, *after]) == heard([*HI, *whole, *after])


def test_a_reply_of_nothing_is_an_empty_message() -> None:
    for said in (model(text("")), model(), {"role": "model"}, model({"thoughtSignature": seal(CALL_ID)})):
        assert heard([*HI, said, *HI])[1] == {"role": "assistant", "content": ""}


def test_responses_without_ids_answer_the_open_calls_of_their_name_in_order() -> None:
    contents = [
        *HI,
        model(call("f"), call("g"), call("f")),
        user(response("g", {"output": "G"})),
        user(response("f", {"output": "first"}), response("f", {"output": "second"})),
        model(call("f")),
        user(response("f", {"output": "third"})),
    ]
    messages = heard(contents)
    ids = [made["id"] for made in messages[1]["tool_calls"]]
    assert len(set(ids)) == 3
    answered = [(message["tool_call_id"], message["content"]) for message in messages if message["role"] == "tool"]
    assert answered[:3] == [(ids[1], "G"), (ids[0], "first"), (ids[2], "second")]
    assert answered[3] == (messages[-2]["tool_calls"][0]["id"], "third")


def test_responses_with_ids_answer_their_calls_in_any_order() -> None:
    messages = heard(
        [*HI, model(call("f", id="a"), call("f", id="b")), user(response("f", {}, id="b"), response("f", {}, id="a"))]
    )
    assert [message["tool_call_id"] for message in messages[2:]] == ["b", "a"]


def test_a_response_to_no_call_is_kept() -> None:
    assert heard([user(response("f", {"output": "x"}))])[0]["role"] == "tool"
    messages = heard([*HI, model(call("f", id="a")), user(response("f", {"output": "x"}, id="other"))])
    assert messages[2]["tool_call_id"] == "other"


def test_made_up_ids_are_the_minted_ones_where_a_signature_names_the_call() -> None:
    signed = {**call("f"), "thoughtSignature": seal(CALL_ID)}
    seen = counted({"contents": [*HI, model(signed, call("f")), user(response("f", {}), response("f", {}))]}).history
    assert seen[1].digests.call_ids == (f"call_{CALL_ID}_0", f"call_{CALL_ID}_1")
    assert [message.message["tool_call_id"] for message in seen[2:]] == [f"call_{CALL_ID}_0", f"call_{CALL_ID}_1"]
    assert CALL_ID in seen[1].minted


def test_calls_without_ids_get_such_as_every_template_takes() -> None:
    """Mistral's refuses ids of fewer than nine characters: a client that sends none got 400."""
    called = {"role": "model", "parts": [{"functionCall": {"name": "lookup", "args": {"key": "a"}}}]}
    answer = {"role": "user", "parts": [{"functionResponse": {"name": "lookup", "response": {"output": "r"}}}]}
    messages = heard([*HI, called, answer])
    identifier = messages[-1]["tool_call_id"]
    for name, family in FAMILIES.items():
        # Kimi's shows the id alone, in which its model writes the name.
        assert (identifier if name == "kimi" else "lookup") in family.render_text(messages), name


def test_a_name_before_a_minted_id_is_taken_off() -> None:
    minted = f"call_{CALL_ID}_0"
    messages = heard([*HI, model(call("f", id=f"f__{minted}")), user(response("f", {}, id=f"f__{minted}"))])
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == minted


@pytest.mark.parametrize("alphabet", ["standard", "url", "url without padding"])
def test_a_signature_names_its_call_and_brings_dropped_reasoning_back(alphabet: str) -> None:
    signature = seal(CALL_ID, "??? >>> ~~~ " * 3)
    if alphabet != "standard":
        signature = signature.replace("+", "-").replace("/", "_")
    if alphabet.endswith("padding"):
        signature = signature.rstrip("=")
    seen = counted({"contents": [*HI, model(text("said", thoughtSignature=signature))]}).history[1]
    assert seen.minted == (CALL_ID,)
    assert seen.message["reasoning_content"] == "??? >>> ~~~ " * 3


def test_a_thought_that_was_kept_counts_before_the_signature() -> None:
    signature = seal(CALL_ID, "sealed")
    message = heard([*HI, model(text("kept", thought=True), text("said", thoughtSignature=signature))])[1]
    assert message["reasoning_content"] == "kept"


def test_foreign_signatures_mean_nothing() -> None:
    for signature in ("skip_thought_signature_validator", "AAAA", "", 7, None):
        seen = counted({"contents": [*HI, model(text("said", thoughtSignature=signature))]}).history[1]
        assert seen.minted == () and "reasoning_content" not in seen.message


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ({"output": "A"}, "A"),
        ({"result": "A"}, "A"),
        ({"result": {"a": 1}}, '{"result": {"a": 1}}'),
        ({"error": "é"}, '{"error": "é"}'),
        ({"output": "A", "more": 1}, '{"output": "A", "more": 1}'),
        ({}, "{}"),
        (None, "{}"),
    ],
)
def test_a_response_is_its_text_or_its_json(said: Any, content: str) -> None:
    assert heard([user(response("f", said))])[0]["content"] == content


def test_images_and_code_are_read() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "-_=="}}
    part = {"type": "image", "digest": hashlib.sha256(base64.b64decode("+/==")).hexdigest()}
    assert heard([user(text("see"), image)])[0]["content"] == [{"type": "text", "text": "see"}, part]
    told = {"functionResponse": {"name": "f", "response": {"output": "x"}, "parts": [image]}}
    assert heard([user(told)])[0]["content"] == [{"type": "text", "text": "x"}, part]
    code = {"executableCode": {"language": "PYTHON", "code": "1+1"}}
    output = {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "2"}}
    assert heard([*HI, model(code, output)])[1]["content"] == "```python\n1+1\n```\n```\n2\n```\n"


@pytest.mark.parametrize(
    "content",
    [
        "text",
        7,
        [],
        {"role": "system", "parts": [text("x")]},
        {"role": 7, "parts": [text("x")]},
        {"role": "user"},
        {"role": "user", "parts": []},
        user("text"),
        user(text(7)),
        user(call("f")),
        user({"text": "a", "functionResponse": {"name": "f"}}),
        user({"somethingNew": {}}),
        user({"fileData": {"fileUri": "files/1"}}),
        user({"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}}),
        user({"functionResponse": {"response": {}}}),
        user(response("f", "text")),
        model(response("f", {})),
        model({"functionCall": {"args": {}}}),
        model({"functionCall": {"name": "f", "args": []}}),
        model({"functionCall": "f"}),
        model(text("x", thought="yes")),
    ],
)
def test_contents_that_make_no_sense_are_refused(content: Any) -> None:
    for contents in ([content], [*HI, content], [*HI, model(call("f")), content, user(response("f", {}))]):
        with pytest.raises(RequestError):
            heard(contents)


def test_a_turn_is_read_once_however_long_the_history_grows() -> None:
    tree = Draft(Session(SessionInfo("s", b"", 0.0)))
    contents = [*HI, model(call("f"), text("a")), user(response("f", {"output": "x"}))]
    first = parsed({"contents": contents}, tree=tree).history
    contents += [model(text("b")), model(text("c")), *HI]
    second = parsed({"contents": contents}, tree=tree).history
    assert len(second) == len(first) + 2
    assert all(one is other for one, other in zip(first, second[: len(first)], strict=True))


# Tools and generation


def test_declared_functions_become_tools_and_googles_own_are_named() -> None:
    schema = {"type": "object", "properties": {"user_name": {"type": "string"}}, "$defs": {}}
    declared = [
        {"name": "f", "description": "does f", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}},
        {"name": "g", "parametersJsonSchema": schema},
        {"name": "h"},
    ]
    tools = [
        {"functionDeclarations": declared},
        {"googleSearch": {}},
        {"code_execution": {}, "what_else": {}},
        {"urlContext": None},
    ]
    request = parsed({"contents": HI, "tools": tools})
    assert [tool["function"] for tool in request.tools] == [
        {"name": "f", "description": "does f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"name": "g", "parameters": schema},
        {"name": "h", "parameters": {"type": "object", "properties": {}}},
    ]
    assert list(request.dropped_tools) == ["googleSearch", "codeExecution", "other"]


def test_a_schema_becomes_json_schema() -> None:
    given_schema = {
        "type": "OBJECT",
        "nullable": True,
        "property_ordering": ["b", "a_b"],
        "properties": {
            "a_b": {"type": "INTEGER", "format": "int32", "minimum": 1},
            "b": {"type": "ARRAY", "items": {"type": "STRING", "format": "enum", "enum": ["x"]}, "minItems": "1"},
            "c": {"anyOf": [{"type": "NUMBER"}, {"type": "STRING", "format": "date-time"}], "nullable": True},
            "type": {"type": "STRING", "nullable": True, "enum": ["y"], "max_length": "5"},
        },
        "required": ["a_b"],
    }
    body = {"contents": HI, "generationConfig": {"responseMimeType": "application/json", "responseSchema": given_schema}}
    schema = parsed(body).forward["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == ["b", "a_b", "c", "type"]
    assert schema == {
        "type": ["object", "null"],
        "properties": {
            "b": {"type": "array", "items": {"type": "string", "enum": ["x"]}, "minItems": 1},
            "a_b": {"type": "integer", "minimum": 1},
            "c": {"anyOf": [{"type": "number"}, {"type": "string", "format": "date-time"}, {"type": "null"}]},
            "type": {"type": ["string", "null"], "enum": ["y", None], "maxLength": 5},
        },
        "required": ["a_b"],
    }


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        ({}, None),
        ({"mode": "AUTO"}, None),
        ({"mode": "VALIDATED"}, None),
        ({"mode": "NONE"}, "none"),
        ({"mode": "ANY"}, "required"),
        ({"mode": "any", "allowed_function_names": ["f", "g"]}, "required"),
        ({"mode": "ANY", "allowedFunctionNames": ["g"]}, {"type": "function", "function": {"name": "g"}}),
    ],
)
def test_the_calling_mode_becomes_a_tool_choice(config: Any, choice: Any) -> None:
    tools = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]
    request = parsed({"contents": HI, "tools": tools, "toolConfig": {"functionCallingConfig": config}})
    assert request.forward.get("tool_choice") == choice


def test_a_generation_config_is_read_in_either_spelling_and_with_numbers_as_text() -> None:
    config = {
        "temperature": 0.5,
        "top_p": 0.25,
        "topK": 5.0,
        "seed": "7",
        "max_output_tokens": "100",
        "stopSequences": ["END"],
        "candidateCount": 2,
        "presence_penalty": 0.1,
        "frequencyPenalty": -0.5,
        "responseLogprobs": True,
        "logprobs": 3,
        "thinking_config": {"include_thoughts": True, "thinkingBudget": 0, "thinkingLevel": "LOW"},
        "speechConfig": {},
        "responseModalities": ["TEXT"],
    }
    request = parsed({"contents": HI, "generation_config": config, "safetySettings": [], "labels": {"a": "b"}})
    assert request.sampling == {"temperature": 0.5, "top_p": 0.25, "top_k": 5, "seed": 7, "max_tokens": 100, "stop": ["END"]}
    assert (request.model, request.n, request.top_logprobs, request.stream) == ("policy", 2, 3, False)
    assert request.forward == {"presence_penalty": 0.1, "frequency_penalty": -0.5, "reasoning_effort": "low"}
    assert request.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("level", "effort"), [("MINIMAL", "low"), ("low", "low"), ("MEDIUM", "medium"), ("HIGH", "high"), ("XHIGH", "high")]
)
def test_a_thinking_level_becomes_an_effort_that_engines_know(level: str, effort: str) -> None:
    """MINIMAL and XHIGH were passed on, and models that know three efforts refused the call."""
    request = parsed({"contents": HI, "generationConfig": {"thinkingConfig": {"thinkingLevel": level}}})
    assert request.forward == {"reasoning_effort": effort}


def test_json_without_a_schema_is_any_object() -> None:
    request = parsed({"contents": HI, "generationConfig": {"responseMimeType": "application/json"}})
    assert request.forward == {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"cachedContent": "cachedContents/1"},
        {"generationConfig": []},
        {"generationConfig": {"temperature": "hot"}},
        {"generationConfig": {"maxOutputTokens": 0}},
        {"generationConfig": {"topK": 1.5}},
        {"generationConfig": {"candidateCount": 1000}},
        {"generationConfig": {"logprobs": 21, "responseLogprobs": True}},
        {"generationConfig": {"responseModalities": ["AUDIO"]}},
        {"generationConfig": {"responseMimeType": "text/x.enum"}},
        {"generationConfig": {"responseMimeType": "image/png"}},
        {"generationConfig": {"responseSchema": {"type": "STRING"}}},
        {"generationConfig": {"responseMimeType": "application/json", "responseSchema": "STRING"}},
        {"generationConfig": {"thinkingConfig": {"thinkingLevel": "ENDLESS"}}},
        {"tools": "tools"},
        {"tools": [{"functionDeclarations": [{}]}]},
        {"tools": [{"functionDeclarations": [{"name": "f", "parameters": []}]}]},
        {"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}},
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["unknown"]}}},
        {"systemInstruction": 7},
        {"systemInstruction": {"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}},
    ],
)
def test_fields_that_make_no_sense_are_refused_by_name(fields: Any) -> None:
    with pytest.raises(RequestError) as refused:
        parsed({"contents": HI, **fields})
    assert refused.value.status == 400 and refused.value.param


def test_what_is_nested_too_deeply_is_refused() -> None:
    def nest(levels: int) -> Any:
        value: Any = {}
        for _ in range(levels):
            value = {"items": value}
        return value

    for body in (
        {"contents": HI, "tools": [{"functionDeclarations": [{"name": "f", "parameters": nest(300)}]}]},
        {"contents": HI, "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": nest(300)}]}]},
        {"contents": [*HI, model(call("f", nest(300)))]},
        {"contents": [user(response("f", nest(300)))]},
        {"contents": [user({"inlineData": nest(900)})]},
    ):
        with pytest.raises(RequestError, match=r"nested|string|taken"):
            parsed(body)


# Replies


def reply(message: dict[str, Any], *, finish: str = "stop", logprobs: Any = None) -> Reply:
    return Reply(CALL_ID, "policy", 0, 5, [Choice(0, CALL_ID, message, finish, 7, logprobs)])


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked by Google's own type."""
    events = [json.loads(event.removeprefix(b"data: ")) for event in stream.split(b"\n\n")[:-1]]
    for event in events:
        types.GenerateContentResponse.model_validate(event)
    return events


def told(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts without signatures, neighbouring texts of a kind joined, empty ones left out."""
    made: list[dict[str, Any]] = []
    for part in parts:
        shown = {name: value for name, value in part.items() if name != "thoughtSignature"}
        if "text" in shown and made and made[-1].keys() == shown.keys():
            made[-1]["text"] += shown["text"]
        elif shown != {"text": ""}:
            made.append(dict(shown))
    return made


ARGUMENTS = ["", "{}", '{"key": "alpha", "n": 1.0}', "[1]", '{"key": "cut', '{"é": "\\u00e9"}']


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    short = st.text("ab \n{<é", max_size=8)
    made: dict[str, Any] = {"role": "assistant", "content": draw(short)}
    if reasoning := draw(short):
        made["reasoning_content"] = reasoning
    functions = draw(st.lists(st.tuples(st.sampled_from("fg"), st.sampled_from(ARGUMENTS)), max_size=3))
    if functions:
        made["tool_calls"] = [
            {"id": f"call_{CALL_ID}_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(functions)
        ]
    return made


@st.composite
def told_in_pieces(draw: st.DrawFn) -> tuple[dict[str, Any], list[Delta]]:
    """A message, and the deltas of a stream that tells all of it, or some beginning and the rest only at its end."""
    message = draw(messages())
    deltas = [Delta(0, reasoning=piece) for piece in draw(pieces(message.get("reasoning_content", "")))]
    deltas += [Delta(0, piece) for piece in draw(pieces(message["content"]))]
    for position, made in enumerate(message.get("tool_calls", ())):
        first, *rest = draw(pieces(made["function"]["arguments"])) or [""]
        head = {**made, "index": position, "function": {"name": made["function"]["name"], "arguments": first}}
        deltas.append(Delta(0, tool_calls=[head]))
        deltas += [Delta(0, tool_calls=[{"index": position, "function": {"arguments": piece}}]) for piece in rest]
    kept = draw(st.integers(0, len(deltas)))
    complete = message.get("tool_calls") is None or kept == len(deltas)
    return message, deltas if complete else deltas[: min(kept, len(deltas) - 1)]


def pieces(whole: str) -> st.SearchStrategy[list[str]]:
    cuts = st.lists(st.integers(0, len(whole)), max_size=4).map(lambda at: [0, *sorted(at), len(whole)])
    return cuts.map(lambda at: [whole[start:end] for start, end in pairwise(at)])


@settings(max_examples=50)
@given(told_in_pieces(), st.booleans())
def test_any_split_of_a_reply_tells_the_whole_of_it(made: tuple[dict[str, Any], list[Delta]], thoughts: bool) -> None:
    message, deltas = made
    body = {"contents": HI, "generationConfig": {"thinkingConfig": {"includeThoughts": thoughts}}}
    request = parsed(body, method="streamGenerateContent", alt="sse")
    whole = json.loads(DIALECT.render(request, reply(message)))
    stream = DIALECT.open_stream(request, CALL_ID, 0, 5)
    events = chunks_of(
        stream.open() + b"".join(stream.write(copy.deepcopy(delta)) for delta in deltas) + stream.close(reply(message))
    )
    (candidate,) = whole["candidates"]
    said = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    assert told(said) == told(candidate["content"]["parts"])
    assert events[-1]["candidates"][0]["finishReason"] == candidate["finishReason"] == "STOP"
    assert events[-1]["usageMetadata"] == whole["usageMetadata"]
    for parts in (said, candidate["content"]["parts"]):
        assert replayed(parts) == normal(message)


def replayed(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message read from a replay of the parts, which must name its call."""
    seen = counted({"contents": [*HI, model(*parts), *HI]}).history[1]
    assert CALL_ID in seen.minted
    return normal(seen.message)


def normal(message: dict[str, Any]) -> dict[str, Any]:
    """Absent and empty content alike, arguments that are objects as objects."""
    made = {**message, "content": message["content"] or ""}
    if "tool_calls" in message:
        made["tool_calls"] = [(called["id"], called["function"]["name"], arguments(called)) for called in message["tool_calls"]]
    return made


def arguments(called: dict[str, Any]) -> Any:
    written = called["function"]["arguments"]
    try:
        value = json.loads(written) if written.strip() else {}
    except ValueError:
        return written
    return value if isinstance(value, dict) else written


def test_a_function_call_is_told_whole_once_the_next_one_begins() -> None:
    request = parsed({"contents": HI}, method="streamGenerateContent", alt="sse")
    stream = DIALECT.open_stream(request, CALL_ID, 0, 0)
    first = {"index": 0, "id": "call_a_0", "type": "function", "function": {"name": "f", "arguments": '{"k"'}}
    assert stream.write(Delta(0, tool_calls=[first])) == b""
    assert stream.write(Delta(0, tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}])) == b""
    second = {"index": 1, "id": "call_a_1", "type": "function", "function": {"name": "g", "arguments": ""}}
    (event,) = chunks_of(stream.write(Delta(0, tool_calls=[second])))
    (part,) = event["candidates"][0]["content"]["parts"]
    assert part["functionCall"] == {"id": "call_a_0", "name": "f", "args": {"k": 1}}


def test_thoughts_that_are_not_wanted_still_show_signs_of_life() -> None:
    stream = DIALECT.open_stream(parsed({"contents": HI}, method="streamGenerateContent", alt="sse"), CALL_ID, 0, 0)
    shown = [stream.write(Delta(0, reasoning="x")) for _ in range(640)]
    lively = [event for piece in shown if piece for event in chunks_of(piece)]
    assert 5 <= len(lively) <= 20
    assert all(event["candidates"][0]["content"]["parts"] == [{"text": ""}] for event in lively)


def test_reasoning_that_comes_after_the_text_is_sealed_at_the_end() -> None:
    request = parsed({"contents": HI}, method="streamGenerateContent", alt="sse")
    stream = DIALECT.open_stream(request, CALL_ID, 0, 0)
    message = {"role": "assistant", "content": "said", "reasoning_content": "before after"}
    deltas = [Delta(0, reasoning="before "), Delta(0, "said"), Delta(0, reasoning="after")]
    events = chunks_of(b"".join(stream.write(delta) for delta in deltas) + stream.close(reply(message)))
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    assert replayed(parts) == message


@pytest.mark.parametrize(
    ("finish", "shown"),
    [("stop", "STOP"), ("tool_calls", "STOP"), ("length", "MAX_TOKENS"), ("content_filter", "SAFETY"), ("new", "OTHER")],
)
def test_finish_reasons_have_googles_names(finish: str, shown: str) -> None:
    whole = json.loads(DIALECT.render(parsed({"contents": HI}), reply({"role": "assistant", "content": "x"}, finish=finish)))
    types.GenerateContentResponse.model_validate(whole)
    assert whole["candidates"][0]["finishReason"] == shown


def test_cached_tokens_are_told() -> None:
    made = reply({"role": "assistant", "content": "x"})
    made.cached_tokens = 3
    assert json.loads(DIALECT.render(parsed({"contents": HI}), made))["usageMetadata"] == {
        "promptTokenCount": 5,
        "candidatesTokenCount": 7,
        "totalTokenCount": 12,
        "cachedContentTokenCount": 3,
    }


def test_a_stream_without_sse_is_a_json_array_whatever_happens() -> None:
    request = parsed({"contents": HI}, method="streamGenerateContent")
    assert request.stream_type == "application/json"
    message = {"role": "assistant", "content": "said"}
    for end in ("close", "error"):
        stream = DIALECT.open_stream(request, CALL_ID, 0, 0)
        begun = stream.open() + stream.keep_alive() + stream.write(Delta(0, "sa"))
        ended = stream.close(reply(message)) if end == "close" else stream.fail(EngineFailed("broken"))
        chunks = json.loads(begun + ended)
        assert ("error" in chunks[-1]) == (end == "error")
    stream = DIALECT.open_stream(request, CALL_ID, 0, 0)
    assert json.loads(stream.open() + stream.fail(EngineFailed("broken")))[-1]["error"]["code"] == 502


@pytest.mark.parametrize("query", [{"alt": "sse"}, {}])
def test_a_stream_opens_with_an_empty_text_before_any_of_its_own_is_certain(query: dict[str, Any]) -> None:
    stream = DIALECT.open_stream(parsed({"contents": HI}, method="streamGenerateContent", **query), CALL_ID, 0, 0)
    opened = stream.open()
    (chunk,) = chunks_of(opened) if query else json.loads(opened + b"]")
    types.GenerateContentResponse.model_validate(chunk)
    assert chunk["candidates"][0]["content"]["parts"] == [{"text": ""}]
    assert chunk["responseId"] == CALL_ID


# Errors


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (RequestError("x", param="contents"), 400, "INVALID_ARGUMENT"),
        (Unauthorized("x"), 401, "UNAUTHENTICATED"),
        (Forbidden("x"), 403, "PERMISSION_DENIED"),
        (NotFound("x"), 404, "NOT_FOUND"),
        (MethodNotAllowed("x"), 405, "UNIMPLEMENTED"),
        (Conflict("x"), 409, "ABORTED"),
        (TooLarge("x"), 413, "INVALID_ARGUMENT"),
        (UpgradeRefused("x"), 426, "FAILED_PRECONDITION"),
        (VerbatimError("x"), 500, "INTERNAL"),
        (EngineFailed("x"), 502, "UNAVAILABLE"),
        (EngineUnavailable("x"), 503, "UNAVAILABLE"),
    ],
)
def test_errors_have_googles_shape(error: VerbatimError, code: int, status: str) -> None:
    answer = DIALECT.render_error(error)
    body = json.loads(answer.body)["error"]
    assert (answer.status, body["code"], body["status"], body["message"]) == (code, code, status, "x")
    assert ("retry-after" in answer.headers) == (code in (502, 503))
    assert any("RetryInfo" in detail["@type"] for detail in body["details"]) == (code in (502, 503))


def test_an_overflow_is_said_in_googles_words() -> None:
    body = json.loads(DIALECT.render_error(ContextTooLong("x", tokens=900, window=512)).body)["error"]
    assert body["message"] == "The input token count (900) exceeds the maximum number of tokens allowed (512)."
    vague = json.loads(DIALECT.render_error(ContextTooLong("as the engine says")).body)["error"]["message"]
    assert vague.startswith("The input token count exceeds the maximum number of tokens allowed.") and "engine says" in vague


# Junk


NAMES = [
    *("contents", "role", "parts", "text", "thought", "thoughtSignature", "functionCall", "functionResponse", "name", "id"),
    *("args", "response", "inlineData", "mimeType", "data", "systemInstruction", "system_instruction", "tools", "type"),
    *("functionDeclarations", "parameters", "properties", "items", "toolConfig", "functionCallingConfig", "mode", "enum"),
    *("allowedFunctionNames", "generationConfig", "temperature", "topK", "stopSequences", "candidateCount", "nullable"),
    *("responseSchema", "responseMimeType", "thinkingConfig", "thinkingBudget", "generateContentRequest", "logprobs"),
]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["user", "model", "ANY", "STRING", "image/png", "application/json", "\ud800", "call_1_2", ""]),
    st.text(max_size=4),
)
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.one_of(
    st.binary(max_size=40),
    JUNK.map(lambda value: json.dumps(value).encode()),
    # A body that is right but for one field, or for a content that stands before a right one.
    st.tuples(st.sampled_from(["tools", "toolConfig", "generationConfig", "systemInstruction", "contents"]), JUNK).map(
        lambda field: json.dumps({"contents": HI, field[0]: field[1]}).encode()
    ),
    JUNK.map(lambda value: json.dumps({"contents": [{"role": "model", "parts": [value]}, *HI]}).encode()),
    JUNK.map(lambda value: json.dumps({"contents": [*HI, {"parts": value}]}).encode()),
)


@settings(max_examples=50)
@given(BODIES, st.sampled_from(["generateContent", "streamGenerateContent", "countTokens"]))
def test_junk_is_read_or_refused_as_the_callers_fault(body: bytes, method: str) -> None:
    """Anything but a RequestError here would be a 500."""
    try:
        assert parsed(body, method=method).history
    except RequestError as error:
        assert 400 <= DIALECT.render_error(error).status < 500
