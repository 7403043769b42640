"""Anthropic's own SDK against the service: what it sends is understood, what it gets it parses, what it replays finds its call."""

from __future__ import annotations

import base64
import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, DefaultHttpxClient
from anthropic.types import RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from proxy.dialects.base import Seals
from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine
from tests.support.engine.scripted_images import picture
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, wait_until

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOLS: list[Any] = [
    {
        "name": "lookup",
        "description": "Looks a key up.",
        "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    }
]
SHOWN: Any = {"type": "adaptive"}


SETTINGS = {"max_model_len": 2048, "max_body_bytes": 60_000}


class Harness:
    """An agent on the anthropic SDK: a base URL, a key, and its own history."""

    def __init__(self, session: Session, client: Anthropic) -> None:
        self.session, self.client = session, client

    def ask(self, messages: list[Any] | str, *, streamed: bool = False, **fields: Any) -> Any:
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        given: dict[str, Any] = {"model": "policy", "max_tokens": 200, "messages": asked, **fields}
        if not streamed:
            return self.client.messages.create(**given)
        with self.client.messages.stream(**given) as stream:
            return stream.get_final_message()

    def said(self, messages: list[Any] | str, **fields: Any) -> dict[str, Any]:
        """The reply as the SDK's users put it back into their history."""
        return {"role": "assistant", "content": self.ask(messages, **fields).model_dump(exclude_none=True)["content"]}

    def exact(self) -> list[dict[str, Any]]:
        """The session's calls, each the continuation of the one before it, in one row."""
        calls = self.session.calls
        assert [call["parent_id"] for call in calls] == [None, *(call["call_id"] for call in calls[:-1])]
        assert [call["branch_reason"] for call in calls] == [None] * len(calls)
        rows, accounting = self.session.trajectories()
        assert len(rows) == 1 and accounting["exported_tokens"] == accounting["sampled_tokens"]
        return calls


@contextmanager
def harness(service: RunningService, *, max_retries: int = 0, **fields: Any) -> Iterator[Harness]:
    session = service.session(**fields)
    root = session.base_url.removesuffix("/v1")
    http = DefaultHttpxClient(verify=False)
    with Anthropic(base_url=root, api_key=session.api_key, max_retries=max_retries, timeout=120, http_client=http) as client:
        yield Harness(session, client)


def post(session: Session, body: Any, path: str = "/messages") -> httpx.Response:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    headers = {"content-type": "application/json", "x-api-key": session.api_key, "anthropic-version": "2023-06-01"}
    return plain_http.post(session.base_url + path, content=content, headers=headers)


def events(
    session: Session, body: Any, on_event: Callable[[dict[str, Any]], None] = lambda event: None
) -> list[dict[str, Any]]:
    """The events of a streamed reply, each one checked: its name, and its shape by the SDK's own types. `on_event` gets each as soon as
    it comes."""
    url, key = f"{session.base_url}/messages", {"x-api-key": session.api_key}
    body = {"model": "policy", "max_tokens": 200, "stream": True, **body}
    found = []
    with httpx.stream("POST", url, json=body, headers=key, verify=False, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        # An event is three lines: its name, its data and an empty one.
        for name, data, empty in zip(lines, lines, lines, strict=True):
            event = json.loads(data.removeprefix("data: "))
            assert (name, empty) == (f"event: {event['type']}", "")
            if event["type"] not in ("ping", "error"):
                EVENT.validate_python(event, strict=True)
            found.append(event)
            on_event(event)
    return found


def result(use: Any, content: Any, **fields: Any) -> dict[str, Any]:
    identifier = use["id"] if isinstance(use, dict) else use.id
    return {"type": "tool_result", "tool_use_id": identifier, "content": content, **fields}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


# What a reply looks like


@pytest.mark.parametrize("streamed", [False, True])
def test_a_text_reply(service: RunningService, engine: ScriptedEngine, streamed: bool) -> None:
    engine.say("hello world")
    with harness(service) as agent:
        reply = agent.ask("q", streamed=streamed)
        (call,) = agent.session.calls
    assert reply.id == f"msg_{call['call_id']}" and reply.type == "message" and reply.role == "assistant"
    assert [block.model_dump(exclude_none=True) for block in reply.content if block.type == "text"] == [text("hello world")]
    assert (reply.model, reply.stop_reason, reply.stop_sequence) == ("policy", "end_turn", None)
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == len(call["prompt_ids"])
    assert reply.usage.output_tokens == len(call["completion_ids"])
    assert call["dialect"] == "messages"


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_is_shown_where_it_was_asked_for(service: RunningService, engine: ScriptedEngine, streamed: bool) -> None:
    said = engine.family.speak("answer", reasoning="step by step")
    engine.say(said, said, said, said)
    with harness(service) as agent:
        shown = agent.ask("q", streamed=streamed, thinking=SHOWN)
        omitted = agent.ask("q", streamed=streamed, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
        unasked = agent.ask("q", streamed=streamed)
        off = agent.ask("q", streamed=streamed, thinking={"type": "disabled"})
        calls = agent.session.calls
    for reply, thinking in ((shown, "\nstep by step\n"), (omitted, "")):
        thought, answer = reply.content
        assert (thought.type, thought.thinking, answer.text.strip()) == ("thinking", thinking, "answer")
        assert Seals().open(thought.signature) == (reply.id.removeprefix("msg_"), "")
    for reply in (unasked, off):
        assert [block.type for block in reply.content] == ["text"]
    assert all(call["reply"]["reasoning_content"] == "\nstep by step\n" for call in calls), "the record keeps what was thought"
    asked = [received.body for received in engine.received if received.path.endswith(("/render", "/chat/completions"))]
    assert any(body.get("chat_template_kwargs") == {"enable_thinking": False} for body in asked)


@pytest.mark.case(37)
@pytest.mark.parametrize("streamed", [False, True])
def test_parallel_tool_calls(service: RunningService, engine: ScriptedEngine, streamed: bool) -> None:
    engine.say(engine.family.speak("Looking.", calls=[("lookup", {"key": "alpha"}), ("lookup", {"key": "beta"})]))
    with harness(service) as agent:
        reply = agent.ask("q", streamed=streamed, tools=TOOLS)
        (call,) = agent.session.calls
    said, *uses = reply.content
    assert said.text.strip() == "Looking."
    assert [use.id for use in uses] == [f"toolu_{call['call_id']}_{position}" for position in (0, 1)]
    assert [(use.name, use.input) for use in uses] == [("lookup", {"key": "alpha"}), ("lookup", {"key": "beta"})]
    assert reply.stop_reason == "tool_use"
    assert [made["id"] for made in call["reply"]["tool_calls"]] == [f"call_{call['call_id']}_{position}" for position in (0, 1)]


def test_a_tool_without_arguments_has_an_empty_input(service: RunningService, engine: ScriptedEngine) -> None:
    tools = [{"name": "now", "input_schema": {"type": "object"}}]
    engine.say(*[engine.family.speak(calls=[("now", {})])] * 2)
    with harness(service) as agent:
        assert [agent.ask("q", tools=tools, streamed=streamed).content[-1].input for streamed in (False, True)] == [{}, {}]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_sequence_is_named(service: RunningService, engine: ScriptedEngine, streamed: bool) -> None:
    engine.say("first second third")
    with harness(service) as agent:
        reply = agent.ask("q", streamed=streamed, stop_sequences=["second"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "second")
    assert [block.text.strip() for block in reply.content] == ["first"]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_empty_reply_has_no_content(service: RunningService, engine: ScriptedEngine, streamed: bool) -> None:
    engine.say(Say(token_ids=[engine.family.end_id]))
    with harness(service) as agent:
        reply = agent.ask("q", streamed=streamed)
        assert (reply.content, reply.stop_reason, reply.usage.output_tokens) == ([], "end_turn", 1)
        engine.say("again")
        agent.ask([user(text("q")), {"role": "assistant", "content": []}, user(text("go on"))])
        agent.exact()


class Answer(BaseModel):
    value: int


@pytest.mark.parametrize("streamed", [False, True])
def test_structured_output(service: RunningService, engine: ScriptedEngine, streamed: bool) -> None:
    engine.say('{"value": 3}')
    with harness(service) as agent:
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 50, "messages": [user(text("q"))], "output_format": Answer}
        if streamed:
            with agent.client.messages.stream(**asked) as stream:
                reply = stream.get_final_message()
        else:
            reply = agent.client.messages.parse(**asked)
    assert reply.parsed_output == Answer(value=3)
    sent = next(received.body for received in engine.received if "response_format" in (received.body or {}))
    assert sent["response_format"]["json_schema"]["schema"]["required"] == ["value"]


def test_sampling_and_effort_reach_the_engine(token_service: RunningService, engine: ScriptedEngine) -> None:
    engine.say("ok")
    with harness(token_service) as agent:
        body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
        agent.ask("q", output_config={"effort": "xhigh"}, stop_sequences=["never"], extra_body=body, max_tokens=9)
        (call,) = agent.session.calls
    sampling = engine.last.sampling
    assert {key: sampling[key] for key in ("temperature", "top_p", "top_k", "max_tokens", "stop")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "max_tokens": 9,
        "stop": ["never"],
    }
    assert call["sampling"]["temperature"] == 0.5
    rendered = next(received.body for received in engine.received if received.path.endswith("/render"))
    assert rendered["reasoning_effort"] == "high"


@pytest.mark.case(38)
def test_events_come_in_order_and_in_the_vendors_shapes(service: RunningService, engine: ScriptedEngine) -> None:
    engine.say(engine.family.speak("Looking.", reasoning="hm", calls=[("lookup", {"key": "alpha"})]))
    with harness(service) as agent:
        found = events(agent.session, {"messages": [user(text("q"))], "thinking": SHOWN, "tools": TOOLS})
        (call,) = agent.session.calls
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
    ]
    kinds = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta" and event["index"] == 0]
    assert kinds[-1] == "signature_delta" and set(kinds[:-1]) == {"thinking_delta"}
    usage = found[-2]["usage"]
    assert usage["output_tokens"] == len(call["completion_ids"])
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(call["prompt_ids"])
    if service.settings.engine_api == "token":
        assert found[0]["message"]["usage"]["input_tokens"] == len(call["prompt_ids"])


def test_a_slow_reply_is_kept_alive_by_pings(redis_server: RedisServer, engine: ScriptedEngine) -> None:
    """The engine says nothing before three of them have come."""
    gate, kinds = threading.Event(), []

    def count(event: dict[str, Any]) -> None:
        kinds.append(event["type"])
        if kinds.count("ping") == 3:
            gate.set()

    engine.say(Say("hello", gate=gate))
    with (
        RunningService(engine.url, redis_server.url, engine_api="token", keepalive_seconds=0.05) as service,
        harness(service) as agent,
    ):
        events(agent.session, {"messages": [user(text("q"))]}, count)
    assert kinds.count("ping") >= 3 and kinds[-1] == "message_stop"


# What a replay comes back to


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_a_conversation_with_thinking_and_tools_stays_one_row(
    token_service: RunningService, engine: ScriptedEngine, streamed: bool, shown: bool
) -> None:
    speak = engine.family.speak
    engine.say(
        speak("Looking.", reasoning="a key", calls=[("lookup", {"key": "alpha"}), ("lookup", {"key": "beta"})]),
        speak("", reasoning="another", calls=[("lookup", {"key": "gamma"})]),
        speak("Done.", reasoning="enough"),
    )
    messages: list[Any] = [user(text("q"))]
    asked: dict[str, Any] = {
        "tools": TOOLS,
        "streamed": streamed,
        "system": "Be helpful.",
        **({"thinking": SHOWN} if shown else {}),
    }
    with harness(token_service) as agent:
        for contents in (["one", [text("two"), text("three")]], ["four"]):
            messages.append(agent.said(messages, **asked))
            uses = [block for block in messages[-1]["content"] if block["type"] == "tool_use"]
            messages.append(user(*[result(use, content) for use, content in zip(uses, contents, strict=True)]))
        agent.ask(messages, **asked)
        calls = agent.exact()
        (row,), _ = agent.session.trajectories()
    assert [call["projection"] for call in calls] == ["", *["exact" if shown else "reasoning_dropped"] * 2]
    results = calls[1]["messages"][-2:]
    assert [message["content"] for message in results] == ["one", "two\nthree"]
    assert [message["tool_call_id"] for message in results] == [f"call_{calls[0]['call_id']}_{position}" for position in (0, 1)]
    assert row["token_ids"] == calls[-1]["prompt_ids"] + calls[-1]["completion_ids"]


def test_identical_siblings_are_told_apart_by_signature_and_by_tool_id(
    token_service: RunningService, engine: ScriptedEngine
) -> None:
    thought, called = engine.family.speak("hello", reasoning="hm"), engine.family.speak("", calls=[("lookup", {"key": "a"})])
    for said, asked in ((thought, {"thinking": SHOWN}), (called, {"tools": TOOLS})):
        engine.say(said, said, said, "next")
        with harness(token_service) as agent:
            replies = [agent.said("q", **asked) for _ in range(3)]
            uses = [block for block in replies[1]["content"] if block["type"] == "tool_use"]
            following = user(*[result(use, "x") for use in uses]) if uses else user(text("more"))
            agent.ask([user(text("q")), replies[1], following], **asked)
            calls = agent.session.calls
        assert calls[3]["parent_id"] == calls[1]["call_id"] and calls[3]["projection"] == "exact"


def test_thinking_that_the_harness_drops_still_names_its_call(token_service: RunningService, engine: ScriptedEngine) -> None:
    said = engine.family.speak("", reasoning="hm", calls=[("lookup", {"key": "a"})])
    engine.say(said, "done")
    with harness(token_service) as agent:
        reply = agent.said("q", tools=TOOLS, thinking={"type": "adaptive", "display": "omitted"})
        assert reply["content"][0]["thinking"] == ""
        agent.ask([user(text("q")), reply, user(result(reply["content"][-1], "x"))], tools=TOOLS, thinking=SHOWN)
        assert [call["projection"] for call in agent.exact()] == ["", "reasoning_dropped"]


def test_a_replay_without_its_white_space_is_still_the_reply(service: RunningService, engine: ScriptedEngine) -> None:
    """The vendor refuses text blocks of white space alone, so its clients leave them out; others trim their text."""
    engine.say(engine.family.speak("\n\n", calls=[("lookup", {"key": "a"})]), "\n\nsaid \n", "end")
    with harness(service) as agent:
        first = agent.said("q", tools=TOOLS, streamed=True)
        first["content"] = [block for block in first["content"] if block["type"] != "text" or block["text"].strip()]
        messages: list[Any] = [user(text("q")), first, user(result(first["content"][-1], "x"))]
        second = agent.said(messages, tools=TOOLS)
        second["content"][0]["text"] = second["content"][0]["text"].strip()
        agent.ask([*messages, second, user(text("more"))], tools=TOOLS)
        calls = agent.session.calls
    assert [call["parent_id"] for call in calls] == [None, *(call["call_id"] for call in calls[:-1])]
    assert calls[2]["projection"] == "trimmed"
    if service.settings.engine_api == "token":
        assert {call["branch_reason"] for call in calls} == {None}


@pytest.mark.case(21)
@pytest.mark.parametrize("header", [[], ["cch=1;"], ["cch=1;", "cch=22;"]])
@pytest.mark.parametrize("placed", ["first", "last"])
def test_the_volatile_header_changes_nothing(
    token_service: RunningService, engine: ScriptedEngine, header: list[str], placed: str
) -> None:
    engine.say(*["hello"] * 3)
    with harness(token_service) as agent:
        messages: list[Any] = [user(text("q"))]
        for turn in range(3):
            values = header[turn % len(header) :][:1] if header else []
            volatile = [text(f"x-anthropic-billing-header: cc_version=2.1; {value}") for value in values]
            lasting = [text("You are an agent.", cache_control={"type": "ephemeral"}), text("Be helpful.\nBe kind.")]
            system = [*volatile, *lasting] if placed == "first" else [*lasting, *volatile]
            messages += [agent.said(messages, system=system), user(text("more"))]
        calls = agent.exact()
    assert calls[0]["messages"][0] == {"role": "system", "content": "You are an agent.\nBe helpful.\nBe kind."}
    assert "billing" not in engine.generations[0].prompt


def test_a_system_prompt_of_nothing_but_the_header_is_none(token_service: RunningService, engine: ScriptedEngine) -> None:
    engine.say("hello", "hello")
    with harness(token_service) as agent:
        agent.ask("q", system="x-anthropic-billing-header: cch=1;")
        agent.ask("q")
        assert [call["messages"] for call in agent.session.calls] == [[{"role": "user", "content": "q"}]] * 2


def kept(found: list[dict[str, Any]], order: tuple[str, ...]) -> list[dict[str, Any]]:
    """The reply as a coding agent keeps it: blocks of white space left out, arguments parsed, in the order of the schema."""
    made: list[dict[str, Any]] = []
    pieces: list[dict[str, str]] = []
    for event in found:
        if event["type"] == "content_block_start":
            made.append(event["content_block"])
            pieces.append({})
        elif event["type"] == "content_block_delta":
            (key,) = event["delta"].keys() - {"type"}
            pieces[-1][key] = pieces[-1].get(key, "") + event["delta"][key]
    for block, piece in zip(made, pieces, strict=True):
        if "partial_json" in piece:
            given = json.loads(piece.pop("partial_json"))
            block["input"] = {name: given[name] for name in order}
        block |= piece
    return [block for block in made if block["type"] != "text" or block["text"].strip()]


def test_a_coding_agents_habits_leave_one_row(token_service: RunningService, engine: ScriptedEngine) -> None:
    """Moving cache marks, strings that become blocks, reminders, system messages in the middle, arguments in the schema's order,
    fields that only the vendor's servers know."""
    tools = [
        {"name": "Edit", "input_schema": {"type": "object", "properties": {"path": {}, "old": {}, "new": {}}}},
        {"name": "Later", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True},
    ]
    engine.say(
        engine.family.speak("Looking.", reasoning="a", calls=[("Edit", {"old": "x", "new": "y", "path": "f"})]),
        engine.family.speak("", reasoning="b", calls=[("Edit", {"new": "y", "path": "f", "old": "z"})]),
        engine.family.speak("Done."),
    )
    marked = {"cache_control": {"type": "ephemeral"}}

    def body(turn: int, messages: list[Any]) -> dict[str, Any]:
        sent = copy.deepcopy(messages)
        last = sent[-1]["content"]
        sent[-1]["content"] = [text(last, **marked)] if isinstance(last, str) else [*last[:-1], {**last[-1], **marked}]
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
        return {
            "model": "policy",
            "max_tokens": 200,
            "stream": True,
            "system": [text(f"x-anthropic-billing-header: cch={turn};"), text("You are an agent.", **marked)],
            "tools": tools,
            "messages": sent,
            "thinking": SHOWN,
            "context_management": {"edits": edits},
            "metadata": {"user_id": f"user_{turn}"},
            "output_config": {"effort": "high"},
        }

    messages: list[Any] = [{"role": "user", "content": "fix it"}]
    with harness(token_service) as agent:
        for turn in range(3):
            found = events(agent.session, body(turn, messages))
            messages.append({"role": "assistant", "content": kept(found, ("path", "old", "new"))})
            uses = [block for block in messages[-1]["content"] if block["type"] == "tool_use"]
            if uses:
                reminder = text("<system-reminder>Be brief.</system-reminder>")
                messages += [user(*[result(use, "ok") for use in uses], reminder)]
        calls = agent.session.calls
    assert [call["parent_id"] for call in calls] == [None, calls[0]["call_id"], calls[1]["call_id"]]
    assert [call["projection"] for call in calls] == ["", "arguments", "arguments"]


def test_system_messages_go_to_the_head_or_where_they_stand(
    redis_server: RedisServer, token_service: RunningService, engine: ScriptedEngine
) -> None:
    messages = [
        {"role": "system", "content": "Head."},
        {"role": "developer", "content": [text("More.")]},
        user(text("q")),
        {"role": "assistant", "content": "a"},
        {"role": "system", "content": [text("Later."), text("Still.")]},
        user(text("r")),
    ]
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with RunningService(engine.url, redis_server.url, engine_api="token", later_system_role="system") as other:
        for service, role in ((token_service, "user"), (other, "system")):
            engine.say("hello")
            with harness(service) as agent:
                post(agent.session, {"model": "policy", "max_tokens": 9, "system": "Top.", "messages": messages})
                (call,) = agent.session.calls
            assert call["messages"] == [
                {"role": "system", "content": "Top.\nHead.\nMore."},
                *plain,
                {"role": role, "content": "Later.\nStill."},
                {"role": "user", "content": "r"},
            ]


def test_tool_results_with_errors_and_images(service: RunningService, engine: ScriptedEngine) -> None:
    engine.say(engine.family.speak("", calls=[("lookup", {"key": key}) for key in "abcd"]), "done")
    data = base64.b64encode(picture()).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    with harness(service) as agent:
        reply = agent.said("q", tools=TOOLS)
        first, second, third, fourth = [block for block in reply["content"] if block["type"] == "tool_use"]
        results = [result(first, "bad", is_error=True), result(second, [], is_error=True), result(third, None)]
        pictured = result(fourth, [text("see"), image])
        with_image = [user(text("q")), reply, user(*results, pictured)]
        with pytest.raises(anthropic.BadRequestError, match="not a multimodal model"):
            agent.ask(with_image, tools=TOOLS)
        agent.ask([user(text("q")), reply, user(text("and"), *results, result(fourth, ""))], tools=TOOLS)
        *_, one, two, three, four, said = agent.exact()[1]["messages"]
        assert four["content"] == "" and said == {"role": "user", "content": "and"}
    assert [message["content"] for message in (one, two, three)] == ["bad", "Error", ""]


def test_malformed_arguments_come_back_as_they_were(token_service: RunningService, engine: ScriptedEngine) -> None:
    """The scripted engine's parsers only give out JSON, so a list stands for what is no object."""
    markup = '<tool_call>\n{"name": "lookup", "arguments": ["not", "an object"]}\n</tool_call><|im_end|>'
    engine.say(markup, "done")
    with harness(token_service) as agent:
        reply = agent.said("q", tools=TOOLS)
        use = reply["content"][-1]
        assert use["input"] == {"__unparsedToolInput": '["not", "an object"]'}
        agent.ask([user(text("q")), reply, user(result(use, "cannot be read", is_error=True))], tools=TOOLS)
        assert [call["projection"] for call in agent.exact()] == ["", "exact"]


def test_a_reply_of_another_service_is_a_prompt_like_any(token_service: RunningService, engine: ScriptedEngine) -> None:
    engine.say("done")
    foreign = [
        {"type": "thinking", "thinking": "theirs", "signature": "EqQBCgIYAhIM"},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        text("said"),
        {"type": "tool_use", "id": "toolu_01A09q90qw90lq917835lq9", "name": "lookup", "input": {"key": "a"}},
    ]
    with harness(token_service) as agent:
        messages = [user(text("q")), {"role": "assistant", "content": foreign}, user(result(foreign[-1], "x"))]
        agent.ask(messages, tools=TOOLS)
        (call,) = agent.session.calls
    _, replayed, answer = call["messages"]
    assert (replayed["content"], replayed["reasoning_content"]) == ("said", "theirs")
    assert replayed["tool_calls"][0]["id"] == answer["tool_call_id"] == "toolu_01A09q90qw90lq917835lq9"


# What goes wrong


@pytest.mark.case(39)
def test_every_error_is_the_sdks_own_exception(service: RunningService, engine: ScriptedEngine) -> None:
    with harness(service) as agent:
        agent.session.ask("is there")
        with pytest.raises(anthropic.BadRequestError) as bad:
            agent.ask("q", tool_choice={"type": "tool", "name": "nothing"})
        with pytest.raises(anthropic.BadRequestError, match="prefill"):
            agent.ask([user(text("q")), {"role": "assistant", "content": "Sure,"}])
        with pytest.raises(anthropic.AuthenticationError) as unauthorized:
            agent.client.with_options(api_key="wrong").messages.create(
                model="policy", max_tokens=5, messages=[{"role": "user", "content": "q"}]
            )
        with pytest.raises(anthropic.NotFoundError) as unknown:
            agent.client.post("/v1/messages/no-such", cast_to=object)
        with pytest.raises(anthropic.APIStatusError) as large:
            agent.ask("long " * 20_000)
        assert len(agent.session.calls) == 1
        agent.session.close()
        with pytest.raises(anthropic.ConflictError) as closed:
            agent.ask("q")
    told = [(caught.value.status_code, caught.value.type) for caught in (bad, unauthorized, unknown, large, closed)]
    assert told == [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (409, "invalid_request_error"),
    ]
    for caught in (bad, unauthorized, unknown, large, closed):
        assert caught.value.request_id == caught.value.body["request_id"]
        assert caught.value.response.headers["x-should-retry"] == "false"


def test_the_sdk_tries_again_by_itself(service: RunningService, engine: ScriptedEngine) -> None:
    engine.say(Fail(500), "again")
    with harness(service, max_retries=1) as agent:
        assert agent.ask("q").content[0].text.strip() == "again"
        assert len(agent.session.calls) == 1


def test_a_stream_that_breaks_off_ends_in_an_error_event(service: RunningService, engine: ScriptedEngine) -> None:
    engine.say(Say("first second third fourth", break_after=3, seconds_per_token=0.05))
    with harness(service) as agent:
        with pytest.raises(anthropic.APIStatusError) as broken:
            agent.ask("q", streamed=True)
        (call,) = agent.session.calls
    assert broken.value.type == "api_error"
    assert call["status"] == "failed"


# Counting and listing


@pytest.mark.case(41)
def test_counting_tokens_records_no_call(service: RunningService, engine: ScriptedEngine) -> None:
    asked: Any = {"model": "policy", "system": "Be kind.", "messages": [user(text("q"))], "tools": TOOLS}
    with harness(service) as agent:
        counted = agent.client.messages.count_tokens(**asked)
        assert agent.session.calls == []
        reply = agent.client.messages.create(**asked, max_tokens=5)
        prefix = agent.client.messages.count_tokens(
            model="policy", messages=[user(text("q")), {"role": "assistant", "content": "a"}]
        )
        assert len(agent.session.calls) == 1
    assert counted.input_tokens == reply.usage.input_tokens
    assert prefix.input_tokens > 0


def test_models_are_listed(service: RunningService) -> None:
    with harness(service) as agent:
        (model,) = agent.client.models.list().data
        # Over the turn of a second.
        listed = int(time.time())
        wait_until(lambda: int(time.time()) > listed, 120, "the next second")
        one = agent.client.models.retrieve("policy")
        assert agent.client.models.retrieve("claude-opus-9").id == "claude-opus-9"
        assert agent.session.calls == []
    assert model == one and (model.id, model.type, model.display_name) == ("policy", "model", "policy")
    if service.settings.engine_api == "token":
        assert model.max_input_tokens == 2048


# Tools that are no functions


def test_tools_are_offered_as_functions_or_counted(token_service: RunningService, engine: ScriptedEngine) -> None:
    engine.say(engine.family.speak("", calls=[("bash", {"command": "ls"})]))
    tools: list[Any] = [
        {"type": "custom", "name": "mine", "input_schema": {"type": "object"}, "eager_input_streaming": True},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ]
    with harness(token_service) as agent:
        reply = agent.ask("q", tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        page = token_service.request("GET", "/metrics").text
    assert (reply.content[-1].name, reply.content[-1].input) == ("bash", {"command": "ls"})
    rendered = next(received.body for received in engine.received if received.path.endswith("/render"))
    names = [tool["function"]["name"] for tool in rendered["tools"]]
    assert names == ["mine", "bash", "str_replace_based_edit_tool", "memory"]
    assert (rendered["tool_choice"], rendered["parallel_tool_calls"]) == ("required", False)
    for kind in ("web_search", "tool_search"):
        assert f'verbatim_tools_dropped_total{{dialect="messages",kind="{kind}"}}' in page


@pytest.mark.parametrize("streamed", [False, True])
def test_a_forced_tool_ends_in_tool_use(service: RunningService, engine: ScriptedEngine, streamed: bool) -> None:
    engine.say(engine.family.speak("", calls=[("lookup", {"key": "a"})]))
    with harness(service) as agent:
        reply = agent.ask("q", tools=TOOLS, tool_choice={"type": "tool", "name": "lookup"}, streamed=streamed)
    assert (reply.content[-1].type, reply.stop_reason) == ("tool_use", "tool_use")
