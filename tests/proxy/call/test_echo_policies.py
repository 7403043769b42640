"""How many rows a conversation of three tool calls makes when its harness replays replies otherwise than they were sent.

What real harnesses do, each played under both echo policies, and the table of docs/concepts.md is made of
what this file expects. In every row of both the ids before a trained token are the ids it was sampled after.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest

from tests import ROOT
from tests.support.engine.scripted_engine import ScriptedEngine, logprobs_of
from tests.support.engine.template_families import FAMILIES, Family
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.conversations import tool_result, turn

POLICIES = ("strict", "minted")
TURNS = 3
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {
                "type": "object",
                "properties": {
                    "key": {"type": "string"},
                    "depth": {"type": "integer", "default": 1},
                    "at": {"type": "integer"},
                },
            },
        },
    }
]
TEXT = "look it up \r\nna\u00efve today"
BIG = 12345678901234567891

Message = dict[str, Any]


def arguments_of(call: Message) -> Any:
    return json.loads(call["function"]["arguments"])


def with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(change(arguments_of(call)))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def with_text(message: Message, change: Callable[[str], str]) -> Message:
    return {**message, "content": change(message["content"])}


def with_ids(message: Message) -> Message:
    """Ids of the harness's own making."""
    calls = [{**call, "id": f"call_of_mine_{number}"} for number, call in enumerate(message["tool_calls"])]
    return {**message, "tool_calls": calls}


def lines_trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_javascript_reads(value: Any) -> Any:
    return {key: int(float(item)) if isinstance(item, int) and item > 2**53 else item for key, item in value.items()}


def as_it_is(number: int, messages: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    return messages, {}


def named_later(number: int, messages: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Messages have their names from the second turn on."""
    names = {"user": "ann", "tool": "lookup"} if number else {}
    return [{**message, "name": names[message["role"]]} if message["role"] in names else message for message in messages], {}


def another_effort(number: int, messages: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    return messages, {"reasoning_effort": ("low", "high", "medium")[number]}


def as_sent(message: Message) -> Message:
    return message


@dataclass(frozen=True)
class Showing(Family):
    """A template that tells the model how hard to think, and who speaks."""

    def render_text(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **kwargs: Any) -> str:
        effort = kwargs.pop("reasoning_effort", None)
        told = [
            {**each, "content": f"{each['name']}: {each['content']}"}
            if each.get("name") and each["role"] != "assistant"
            else each
            for each in messages
        ]
        head = [{"role": "system", "content": f"effort {effort}"}] if effort else []
        return super().render_text([*head, *told], tools, **kwargs)


@dataclass(frozen=True)
class Behaviour:
    """What a harness makes of a reply before it replays it, and the rows of three turns by policy. `said`: the projection that the
    calls after the first have where the row goes on."""

    does: str
    replay: Callable[[Message], Message]
    strict: int
    minted: int
    said: str
    ask: Callable[[int, list[Any]], tuple[list[Any], dict[str, Any]]] = as_it_is
    """What it makes of the messages of turn number n, and further fields of the request."""
    shown: bool = False
    """Whether the template shows names and efforts."""


def dropped_text(message: Message) -> Message:
    return {**message, "content": None}


def first_call(message: Message) -> Message:
    return {**message, "tool_calls": message["tool_calls"][:1]}


def second_call(message: Message) -> Message:
    return {**message, "tool_calls": message["tool_calls"][1:]}


BEHAVIOURS = [
    Behaviour("replays it as it was sent", as_sent, 1, 1, "exact"),
    Behaviour(
        "writes the arguments anew",
        lambda message: with_arguments(message, lambda told: dict(reversed(told.items()))),
        1,
        1,
        "arguments",
    ),
    Behaviour("trims it", lambda message: with_text(message, str.strip), 1, 1, "trimmed"),
    Behaviour(
        "fills in defaults of the schema",
        lambda message: with_arguments(message, lambda told: {**told, "depth": 1}),
        1,
        1,
        "defaults",
    ),
    Behaviour(
        "fills in defaults, and gives the calls ids of its own",
        lambda message: with_ids(with_arguments(message, lambda told: {**told, "depth": 1})),
        1,
        1,
        "defaults",
    ),
    Behaviour(
        "writes line feeds for CRLF",
        lambda message: with_text(message, lambda text: text.replace("\r\n", "\n")),
        1,
        1,
        "reencoded",
    ),
    Behaviour(
        "writes Unicode in another normal form",
        lambda message: with_text(message, lambda text: unicodedata.normalize("NFD", text)),
        1,
        1,
        "reencoded",
    ),
    Behaviour(
        "rounds big integers, as JavaScript does",
        lambda message: with_arguments(message, as_javascript_reads),
        1,
        1,
        "reencoded",
    ),
    Behaviour(
        "drops blanks at the ends of lines", lambda message: with_text(message, lines_trimmed), TURNS, 1, "minted_content"
    ),
    Behaviour("drops the text beside tool calls", dropped_text, TURNS, 1, "minted_content"),
    Behaviour("replays the first of two parallel calls", first_call, TURNS, 1, "minted_calls"),
    Behaviour("replays the second of two parallel calls", second_call, TURNS, 1, "minted_calls"),
    Behaviour(
        "repairs arguments",
        lambda message: with_arguments(message, lambda told: {"key": told["key"]}),
        TURNS,
        1,
        "minted_calls",
    ),
    Behaviour("gives messages names that the template ignores", as_sent, 1, 1, "exact", named_later),
    Behaviour("gives messages names that the template shows", as_sent, 2, 2, "exact", named_later, shown=True),
    Behaviour("changes a reasoning effort that the template ignores", as_sent, 1, 1, "exact", another_effort),
    Behaviour("changes a reasoning effort that the template shows", as_sent, TURNS, TURNS, "", another_effort, shown=True),
    Behaviour(
        "drops the text, and gives the calls ids of its own", lambda message: with_ids(dropped_text(message)), TURNS, TURNS, ""
    ),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3", max_model_len=16384) as engine:
        yield engine


@pytest.fixture(scope="module")
def showing() -> Iterator[ScriptedEngine]:
    plain = FAMILIES["qwen3"]
    with ScriptedEngine(Showing(**{each.name: getattr(plain, each.name) for each in fields(plain)})) as engine:
        yield engine


@pytest.fixture(scope="module")
def services(
    engine: ScriptedEngine, showing: ScriptedEngine, redis_server: RedisServer
) -> Iterator[dict[bool, RunningService]]:
    """By whether the template shows names and efforts."""
    redis_server.flushall()
    with (
        RunningService(engine.url, redis_server.url, engine_api="token") as hidden,
        RunningService(showing.url, redis_server.url, engine_api="token") as shown,
    ):
        yield {False: hidden, True: shown}


@pytest.fixture
def service(services: dict[bool, RunningService]) -> RunningService:
    return services[False]


def speak(engine: ScriptedEngine, turns: int = TURNS) -> None:
    """Text and two parallel calls in each turn but the last."""
    said = [
        engine.family.speak(TEXT, calls=[("lookup", {"key": f"alpha {at}", "at": BIG}), ("lookup", {"key": "beta", "at": at})])
        for at in range(turns - 1)
    ]
    engine.reset().say(*said, "it is sunny")


def play(session: Session, behaviour: Behaviour, turns: int = TURNS) -> None:
    messages: list[Any] = [turn("user", "Find alpha.")]
    for number in range(turns):
        asked, more = behaviour.ask(number, messages)
        reply = session.answer(asked, tools=TOOLS, **more)
        if reply.get("tool_calls"):
            shown = behaviour.replay(reply)
            messages += [shown, *(tool_result(shown, "7", at) for at in range(len(shown["tool_calls"])))]


def check_truth(engine: ScriptedEngine, session: Session) -> list[dict[str, Any]]:
    """P2 to the letter: what a row holds before each trained token the engine was given before it. Returns the rows."""
    rows, accounting = session.trajectories()
    given = [(made.prompt_ids, made.sampled[0]) for made in engine.generations]
    calls = {call["call_id"]: call for call in session.calls}
    trained = 0
    for row in rows:
        for call_id in row["call_ids"]:
            start, end = (
                len(calls[call_id]["prompt_ids"]),
                len(calls[call_id]["prompt_ids"]) + len(calls[call_id]["completion_ids"]),
            )
            prompt = row["token_ids"][:start]
            assert (prompt, row["token_ids"][start:end]) in given
            if all(row["loss_mask"][start:end]):
                assert row["logprobs"][start:end] == logprobs_of(prompt, row["token_ids"][start:end])
                trained += end - start
    assert trained == accounting["sampled_tokens"] == accounting["exported_tokens"]
    return rows


@pytest.mark.case(16, 59)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.does)
def test_rows_of_a_harness_that(
    engine: ScriptedEngine, showing: ScriptedEngine, services: dict[bool, RunningService], behaviour: Behaviour, policy: str
) -> None:
    asked = showing if behaviour.shown else engine
    session = services[behaviour.shown].session(echo_policy=policy)
    speak(asked)
    play(session, behaviour)
    rows = check_truth(asked, session)
    assert len(rows) == getattr(behaviour, policy)
    later = session.calls[1:]
    if len(rows) == 1:
        assert {call["projection"] for call in later} == {behaviour.said}
        assert [call["branch_reason"] for call in later] == [None, None]
    else:
        # One that goes on from a root is no branch.
        reason = "new_root" if behaviour.shown else "edited"
        assert [call["branch_reason"] for call in later if call["branch_reason"]] == [reason] * (len(rows) - 1)


def test_an_earlier_reply_that_changes_later_stays_the_one_its_id_names(
    engine: ScriptedEngine, service: RunningService
) -> None:
    """A harness that shortens its history: the last reply as it was, those before it without their text."""
    for policy, rows in (("strict", 2), ("minted", 1)):
        session = service.session(echo_policy=policy)
        speak(engine)
        messages: list[Any] = [turn("user", "Find alpha.")]
        for _ in range(TURNS):
            reply = session.answer(messages, tools=TOOLS)
            messages = [dropped_text(message) if message["role"] == "assistant" else message for message in messages]
            messages += [reply, *(tool_result(reply, "7", at) for at in range(len(reply.get("tool_calls", ()))))]
        assert len(check_truth(engine, session)) == rows


def test_an_id_in_another_history_proves_nothing(engine: ScriptedEngine, service: RunningService) -> None:
    """What stands before the reply differs: it is an edited history, also where ids prove replies."""
    session = service.session(echo_policy="minted")
    speak(engine)
    first = session.answer("Find alpha.", tools=TOOLS)
    elsewhere: list[Any] = [turn("user", "Find beta."), dropped_text(first), tool_result(first, "7")]
    second = session.answer(elsewhere, tools=TOOLS)
    assert [call["parent_id"] for call in session.calls] == [None, None]
    assert len(check_truth(engine, session)) == 2
    # There it is prompt like any other text, and one edit of it is not another.
    elsewhere[1] = with_text(first, str.upper)
    session.ask([*elsewhere, second, tool_result(second, "7")], tools=TOOLS)
    assert [call["parent_id"] for call in session.calls] == [None, None, None]


def test_a_message_made_of_two_replies_is_neither(engine: ScriptedEngine, service: RunningService) -> None:
    """Two of one request, as siblings have them: no id says which is meant."""
    session = service.session(echo_policy="minted")
    asked: list[Any] = [turn("user", "Find alpha.")]
    speak(engine)
    one = session.answer(asked, tools=TOOLS)
    other = session.answer(asked, tools=TOOLS)
    merged = {**one, "content": None, "tool_calls": [one["tool_calls"][0], other["tool_calls"][1]]}
    session.ask([*asked, merged, tool_result(merged, "7")], tools=TOOLS)
    assert session.calls[2]["parent_id"] is None
    check_truth(engine, session)


def test_a_session_shows_its_policy_and_the_setting_is_what_it_has_when_it_says_none(
    engine: ScriptedEngine, redis_server: RedisServer, service: RunningService
) -> None:
    def policy_of(service: RunningService, **fields: Any) -> str:
        shown = service.request("GET", f"/sessions/{service.session(**fields).session_id}").json()
        return str(shown["echo_policy"])

    assert [policy_of(service), policy_of(service, echo_policy="minted")] == ["strict", "minted"]
    with RunningService(engine.url, redis_server.url, engine_api="token", echo_policy="minted") as other:
        assert [policy_of(other), policy_of(other, echo_policy="strict")] == ["minted", "strict"]
    refused = service.request("POST", "/sessions", json={"echo_policy": "loose"})
    assert refused.status_code == 400 and "echo_policy" in refused.json()["error"]["message"]


def test_the_policy_lasts_when_another_process_goes_on(
    engine: ScriptedEngine, redis_server: RedisServer, service: RunningService
) -> None:
    """What was proven by an id is proven again from the records."""
    session = service.session(echo_policy="minted")
    speak(engine)
    messages: list[Any] = [turn("user", "Find alpha.")]
    with RunningService(engine.url, redis_server.url, engine_api="token") as other:
        for at in range(TURNS):
            place = (other, service)[at % 2]
            client = session.client_at(place)
            answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            reply = answer.choices[0].message.model_dump(exclude_none=True)
            if reply.get("tool_calls"):
                messages += [dropped_text(reply), *(tool_result(reply, "7", at) for at in range(2))]
        assert len(check_truth(engine, session)) == 1


def post(session: Session, path: str, body: dict[str, Any]) -> Any:
    answer = session.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def two_turns_of_messages(session: Session) -> None:
    tool = {"name": "lookup", "input_schema": TOOLS[0]["function"]["parameters"]}
    body = {"model": "policy", "max_tokens": 200, "tools": [tool], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked: list[Any] = [turn("user", "Find alpha.")]
    content = [
        block for block in post(session, "/v1/messages", {**body, "messages": asked})["content"] if block["type"] != "text"
    ]
    results = [
        {"type": "tool_result", "tool_use_id": each["id"], "content": "7"} for each in content if each["type"] == "tool_use"
    ]
    post(session, "/v1/messages", {**body, "messages": [*asked, turn("assistant", content), turn("user", results)]})


def two_turns_of_responses(session: Session) -> None:
    tool = {"type": "function", **TOOLS[0]["function"]}
    items: list[Any] = [turn("user", "Find alpha.")]
    told = post(session, "/v1/responses", {"model": "policy", "input": items, "tools": [tool]})["output"]
    items += [item for item in told if item["type"] != "message"]
    calls = [item for item in told if item["type"] == "function_call"]
    items += [{"type": "function_call_output", "call_id": item["call_id"], "output": "7"} for item in calls]
    post(session, "/v1/responses", {"model": "policy", "input": items, "tools": [tool]})


def two_turns_of_gemini(session: Session) -> None:
    tools = [{"functionDeclarations": [{"name": "lookup", "parametersJsonSchema": TOOLS[0]["function"]["parameters"]}]}]
    path = "/v1beta/models/policy:generateContent"
    contents: list[Any] = [{"role": "user", "parts": [{"text": "Find alpha."}]}]
    told = post(session, path, {"contents": contents, "tools": tools})["candidates"][0]["content"]
    parts = [part for part in told["parts"] if "functionCall" in part]
    results = [
        {"functionResponse": {"name": "lookup", "id": part["functionCall"].get("id"), "response": {"output": "7"}}}
        for part in parts
    ]
    contents += [{**told, "parts": parts}, {"role": "user", "parts": results}]
    post(session, path, {"contents": contents, "tools": tools})


@pytest.mark.case(59)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("play_dialect", [two_turns_of_messages, two_turns_of_responses, two_turns_of_gemini])
def test_text_dropped_beside_tool_calls_in_every_dialect(
    engine: ScriptedEngine, service: RunningService, play_dialect: Callable[[Session], None], policy: str
) -> None:
    session = service.session(echo_policy=policy)
    speak(engine, 2)
    play_dialect(session)
    rows = check_truth(engine, session)
    assert len(rows) == {"strict": 2, "minted": 1}[policy]
    if policy == "minted":
        assert "minted_content" in session.calls[1]["projection"]


def test_an_effort_that_changes_in_another_process_is_held_against_the_ids(
    engine: ScriptedEngine, redis_server: RedisServer, service: RunningService
) -> None:
    """How the parent was rendered is remembered where it was planned alone; what it was sampled after every process knows."""
    session = service.session()
    speak(engine)
    reply = session.answer("Find alpha.", tools=TOOLS, reasoning_effort="low")
    messages: list[Any] = [turn("user", "Find alpha."), reply, *(tool_result(reply, "7", at) for at in range(2))]
    with RunningService(engine.url, redis_server.url, engine_api="token") as other:
        client = session.client_at(other)
        client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, reasoning_effort="high")
    assert len(check_truth(engine, session)) == 1


@pytest.mark.parametrize("api", ["token", "chat"])
def test_the_same_question_at_another_effort_is_no_repetition(
    showing: ScriptedEngine, redis_server: RedisServer, api: Any
) -> None:
    with RunningService(showing.url, redis_server.url, engine_api=api) as service:
        session = service.session()
        showing.reset().say(*["it is sunny"] * 4)
        for effort in ("low", "high", "low"):
            reply = session.answer("q", reasoning_effort=effort)
        session.ask([turn("user", "q"), reply, turn("user", "more")], reasoning_effort="high")
        calls = session.calls
        assert [call["branch_reason"] for call in calls] == [None, "new_root", "repeated", None]
        # All three said the same: it goes on from the one that was asked so.
        assert [call["parent_id"] for call in calls] == [None, None, None, calls[1]["call_id"]]
        check_truth(showing, session)


def test_the_page_has_what_is_tested() -> None:
    table = re.findall(r"^\| (.+?) \| (\d) \| (\d) \|", (ROOT / "docs" / "concepts.md").read_text(), re.MULTILINE)
    expected = [(item.does, str(item.strict), str(item.minted)) for item in BEHAVIOURS]
    assert [row for row in table if row in expected] == expected


@pytest.mark.case(24)
@pytest.mark.parametrize("does", ["replays it as it was sent", "fills in defaults, and gives the calls ids of its own"])
def test_results_name_the_calls_by_the_ids_of_the_reply_that_stands_in_the_prompt(redis_server: RedisServer, does: str) -> None:
    """The replayed reply was replaced by the recorded one, and its results kept the harness's ids: a template that prints ids
    showed the model results of calls that it had not made."""
    behaviour = next(each for each in BEHAVIOURS if each.does == does)
    with (
        ScriptedEngine("mistral", max_model_len=16384) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token") as service,
    ):
        for text in ("", TEXT):
            session = service.session()
            calls = [("lookup", {"key": "alpha"}), ("lookup", {"key": "beta"})]
            engine.reset().say(*[engine.family.speak(text, calls=calls)] * (TURNS - 1), "it is sunny")
            play(session, behaviour)
            assert len(check_truth(engine, session)) == 1
            made = [each for call in session.calls for each in call["engine_tool_call_ids"]]
            shown = engine.family.decode(session.calls[-1]["prompt_ids"])
            assert re.findall(r'"call_id": "([^"]*)"', shown) == made
