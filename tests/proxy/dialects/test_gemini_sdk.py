"""The Google dialect as the google-genai SDK sees it: replies, streams, chats, errors; and every replay comes back to its node."""

from __future__ import annotations

import enum
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.running_service import RunningService, Session

Clients = Callable[..., genai.Client]


SETTINGS = {"max_model_len": 2048, "thinking": "retain", "keepalive_seconds": 0.3, "max_body_bytes": 200_000}


@pytest.fixture
def client_of() -> Iterator[Clients]:
    """`client_of(session, key=, version=)`: the SDK, which knows a URL and a key."""
    # Nothing here speaks TLS, and a client would read the certificates three times, 50 ms each.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    args, async_args = {"verify": context}, {"verify": context, "ssl": context}
    with httpx.Client(verify=False, timeout=120) as http:

        def build(session: Session, *, key: str = "", version: str | None = None) -> genai.Client:
            options = types.HttpOptions(
                base_url=root_of(session),
                api_version=version,
                httpx_client=http,
                client_args=args,
                async_client_args=async_args,
            )
            return genai.Client(api_key=key or session.api_key, http_options=options)

        yield build


def root_of(session: Session) -> str:
    return session.base_url.removesuffix("/v1")


def lookup(key: str) -> str:
    """Looks a key up."""
    return f"value of {key}"


LOOKUP = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="lookup",
            description="Looks a key up.",
            parameters=types.Schema(
                type=types.Type.OBJECT, properties={"key": types.Schema(type=types.Type.STRING)}, required=["key"]
            ),
        )
    ]
)
BY_HAND = types.AutomaticFunctionCallingConfig(disable=True)


def config(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(**fields)


THINKING = types.ThinkingConfig(include_thoughts=True)


def parts(response: types.GenerateContentResponse, index: int = 0) -> Any:
    assert response.candidates
    candidate = response.candidates[index]
    assert candidate.content and candidate.content.role == "model" and candidate.content.parts
    return candidate.content.parts


def joined(chunks: list[types.GenerateContentResponse], index: int = 0) -> list[dict[str, Any]]:
    """The parts of one candidate over all chunks, neighbouring texts joined, signatures left out."""
    made: list[dict[str, Any]] = []
    for chunk in chunks:
        for candidate in chunk.candidates or ():
            if (candidate.index or 0) != index or candidate.content is None:
                continue
            for part in candidate.content.parts or ():
                shown = part.model_dump(exclude_none=True, exclude={"thought_signature"})
                shown.get("function_call", {}).pop("id", None)
                if made and "text" in shown and "text" in made[-1] and made[-1].get("thought") == shown.get("thought"):
                    made[-1]["text"] += shown["text"]
                elif shown.get("text") != "" or not made:
                    made.append(shown)
    # What a stream opens with, before anything is said.
    return made[1:] if len(made) > 1 and made[0] == {"text": ""} else made


def post(session: Session, body: Any, method: str = "generateContent") -> httpx.Response:
    return session.post(f"/v1beta/models/policy:{method}", body)


def straight(session: Session, calls: int) -> None:
    """The session's calls are one conversation: each continues the one before. On the token path each also extends its ids, and
    all are one row; on the chat path the engine writes every history anew."""
    listed = session.calls
    assert len(listed) == calls
    assert [call["parent_id"] for call in listed] == [None, *[call["call_id"] for call in listed[:-1]]]
    rows, accounting = session.trajectories()
    assert accounting["quarantined"] == []
    if listed[0]["api"] == "token":
        assert [call["branch_reason"] for call in listed] == [None] * calls
        assert len(rows) == 1
    else:
        assert {call["branch_reason"] for call in listed} <= {None, "retokenized"}


# Replies


@pytest.mark.parametrize("version", [None, "v1", "v1beta"])
def test_a_reply_has_text_usage_and_names(
    engine: ScriptedEngine, service: RunningService, client_of: Clients, version: str | None
) -> None:
    session = service.session()
    engine.say(engine.family.speak("hello there"))
    response = client_of(session, version=version).models.generate_content(model="policy", contents="hi")
    (call,) = session.calls
    assert response.text == "hello there"
    assert response.candidates and response.candidates[0].finish_reason == types.FinishReason.STOP
    assert (response.model_version, response.response_id) == ("policy", call["call_id"])
    usage = response.usage_metadata
    assert usage and usage.prompt_token_count == len(call["prompt_ids"])
    assert usage.candidates_token_count == len(call["completion_ids"])
    assert usage.total_token_count == len(call["prompt_ids"]) + len(call["completion_ids"])
    assert call["dialect"] == "gemini" and call["messages"] == [{"role": "user", "content": "hi"}]


SAID: list[dict[str, Any]] = [
    {"content": "hello there, fish"},
    {"content": "hello", "reasoning": "think about this"},
    {"calls": [("lookup", {"key": "alpha"}), ("lookup", {"key": "beta"})]},
    {"content": "I look", "reasoning": "step by step", "calls": [("lookup", {"key": "alpha"})]},
    {"content": ""},
]


@pytest.mark.case(38)
@pytest.mark.parametrize("said", SAID)
def test_a_stream_says_what_a_whole_reply_says(
    engine: ScriptedEngine, service: RunningService, client_of: Clients, said: dict[str, Any]
) -> None:
    session = service.session()
    models = client_of(session).models
    asked = config(tools=[LOOKUP], thinking_config=THINKING, automatic_function_calling=BY_HAND)
    engine.say(*[engine.family.speak(**said)] * 2)
    whole = models.generate_content(model="policy", contents="hi", config=asked)
    chunks = list(models.generate_content_stream(model="policy", contents="hi", config=asked))
    assert joined(chunks) == joined([whole])
    assert next(iter(joined([whole]))).get("thought") == (True if "reasoning" in said else None)
    assert whole.candidates and chunks[-1].candidates
    assert chunks[-1].candidates[0].finish_reason == whole.candidates[0].finish_reason == types.FinishReason.STOP
    assert all(chunk.candidates and not chunk.candidates[0].finish_reason for chunk in chunks[:-1])
    assert chunks[-1].usage_metadata == whole.usage_metadata
    assert {chunk.response_id for chunk in chunks} == {session.calls[1]["call_id"]}
    assert session.calls[0]["reply"] | {"tool_calls": []} == session.calls[1]["reply"] | {"tool_calls": []}


def test_thoughts_are_sent_only_when_asked_for(engine: ScriptedEngine, service: RunningService, client_of: Clients) -> None:
    session = service.session()
    models = client_of(session).models
    engine.say(*[engine.family.speak("hello", reasoning="a thought")] * 4)
    for asked, thoughts in ((config(), 0), (config(thinking_config=THINKING), 1)):
        response = models.generate_content(model="policy", contents="hi", config=asked)
        assert [part.thought for part in parts(response)] == [True] * thoughts + [None]
        chunks = list(models.generate_content_stream(model="policy", contents="hi", config=asked))
        assert any(part.get("thought") for part in joined(chunks)) == bool(thoughts)
    assert all("a thought" in call["reply"]["reasoning_content"] for call in session.calls)


def test_a_text_arrives_in_pieces_while_it_is_sampled(
    engine: ScriptedEngine, service: RunningService, client_of: Clients
) -> None:
    session, gate = service.session(), threading.Event()
    engine.say(Say("fishing in the river " * 8 + "end", gate=gate, gate_after=12))
    stream = client_of(session).models.generate_content_stream(model="policy", contents="hi")
    first = ""
    for chunk in stream:
        first += chunk.text or ""
        if first:
            break
    assert first and [call["completion_ids"] for call in session.calls] == [[]]
    gate.set()
    rest = "".join(chunk.text or "" for chunk in stream)
    assert first + rest == session.calls[0]["reply"]["content"]


class Weather(BaseModel):
    city: str
    degrees: int | None = None


class Sky(enum.Enum):
    CLEAR = "clear"
    CLOUDY = "cloudy"


def test_a_response_schema_becomes_json_schema_and_the_reply_is_parsed(
    engine: ScriptedEngine, service: RunningService, client_of: Clients
) -> None:
    engine.say(engine.family.speak('{"city": "Paris", "degrees": 20}'))
    asked = config(response_mime_type="application/json", response_schema=Weather)
    response = client_of(service.session()).models.generate_content(model="policy", contents="hi", config=asked)
    assert response.parsed == Weather(city="Paris", degrees=20)
    sent = next(request.body["response_format"] for request in engine.received if request.body and "messages" in request.body)
    schema = sent["json_schema"]["schema"]
    assert sent["type"] == "json_schema" and schema["type"] == "object" and schema["required"] == ["city"]
    assert schema["properties"]["city"]["type"] == "string"
    assert schema["properties"]["degrees"]["type"] == ["integer", "null"]


def test_an_enum_is_sampled_bare(engine: ScriptedEngine, service: RunningService, client_of: Clients) -> None:
    engine.say(engine.family.speak("cloudy"))
    asked = config(response_mime_type="text/x.enum", response_schema=Sky)
    response = client_of(service.session()).models.generate_content(model="policy", contents="hi", config=asked)
    assert response.parsed == Sky.CLOUDY
    assert engine.last.sampling["structured_outputs"] == {"choice": ["clear", "cloudy"]}


@pytest.mark.parametrize("streamed", [False, True])
def test_each_candidate_is_a_call_and_a_replay_names_its_own(
    engine: ScriptedEngine, service: RunningService, client_of: Clients, streamed: bool
) -> None:
    """The candidates say the same: only the signature tells which one the chat goes on from."""
    session = service.session()
    models = client_of(session).models
    asked = config(candidate_count=3)
    engine.say(*[engine.family.speak("the same")] * 3)
    if streamed:
        chunks = list(models.generate_content_stream(model="policy", contents="hi", config=asked))
    else:
        chunks = [models.generate_content(model="policy", contents="hi", config=asked)]
    ids = [call["call_id"] for call in session.calls]
    assert len(ids) == 3
    for index in range(3):
        assert "".join(part["text"] for part in joined(chunks, index)) == "the same"
        said = [candidate for chunk in chunks for candidate in chunk.candidates or () if (candidate.index or 0) == index]
        history: list[Any] = [types.UserContent("hi"), *[candidate.content for candidate in said], types.UserContent("more")]
        models.generate_content(model="policy", contents=history)
        assert session.calls[-1]["parent_id"] == ids[index]
        assert session.calls[-1]["branch_reason"] in (None, "retokenized")


@pytest.mark.parametrize("top", [None, 2])
def test_logprobs_are_those_that_were_sampled(
    engine: ScriptedEngine, service: RunningService, client_of: Clients, top: int | None
) -> None:
    session = service.session()
    models = client_of(session).models
    asked = config(response_logprobs=True, logprobs=top)
    engine.say(*[engine.family.speak("hello there")] * 2)
    whole = models.generate_content(model="policy", contents="hi", config=asked)
    chunks = list(models.generate_content_stream(model="policy", contents="hi", config=asked))
    call = session.calls[0]
    assert whole.candidates and whole.candidates[0].logprobs_result
    chosen = whole.candidates[0].logprobs_result.chosen_candidates or []
    assert [token.log_probability for token in chosen] == call["logprobs"]
    assert whole.candidates[0].avg_logprobs == pytest.approx(sum(call["logprobs"]) / len(chosen))
    assert bool(whole.candidates[0].logprobs_result.top_candidates) == (top is not None)
    streamed = [
        token
        for chunk in chunks
        for candidate in chunk.candidates or ()
        for token in (candidate.logprobs_result.chosen_candidates if candidate.logprobs_result else None) or ()
    ]
    assert [token.token for token in streamed] == [token.token for token in chosen]


# Chats and replays


@pytest.mark.case(37)
def test_a_chat_with_automatic_function_calling_is_one_conversation(
    engine: ScriptedEngine, service: RunningService, client_of: Clients
) -> None:
    session = service.session()
    chat = client_of(session).chats.create(model="policy", config=config(tools=[lookup], system_instruction="Be kind."))
    engine.say(
        engine.family.speak("I look", reasoning="two keys", calls=[("lookup", {"key": "a"}), ("lookup", {"key": "b"})]),
        engine.family.speak("", calls=[("lookup", {"key": "c"})]),
        engine.family.speak("all found"),
        engine.family.speak("you are welcome"),
    )
    assert chat.send_message("find them").text == "all found"
    assert chat.send_message("thanks").text == "you are welcome"
    straight(session, 4)
    prompt = engine.last.prompt
    assert "Be kind." in prompt
    assert prompt.index("value of a") < prompt.index("value of b") < prompt.index("value of c") < prompt.index("thanks")


def test_a_streamed_chat_keeps_every_turn_and_is_one_conversation(
    engine: ScriptedEngine, service: RunningService, client_of: Clients
) -> None:
    """The SDK keeps one content per chunk, and drops a turn in which any chunk had no part."""
    session = service.session()
    asked = config(tools=[lookup], thinking_config=THINKING)
    chat = client_of(session).chats.create(model="policy", config=asked)
    engine.say(
        engine.family.speak("I look", reasoning="two keys", calls=[("lookup", {"key": "a"}), ("lookup", {"key": "b"})]),
        engine.family.speak("all found, and more of it, fishing in the river", reasoning="done"),
        engine.family.speak(""),
        engine.family.speak("you are welcome"),
    )
    assert "all found" in "".join(chunk.text or "" for chunk in chat.send_message_stream("find them"))
    for question in ("say nothing", "thanks"):
        list(chat.send_message_stream(question))
    straight(session, 4)
    assert [content.role for content in chat.get_history(curated=True)].count("user") == 4


def as_sent(contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return contents


def without(*dropped: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """A client that drops thoughts, signatures or ids when it writes a history."""

    def habit(contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = []
        for content in contents:
            kept = []
            for part in content["parts"]:
                shown = json.loads(json.dumps(part))
                if "signatures" in dropped:
                    shown.pop("thoughtSignature", None)
                if "ids" in dropped:
                    for kind in ("functionCall", "functionResponse"):
                        shown.get(kind, {}).pop("id", None)
                if not (shown.get("thought") and "thoughts" in dropped):
                    kept.append(shown)
            made.append({**content, "parts": kept})
        return made

    return habit


def gemini_cli(contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins text parts into the first, drops thoughts and empty texts, and signs a first call that has no signature."""
    made = []
    for content in without("thoughts")(contents):
        kept: list[dict[str, Any]] = []
        for part in content["parts"]:
            if "text" in part and kept and kept[-1].get("text"):
                kept[-1]["text"] += part["text"]
            elif part != {"text": ""}:
                kept.append(part)
        first = next((part for part in kept if "functionCall" in part), {})
        first.setdefault("thoughtSignature", "skip_thought_signature_validator")
        made.append({**content, "parts": kept})
    return made


def snake_case(contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    spelt = json.dumps(contents)
    for name, snake in (
        ("functionCall", "function_call"),
        ("functionResponse", "function_response"),
        ("thoughtSignature", "thought_signature"),
    ):
        spelt = spelt.replace(f'"{name}"', f'"{snake}"')
    plain: list[dict[str, Any]] = json.loads(spelt)
    return plain


HABITS = {
    "as sent": as_sent,
    "no thoughts": without("thoughts"),
    "no signatures": without("signatures"),
    "no thoughts, no signatures": without("thoughts", "signatures"),
    "no ids": without("ids"),
    "no ids, no thoughts": without("ids", "thoughts"),
    "nothing but what was said": without("ids", "thoughts", "signatures"),
    "gemini-cli": gemini_cli,
    "snake case": snake_case,
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("habit", HABITS)
def test_a_replay_comes_back_to_its_node_whatever_the_client_drops(
    engine: ScriptedEngine, service: RunningService, habit: str, streamed: bool
) -> None:
    session = service.session()
    engine.say(
        engine.family.speak(
            "I look it up, step by step", reasoning="two keys", calls=[("lookup", {"key": "a"}), ("lookup", {"key": "b"})]
        ),
        engine.family.speak("", reasoning="one more", calls=[("lookup", {"key": "c"})]),
        engine.family.speak("all found", reasoning="done"),
        engine.family.speak("bye"),
    )
    tools = [json.loads(LOOKUP.model_dump_json(by_alias=True, exclude_none=True))]
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "find them"}]}]
    for turn in range(4):
        body: dict[str, Any] = {"contents": HABITS[habit](contents), "tools": tools}
        body["generationConfig"] = {"thinkingConfig": {"includeThoughts": True}}
        said = replied(session, body, streamed)
        contents.append({"role": "model", "parts": said})
        responses = [answer(part["functionCall"]) for part in said if "functionCall" in part]
        contents.append({"role": "user", "parts": responses or [{"text": f"and {turn}"}]})
    straight(session, 4)


def replied(session: Session, body: Any, streamed: bool) -> list[dict[str, Any]]:
    """The parts of the reply, as they stand on the wire."""
    if not streamed:
        found: list[dict[str, Any]] = post(session, body).raise_for_status().json()["candidates"][0]["content"]["parts"]
        return found
    answer = post(session, body, "streamGenerateContent?alt=sse").raise_for_status()
    events = [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")]
    return [part for event in events for part in event["candidates"][0]["content"]["parts"]]


def answer(call: dict[str, Any]) -> dict[str, Any]:
    response = {"output": f"value of {call['args']['key']}"}
    return {"functionResponse": {"id": call["id"], "name": call["name"], "response": response}}


def test_thoughts_that_a_client_drops_are_read_from_the_signature(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """Where the turn before was edited nothing can be looked up: the reasoning that the signature carries is rendered."""
    session = token_service.session()
    engine.say(engine.family.speak("hello", reasoning="a secret thought", calls=[("lookup", {"key": "a"})]))
    tools = [json.loads(LOOKUP.model_dump_json(by_alias=True, exclude_none=True))]
    said = replied(session, {"contents": [{"parts": [{"text": "hi"}]}], "tools": tools}, False)
    assert not any(part.get("thought") for part in said)
    edited = [{"parts": [{"text": "another question"}]}, {"role": "model", "parts": said}]
    call = next(part["functionCall"] for part in said if "functionCall" in part)
    replied(session, {"contents": [*edited, {"parts": [answer(call)]}], "tools": tools}, False)
    assert session.calls[1]["branch_reason"] == "new_root"
    assert "a secret thought" in engine.last.prompt


def test_identical_siblings_are_told_apart_by_their_signatures(
    engine: ScriptedEngine, service: RunningService, client_of: Clients
) -> None:
    session = service.session()
    models = client_of(session).models
    engine.say(*[engine.family.speak("the same")] * 3)
    replies = [models.generate_content(model="policy", contents="hi") for _ in range(3)]
    ids = [call["call_id"] for call in session.calls]
    for chosen in (1, 0, 2):
        history: list[Any] = [types.UserContent("hi"), replies[chosen].candidates[0].content, types.UserContent("go on")]
        models.generate_content(model="policy", contents=history)
        assert session.calls[-1]["parent_id"] == ids[chosen]


@pytest.mark.parametrize("streamed", [False, True])
def test_arguments_that_are_no_object_come_back_as_they_were(
    engine: ScriptedEngine, service: RunningService, client_of: Clients, streamed: bool
) -> None:
    session = service.session()
    chat = client_of(session).chats.create(model="policy", config=config(tools=[LOOKUP], automatic_function_calling=BY_HAND))
    engine.say(engine.family.speak("", calls=[("lookup", "no object"), ("lookup", {"key": 1.0})]), engine.family.speak("sorry"))
    if streamed:
        replies = list(chat.send_message_stream("find it"))
    else:
        replies = [chat.send_message("find it")]
    calls = [call for reply in replies for call in reply.function_calls or ()]
    assert [call.args for call in calls] == [{"__unparsedToolInput": '"no object"'}, {"key": 1.0}]
    chat.send_message([types.Part.from_function_response(name="lookup", response={"error": "what?"}) for _ in calls])
    straight(session, 2)


# What is asked beside calls


@pytest.mark.case(41)
def test_counting_and_listing_record_nothing(engine: ScriptedEngine, service: RunningService, client_of: Clients) -> None:
    session = service.session()
    for version in ("v1", "v1beta"):
        models = client_of(session, version=version).models
        counted = models.count_tokens(model="policy", contents=["hi", "there"])
        assert counted.total_tokens and counted.total_tokens > 2
        listed = list(models.list())
        assert [(model.name, model.input_token_limit) for model in listed] == [("models/policy", 2048)]
        assert (
            models.get(model="policy") == listed[0].model_copy(update={"sdk_http_response": None})
            or models.get(model="policy").name == "models/policy"
        )
    assert session.calls == [] and not engine.generations


def test_tokens_are_counted_as_the_call_will_have_them(engine: ScriptedEngine, token_service: RunningService) -> None:
    session = token_service.session()
    tools = [json.loads(LOOKUP.model_dump_json(by_alias=True, exclude_none=True))]
    body = {"contents": [{"parts": [{"text": "hi"}]}], "tools": tools, "systemInstruction": {"parts": [{"text": "Be kind."}]}}
    inner = {"generateContentRequest": {"model": "models/policy", **body}}
    counted = post(session, inner, "countTokens").raise_for_status().json()
    usage = post(session, body).raise_for_status().json()["usageMetadata"]
    assert counted == {"totalTokens": usage["promptTokenCount"]}
    bare = post(session, {"contents": body["contents"]}, "countTokens").raise_for_status().json()
    assert bare["totalTokens"] < counted["totalTokens"]


# What goes wrong


def refusal(client: genai.Client, *, model: str = "policy", contents: Any = "hi", **fields: Any) -> errors.APIError:
    with pytest.raises(errors.APIError) as whole:
        client.models.generate_content(model=model, contents=contents, config=config(**fields))
    with pytest.raises(errors.APIError) as streamed:
        list(client.models.generate_content_stream(model=model, contents=contents, config=config(**fields)))
    assert (whole.value.code, whole.value.status) == (streamed.value.code, streamed.value.status)
    assert whole.value.details["error"]["code"] == whole.value.code
    return whole.value


def test_what_the_caller_got_wrong_is_a_client_error(
    engine: ScriptedEngine, service: RunningService, client_of: Clients
) -> None:
    session = service.session()
    client = client_of(session)
    unknown = refusal(client_of(session, key="nonsense"))
    assert (type(unknown), unknown.code, unknown.status) == (errors.ClientError, 401, "UNAUTHENTICATED")
    wrong = refusal(client, cached_content="cachedContents/one")
    assert (wrong.code, wrong.status) == (400, "INVALID_ARGUMENT")
    assert "cachedContent" in str(wrong.message)
    assert wrong.details["error"]["details"][1]["fieldViolations"][0]["field"] == "cachedContent"
    assert session.calls == []
    session.close("failed")
    closed = refusal(client)
    assert (closed.code, closed.status) == (409, "ABORTED")
    service.request("DELETE", f"/sessions/{session.session_id}")
    missing = refusal(client)
    assert (missing.code, missing.status) == (404, "NOT_FOUND")


def test_a_stream_that_breaks_off_is_no_finished_reply(
    engine: ScriptedEngine, service: RunningService, client_of: Clients
) -> None:
    session = service.session()
    chat = client_of(session).chats.create(model="policy")
    engine.say(Say("fishing in the river and more of it", break_after=6))
    told: list[types.GenerateContentResponse] = []
    with pytest.raises(errors.ServerError) as broken:
        told.extend(chunk for chunk in chat.send_message_stream("hi"))
    assert (broken.value.code, broken.value.status) == (502, "UNAVAILABLE")
    assert chat.get_history(curated=True) == []
    engine.say(engine.family.speak("whole"))
    assert "".join(chunk.text or "" for chunk in chat.send_message_stream("hi")) == "whole"
    assert [call["finish_reason"] for call in session.calls] == ["abort", "stop"]


def test_an_error_in_a_stream_stands_without_data_where_googles_javascript_sdk_raises_it(
    engine: ScriptedEngine, service: RunningService
) -> None:
    session = service.session()
    engine.say(Say("fishing in the river and more of it", break_after=6))
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    answer = post(session, body, "streamGenerateContent?alt=sse")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    *events, last = answer.text.split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    error = json.loads(last)["error"]
    assert (error["code"], error["status"]) == (502, "UNAVAILABLE")


def test_a_slow_engine_is_waited_for_and_the_chat_keeps_the_turn(
    engine: ScriptedEngine, service: RunningService, client_of: Clients
) -> None:
    """Signs of life are chunks with an empty text: a chunk without candidates would make the SDK's chat forget the turn."""
    session, gate = service.session(), threading.Event()
    chat = client_of(session).chats.create(model="policy")
    engine.say(Say(engine.family.speak("at last"), gate=gate), engine.family.speak("good"))
    stream = chat.send_message_stream("hi")
    lively = [next(stream) for _ in range(2)]
    assert [chunk.text for chunk in lively] == ["", ""]
    gate.set()
    assert "".join(chunk.text or "" for chunk in stream) == "at last"
    assert chat.send_message("more").text == "good"
    straight(session, 2)


# A stream without alt=sse


def test_without_sse_a_stream_is_one_json_array(engine: ScriptedEngine, service: RunningService) -> None:
    session, gate = service.session(), threading.Event()
    engine.say(Say(engine.family.speak("hello there"), gate=gate))
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    threading.Timer(0.8, gate.set).start()
    answer = post(session, body, "streamGenerateContent")
    assert answer.headers["content-type"] == "application/json"
    chunks = [types.GenerateContentResponse.model_validate(chunk) for chunk in answer.json()]
    assert "".join(part["text"] for part in joined(chunks)) == "hello there"
    assert chunks[-1].usage_metadata and len(chunks) > 2
    engine.say(Say("fishing in the river and more of it", break_after=6))
    broken = post(session, body, "streamGenerateContent").json()
    assert broken[-1]["error"]["code"] == 502
