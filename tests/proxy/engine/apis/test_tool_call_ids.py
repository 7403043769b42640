"""Whose ids: a harness gets ids of tool calls that the service mints, the engine's prompts show those that the engine gave.

The engines are a Mistral, whose template refuses ids that have not nine letters or digits, and a Kimi, whose model samples the ids that
its template shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from tests.support.engine.scripted_calls import SamplingCalls
from tests.support.engine.scripted_engine import Exchange, ScriptedEngine, logprobs_of
from tests.support.engine.scripted_sampling import Say
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.conversations import TOOLS
from tests.support.sessions.engine_ids import with_engine_ids

PATHS = ("token", "chat")
Message = dict[str, Any]


@pytest.fixture(scope="module", params=["mistral", "kimi"])
def engine(request: pytest.FixtureRequest) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def services(engine: ScriptedEngine, redis_server: RedisServer) -> Iterator[dict[str, list[RunningService]]]:
    """Two processes on each path, which know of each other's calls only what the store has."""
    redis_server.flushall()
    with ExitStack() as stack:
        yield {
            path: [stack.enter_context(RunningService(engine.url, redis_server.url, engine_api=path)) for _ in range(2)]
            for path in PATHS
        }


@pytest.fixture(params=PATHS)
def service(request: pytest.FixtureRequest, services: dict[str, list[RunningService]]) -> RunningService:
    return services[request.param][0]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def results(reply: Message, *contents: str) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(reply["tool_calls"], contents, strict=True)
    ]


def script(engine: ScriptedEngine, *turns: list[str] | str) -> None:
    """What the model says: calls of `lookup` with these keys, or a text."""
    for turn in turns:
        said = (turn, []) if isinstance(turn, str) else ("", [("lookup", {"key": key}) for key in turn])
        engine.say(engine.family.speak(said[0], calls=said[1]))


def play(engine: ScriptedEngine, session: Session, **fields: Any) -> list[Message]:
    """Two calls at once, one more, an answer, and an answer to another question; all messages."""
    script(engine.reset(), ["alpha", "beta"], ["gamma"], "seven", "you are welcome")
    messages = [user("look up alpha and beta")]
    for contents in (("7", "8"), ("9",), ()):
        messages.append(session.answer(messages, tools=TOOLS, **fields))
        messages += results(messages[-1], *contents) if contents else [user("thank you")]
    messages.append(session.answer(messages, tools=TOOLS, **fields))
    return messages


def assert_shows_own_ids(engine: ScriptedEngine, prompts: list[list[int]], asked: list[list[Message]]) -> None:
    """Each prompt is the template's own rendering of the messages, which have the engine's ids."""
    family = engine.family
    for prompt, messages in zip(prompts, asked, strict=True):
        text = family.render_text(messages, TOOLS)
        if family.name == "mistral":
            # The model does not sample the ids of its calls: the template has them in renderings alone.
            text, prompt_text = without_ids(text), without_ids(family.decode(prompt))
            assert prompt_text == text
        else:
            assert prompt == family.encode(text)


def without_ids(text: str) -> str:
    head, mark, rest = text.partition(', "id": "')
    return head + without_ids(rest[len('012345678"') :]) if mark else text


def asked_of(messages: list[Message]) -> list[list[Message]]:
    return [messages[:at] for at, message in enumerate(messages) if message["role"] == "assistant"]


@pytest.mark.case(61)
def test_a_tool_loop_is_one_row_whose_prompts_show_the_engines_own_ids(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    messages = play(engine, session)
    calls = session.calls
    minted = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    own = [identifier for call in calls for identifier in call["engine_tool_call_ids"]]
    assert len(own) == len(minted) == 3 and not {*own} & {*minted}
    expected = [each["id"] for call in calls for each in call["reply"].get("tool_calls") or ()]
    assert minted == expected, "the record has the reply as it was sent"
    native = with_engine_ids(messages, calls)
    assert_shows_own_ids(engine, [one.prompt_ids for one in engine.generations], asked_of(native))
    shown = "".join(engine.family.decode(one.prompt_ids) for one in engine.generations)
    assert all(identifier in shown for identifier in own) and not any(identifier in shown for identifier in minted)
    assert [call["branch_reason"] for call in calls if call["api"] == "token"] == [None] * 4 * (calls[0]["api"] == "token")
    rows, accounting = session.trajectories()
    if engine.family.name == "kimi" or calls[0]["api"] == "token":
        assert len(rows) == 1
    assert accounting["quarantined"] == []
    given = {tuple(one.prompt_ids): one.sampled[0] for one in engine.generations}
    for call in calls:
        assert given[tuple(call["prompt_ids"])] == call["completion_ids"]
        assert call["logprobs"] == logprobs_of(call["prompt_ids"], call["completion_ids"])


@pytest.mark.case(60)
def test_a_fresh_rendering_shows_them_too(engine: ScriptedEngine, service: RunningService) -> None:
    """The harness edits its first message: nothing of the history is known, but the calls that ids name."""
    session = service.session()
    messages = play(engine, session)
    edited = [user("look up both"), *messages[1:-1]]
    script(engine, "well")
    session.answer(edited, tools=TOOLS)
    native = with_engine_ids(edited, session.calls)
    assert engine.last.prompt_ids == engine.family.render(native, TOOLS)


def test_counting_tokens_shows_them_too(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    messages = play(engine, session)
    with anthropic.Anthropic(base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key) as client:
        blocks = [
            {"type": "tool_use", "id": call["id"].replace("call_", "toolu_"), "name": "lookup", "input": {"key": "alpha"}}
            for call in messages[1]["tool_calls"]
        ]
        told = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": content}
            for block, content in zip(blocks, ("7", "8"), strict=True)
        ]
        asked: list[Any] = [messages[0], {"role": "assistant", "content": blocks}, {"role": "user", "content": told}]
        counted = client.messages.count_tokens(model="policy", messages=asked).input_tokens
    native = with_engine_ids(messages[:4], session.calls)
    native[1]["tool_calls"] = [
        {**call, "function": {"name": "lookup", "arguments": {"key": "alpha"}}} for call in native[1]["tool_calls"]
    ]
    assert counted == len(engine.family.render(native))


@pytest.mark.case(60)
def test_another_process_and_a_fork_know_them(
    engine: ScriptedEngine, services: dict[str, list[RunningService]], service: RunningService
) -> None:
    session = service.session()
    messages = play(engine, session)
    (other,) = [each[1] for each in services.values() if each[0] is service]
    session.close()
    fork = other.session(replay={"session_id": session.session_id, "until": session.calls[-1]["call_id"]})
    for asked in asked_of(messages)[:-1]:
        assert fork.answer(asked, tools=TOOLS) == messages[len(asked)]
    script(engine, "again")
    fork.answer(messages[:-1], tools=TOOLS)
    native = with_engine_ids(messages[:-1], session.calls)
    assert_shows_own_ids(engine, [engine.last.prompt_ids], [native])
    assert fork.calls[-1]["prompt_ids"] == session.calls[-1]["prompt_ids"]


def test_a_session_that_moves_to_another_process_keeps_them(
    engine: ScriptedEngine, services: dict[str, list[RunningService]], service: RunningService
) -> None:
    session = service.session()
    messages = play(engine, session)
    (other,) = [each[1] for each in services.values() if each[0] is service]
    script(engine, "bye")
    asked = [*messages, user("and now")]
    moved = session.base_url.replace(service.url, other.url)
    with openai.OpenAI(base_url=moved, api_key=session.api_key, http_client=httpx.Client(verify=False)) as client:
        client.chat.completions.create(model="policy", messages=asked, tools=TOOLS)
    assert_shows_own_ids(engine, [engine.last.prompt_ids], [with_engine_ids(asked, session.calls)])


def test_every_choice_of_a_call_has_its_own(engine: ScriptedEngine, service: RunningService) -> None:
    session = service.session()
    script(engine.reset(), ["alpha"], ["beta", "gamma"], "done")
    answer = session.ask("look it up", tools=TOOLS, n=2)
    reply = answer.choices[1].message.model_dump(exclude_none=True)
    asked = [user("look it up"), reply, *results(reply, "8", "9")]
    session.answer(asked, tools=TOOLS)
    first, second, last = session.calls
    assert [len(call["engine_tool_call_ids"]) for call in (first, second)] == [1, 2]
    assert last["parent_id"] == second["call_id"]
    assert_shows_own_ids(engine, [engine.last.prompt_ids], [with_engine_ids(asked, session.calls)])


def test_ids_that_nobody_minted_here_stay_as_the_harness_sent_them(engine: ScriptedEngine, service: RunningService) -> None:
    """Its own, another session's, and a position that the call did not have."""
    other = service.session()
    call_id = play(engine, other)[1]["tool_calls"][0]["id"]
    identifiers = ["abcdefghi"] if engine.family.name == "mistral" else ["abcdefghi", call_id, "call_0_7", "call_x_y"]
    for identifier in identifiers:
        call = {"id": identifier, "type": "function", "function": {"name": "lookup", "arguments": '{"key": "alpha"}'}}
        reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked = [user("look it up"), reply, *results(reply, "7")]
        script(engine, "seven")
        service.session().answer(asked, tools=TOOLS)
        assert engine.last.prompt_ids == engine.family.render(asked, TOOLS)


def test_a_harness_with_ids_of_its_own_is_shown_the_engines_where_its_replies_are_known(
    engine: ScriptedEngine, services: dict[str, list[RunningService]]
) -> None:
    session = services["token"][0].session()
    script(engine.reset(), ["alpha"], "seven")
    reply = session.answer("look it up", tools=TOOLS)
    reply["tool_calls"][0]["id"] = "mine12345"
    session.answer([user("look it up"), reply, *results(reply, "7")], tools=TOOLS)
    first, second = session.calls
    assert (second["parent_id"], second["branch_reason"]) == (first["call_id"], None)
    shown = engine.family.decode(engine.last.prompt_ids)
    assert first["engine_tool_call_ids"][0] in shown and "mine12345" not in shown


def by_responses(session: Session, urls: dict[str, str]) -> None:
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    items: list[Any] = [user("look it up")]
    for _ in range(2):
        output = session.client.responses.create(model="policy", input=items, tools=tools).output
        items += [item.model_dump(exclude_none=True) for item in output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
            for item in output
            if item.type == "function_call"
        ]


def by_messages(session: Session, urls: dict[str, str]) -> None:
    function = TOOLS[0]["function"]
    tools: Any = [{"name": "lookup", "description": "", "input_schema": function["parameters"]}]
    messages: list[Any] = [user("look it up")]
    with anthropic.Anthropic(base_url=urls["anthropic"], api_key=session.api_key) as client:
        for _ in range(2):
            said = client.messages.create(model="policy", messages=messages, tools=tools, max_tokens=64).content
            messages.append({"role": "assistant", "content": [block.model_dump() for block in said]})
            told = [{"type": "tool_result", "tool_use_id": each.id, "content": "7"} for each in said if each.type == "tool_use"]
            messages.append({"role": "user", "content": told})


def by_gemini(session: Session, urls: dict[str, str]) -> None:
    config: Any = {"tools": [{"function_declarations": [{**TOOLS[0]["function"], "parameters": None}]}]}
    config["automatic_function_calling"] = {"disable": True}
    with genai.Client(api_key=session.api_key, http_options={"base_url": urls["gemini"]}) as client:
        chat = client.chats.create(model="policy", config=config)
        (call,) = chat.send_message("look it up").function_calls or [types.FunctionCall()]
        response = types.FunctionResponse(id=call.id, name=call.name, response={"output": "7"})
        chat.send_message(types.Part(function_response=response))


@pytest.mark.case(60)
@pytest.mark.parametrize("converse", [by_responses, by_messages, by_gemini])
def test_every_dialect_shows_the_engine_its_own_ids(
    engine: ScriptedEngine, service: RunningService, converse: Callable[[Session, dict[str, str]], None]
) -> None:
    session = service.session()
    script(engine.reset(), ["alpha"], "seven")
    root = session.base_url.removesuffix("/v1")
    converse(session, {"anthropic": root, "gemini": root})
    first, second = session.calls
    (own,) = first["engine_tool_call_ids"]
    shown = engine.family.decode(engine.last.prompt_ids)
    assert own in shown and first["call_id"] not in shown
    assert second["parent_id"] == first["call_id"]
    assert second["prompt_ids"] == engine.last.prompt_ids


def test_a_call_whose_markup_the_model_spelled_has_the_id_that_it_sampled(
    engine: ScriptedEngine, services: dict[str, list[RunningService]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's streaming parsers, which alone tell ids, know markup only as the tokens that it has; its parse of the whole reads text."""
    family, step = engine.family, SamplingCalls._derender_step

    async def step_by_tokens(self: SamplingCalls, exchange: Exchange, body: Any) -> None:
        ids = body["generate_chunk"]["choices"][0]["token_ids"]
        known = ids == family.encode(family.decode(ids))
        await step(self, exchange, body if known else {**body, "chat_request": {**body["chat_request"], "tools": []}})

    monkeypatch.setattr(SamplingCalls, "_derender_step", step_by_tokens)
    session = services["token"][0].session()
    sampled = spell_markup(engine, family.speak("", calls=[("lookup", {"key": "alpha"})]))
    engine.reset().say(Say(token_ids=sampled), "seven")
    reply = session.answer("look it up", tools=TOOLS)
    session.answer([user("look it up"), reply, *results(reply, "7")], tools=TOOLS)
    first, _ = session.calls
    assert first["completion_ids"] == sampled
    (own,) = first["engine_tool_call_ids"]
    assert own == "functions.lookup:0" if family.name == "kimi" else len(own) == 9
    assert own in family.decode(engine.last.prompt_ids)


def spell_markup(engine: ScriptedEngine, text: str) -> list[int]:
    """The ids of the text, whose markup is made of other tokens than it has."""
    family = engine.family
    parts = re.split(f"({'|'.join(map(re.escape, family.markup.tokens))})", text)
    halves = [(part[:1], part[1:]) if part in family.markup.tokens else (part,) for part in parts]
    return [token for half in halves for piece in half for token in family.encode(piece)]


def test_a_call_that_the_engine_gave_no_id_has_one_that_the_strictest_template_takes(
    engine: ScriptedEngine, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.engine.template_markup.Markup.name_calls", nameless)
    session = service.session()
    script(engine.reset(), ["alpha"], ["beta"], "seven")
    messages = [user("look it up")]
    for _ in range(2):
        messages.append(session.answer(messages, tools=TOOLS))
        messages += results(messages[-1], "7")
    session.answer(messages, tools=TOOLS)
    own = [identifier for call in session.calls for identifier in call["engine_tool_call_ids"]]
    assert len({*own}) == 2 and all(len(each) == 9 and each.isalnum() for each in own)
    assert all(each in engine.family.decode(engine.last.prompt_ids) for each in own)


def nameless(markup: Any, parsed: Any) -> list[tuple[str, str, str]]:
    return [("", *call) for call in parsed.calls]
