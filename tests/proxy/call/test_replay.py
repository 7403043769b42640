"""Forks: a session that gets the replies of a recorded one as far as a pivot, and is sampled from there.

The engine is scripted and random: what it is not asked for it cannot have said, so equal replies were replayed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import ConflictError, NotFoundError

from cli.rollout_service import KNOWN, add_rollouts
from proxy.store import keys
from proxy.store.sessions import is_reference
from proxy.store.states import Intent
from tests.end_to_end.test_dialects import by_chat, by_completions, by_gemini, by_messages, by_responses
from tests.support.engine.scripted_engine import Say, ScriptedEngine, logprobs_of
from tests.support.engine.scripted_fixtures import Running
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer, running_redis
from tests.support.service.running_service import RunningService, Session, hanging_up, streamed_text, wait_until
from tests.support.sessions.conversations import TOOLS, assemble, tool_result, turn
from tests.support.sessions.questions import QUESTIONS
from tests.support.sessions.random_harness import RandomHarness

Message = dict[str, Any]
SAMPLED = ("prompt_ids", "completion_ids", "logprobs", "weight_versions", "finish_reason", "reply", "started_at")


SETTINGS = {"strict_models": True}


@pytest.fixture
def other_service(running: Running) -> Iterator[RunningService]:
    """Another process of the token service."""
    with RunningService(running[0].url, running[1]["token"].settings.redis, engine_api="token", strict_models=True) as other:
        yield other


def fork(service: RunningService, origin: Session | str, until: str | int | None = None, **fields: Any) -> Session:
    origin_id = origin if isinstance(origin, str) else origin.session_id
    named = {name: fields.pop(name) for name in ("on_divergence", "tokens_per_second") if name in fields}
    return service.session(replay={"session_id": origin_id, "until": until, **named}, **fields)


def refuse(service: RunningService, replay: dict[str, Any], **fields: Any) -> tuple[int, str]:
    """The status and the message with which a fork is not opened."""
    answer = service.request("POST", "/sessions", json={"replay": replay, **fields})
    return answer.status_code, answer.json()["error"]["message"]


def tool_loop(session: Session, turns: int, *, results: Callable[[int], str] = str, stream: bool = False) -> list[Message]:
    """The messages of a tool loop: a question, then a reply with one call and its result per turn."""
    messages: list[Message] = [turn("user", "find it")]
    for number in range(turns):
        messages.append(ask_for_tool(session, messages, stream=stream))
        messages.append(tool_result(messages[-1], results(number)))
    return messages


def ask_for_tool(session: Session, messages: list[Message], *, stream: bool = False) -> Message:
    if stream:
        return assemble(session.ask(messages, tools=TOOLS, stream=True))
    return session.answer(messages, tools=TOOLS)


def call_tools(engine: ScriptedEngine) -> None:
    """From now on every reply thinks and calls the tool, each in its own words."""

    def script(generation: Any, index: int) -> str:
        number = f"{len(engine.generations)}.{index}"
        return engine.family.speak("look", reasoning=f"thought {number}", calls=[("lookup", {"key": number})])

    engine.script = script


def sampled(calls: list[dict[str, Any]]) -> list[Any]:
    return [[call["call_id"], *(call[name] for name in SAMPLED)] for call in calls]


# What a fork gets


@pytest.mark.case(84)
@pytest.mark.parametrize("stream", [False, True])
def test_a_fork_gets_the_recorded_replies_and_is_sampled_from_the_pivot(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    call_tools(engine)
    origin = service.session()
    recorded = tool_loop(origin, 4)
    asked = len(engine.generations)
    copy = fork(service, origin, origin.calls[2]["call_id"])
    messages = tool_loop(copy, 2, stream=stream)
    assert messages == recorded[: len(messages)]
    assert len(engine.generations) == asked
    own = ask_for_tool(copy, messages)
    assert own != recorded[len(messages)]
    old, new = origin.calls, copy.calls
    assert sampled(new[:2]) == sampled(old[:2])
    assert [call["session_id"] for call in new] == [origin.session_id] * 2 + [copy.session_id]
    assert [call["replay"] for call in new] == [None, None, "pivot"]
    # The pivot is sampled after the very ids that it was sampled after in the origin.
    assert new[2]["prompt_ids"] == old[2]["prompt_ids"] == engine.last.prompt_ids
    (row,), accounting = copy.trajectories()
    tokens = sum(len(call["completion_ids"]) for call in new[:2])
    assert accounting["replayed_tokens"] == tokens > 0
    assert accounting["sampled_tokens"] == accounting["exported_tokens"] == len(new[2]["completion_ids"])
    assert accounting["complete"]
    assert row["loss_mask"] == [0] * len(new[2]["prompt_ids"]) + [1] * len(new[2]["completion_ids"])
    assert row["weight_versions"] == [[0, len(new[2]["prompt_ids"]), len(row["token_ids"])]]
    # An engine that renders by itself tokenizes replies anew: there each call is a branch, and no replayed token is in the row.
    within = [call for call in new[:2] if call["call_id"] in row["call_ids"]]
    assert len(within) == (2 if service.settings.engine_api == "token" else 0)
    assert row["metadata"]["replay"] == {
        "session_id": origin.session_id,
        "calls": 2,
        "tokens": sum(len(call["completion_ids"]) for call in within),
        "weight_versions": [
            [0, len(call["prompt_ids"]), len(call["prompt_ids"]) + len(call["completion_ids"])] for call in within
        ],
        "pivot": len(new[2]["prompt_ids"]),
        "differs_from": None,
        "diverged_at": None,
    }


@pytest.mark.parametrize("converse", [by_chat, by_completions, by_responses, by_messages, by_gemini])
def test_every_dialect_replays_streamed_and_whole(
    engine: ScriptedEngine, token_service: RunningService, converse: Callable[[dict[str, str], str], None]
) -> None:
    origin, control = token_service.session(), token_service.request

    def talk(session_id: str, key: str) -> None:
        root = f"{token_service.url}/s/{session_id}"
        converse({"openai": f"{root}/v1", "anthropic": root, "gemini": root}, key)

    talk(origin.session_id, origin.api_key)
    asked = len(engine.generations)
    copy = fork(token_service, origin, on_divergence="fail")
    talk(copy.session_id, copy.api_key)
    assert len(engine.generations) == asked
    assert sampled(copy.calls) == sampled(origin.calls)
    assert control("GET", f"/sessions/{copy.session_id}").json()["replay"]["calls"] == len(origin.calls)


CHAT = {"model": "policy", "messages": [turn("user", "q")]}
WHOLE: dict[str, Any] = dict(QUESTIONS.values())


@pytest.mark.parametrize("path", WHOLE)
def test_a_whole_reply_is_the_same_to_the_last_byte(engine: ScriptedEngine, token_service: RunningService, path: str) -> None:
    origin = token_service.session()
    first = origin.post(path, WHOLE[path])
    again = fork(token_service, origin).post(path, WHOLE[path])
    assert first.status_code == again.status_code == 200
    assert again.content == first.content


def test_at_a_pace_a_reply_is_streamed_in_pieces(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say(Say("one two three four five six"))
    origin = token_service.session()
    origin.ask("q")
    at_once, chunks = streamed_text(fork(token_service, origin).ask("q", stream=True))
    paced, pieces = streamed_text(fork(token_service, origin, tokens_per_second=1000).ask("q", stream=True))
    assert at_once == paced == "one two three four five six"
    assert len(pieces) > len(chunks)


def test_logprobs_and_ids_come_with_a_replayed_reply(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    origin.ask("q", logprobs=True)
    (call,) = origin.calls
    for stream in (False, True):
        copy = fork(token_service, origin, tokens_per_second=1000)
        answer = copy.ask("q", logprobs=True, stream=stream)
        choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
        given = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert [entry.token for entry in given] == [f"token_id:{token}" for token in call["completion_ids"]]
        assert [entry.logprob for entry in given] == pytest.approx(call["logprobs"])


# Where its state is


def test_a_fork_goes_on_in_any_process_and_after_restarts(
    engine: ScriptedEngine, token_service: RunningService, other_service: RunningService
) -> None:
    call_tools(engine)
    origin = token_service.session()
    recorded = tool_loop(origin, 4)
    origin.close(reward=1.0)
    asked = len(engine.generations)
    copy = fork(token_service, origin, 3, on_divergence="fail")
    messages = [turn("user", "find it")]
    for number in range(3):
        # Each request reaches another process; the last one a new one, which has nothing but the store.
        service = (other_service, token_service)[number % 2]
        answer = copy.post("/v1/chat/completions", {**CHAT, "messages": messages, "tools": TOOLS}, at=service).json()
        messages.append(answer["choices"][0]["message"])
        messages.append(tool_result(messages[-1], str(number)))
    assert [each["content"] for each in messages] == [each.get("content") for each in recorded[:7]]
    assert [each.get("tool_calls") for each in messages] == [each.get("tool_calls") for each in recorded[:7]]
    assert len(engine.generations) == asked
    with RunningService(engine.url, token_service.settings.redis, engine_api="token") as restarted:
        answer = copy.post("/v1/chat/completions", {**CHAT, "messages": messages, "tools": TOOLS}, at=restarted)
    assert answer.status_code == 200
    assert len(engine.generations) == asked + 1
    assert copy.calls[3]["prompt_ids"] == origin.calls[3]["prompt_ids"]


def test_a_fork_of_an_archived_session_restores_it(engine: ScriptedEngine, redis_server: RedisServer, tmp_path: Path) -> None:
    call_tools(engine)
    settings: dict[str, Any] = {"retention": {"archive_dir": tmp_path, "seconds": 0.5}}
    adding = [partial(add_rollouts, KNOWN)]
    with RunningService(engine.url, redis_server.url, engine_api="token", adding=adding, **settings) as service:
        origin = service.session()
        recorded = tool_loop(origin, 2)
        origin.close("failed")
        path = f"/sessions/{origin.session_id}"
        wait_until(lambda: service.request("GET", path).status_code == 404, 60, "the session is in the archive")
        # A task of its forks is checked against the archive.
        task = {"instruction": "go", "harness": "shell"}
        statuses = [
            service.request(
                "POST", "/tasks", json={**task, "fork": {"session_id": origin.session_id, "until": until}}
            ).status_code
            for until in (1, 3)
        ]
        assert statuses == [201, 400]
        assert service.request("GET", path).status_code == 404
        with ThreadPoolExecutor(3) as pool:
            copies = list(pool.map(lambda _: fork(service, origin, 1), range(3)))
        for copy in copies:
            assert tool_loop(copy, 1) == recorded[:3]
            # Retention leaves it there as long as there are forks.
            assert service.request("GET", path).json()["status"] == "failed"
            copy.close("failed")
        wait_until(lambda: service.request("GET", path).status_code == 404, 60, "all are in the archive")


# Several replies to one request


def test_choices_of_one_request_are_replayed_together(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    origin.ask("q", n=3)
    copy = fork(token_service, origin)
    copy.ask("q", n=3)
    assert sampled(copy.calls) == sampled(origin.calls)
    assert copy.trajectories()[1]["replayed_tokens"] == origin.trajectories()[1]["sampled_tokens"]
    with pytest.raises(ConflictError, match="number of choices"):
        fork(token_service, origin, on_divergence="fail").ask("q", n=2)


def test_of_twins_each_gets_one_of_the_recorded_replies(
    engine: ScriptedEngine, token_service: RunningService, other_service: RunningService
) -> None:
    call_tools(engine)
    origin = token_service.session()
    for _ in range(4):
        tool_loop(origin, 2)
    copy = fork(token_service, origin, on_divergence="fail")

    def talk(number: int) -> list[Any]:
        service, messages = (token_service, other_service)[number % 2], [turn("user", "find it")]
        for at in range(2):
            answer = copy.post("/v1/chat/completions", {**CHAT, "messages": messages, "tools": TOOLS}, at=service)
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"]]
            messages += [tool_result(messages[-1], str(at))]
        return messages

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(talk, range(4)))
    assert len({json.dumps(messages) for messages in told}) == 4
    assert sorted(sampled(copy.calls)) == sorted(sampled(origin.calls))


RESPONSES_TOOLS: list[Any] = [{"type": "function", **TOOLS[0]["function"], "strict": False}]


def respond(session: Session, **fields: Any) -> dict[str, Any]:
    response: dict[str, Any] = session.client.responses.create(model="policy", tools=RESPONSES_TOOLS, **fields).to_dict()
    return response


def answer_item(response: dict[str, Any], output: str) -> dict[str, Any]:
    (call_id,) = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    return {"type": "function_call_output", "call_id": call_id, "output": output}


@pytest.mark.case(87)
@pytest.mark.parametrize("instructions", [None, "be brief"])
def test_a_fork_of_calls_by_chat_is_followed_by_the_ids_of_its_responses(
    engine: ScriptedEngine, token_service: RunningService, instructions: str | None
) -> None:
    """The old bug: the calls were recorded by chat, so that this session's own responses were not found."""
    call_tools(engine)
    origin = token_service.session()
    system = [] if instructions is None else [turn("system", [{"type": "text", "text": instructions}])]
    messages: list[Message] = [*system, turn("user", "find it")]
    for number in range(3):
        messages.append(ask_for_tool(origin, messages))
        messages.append(tool_result(messages[-1], str(number)))
    asked = len(engine.generations)
    copy = fork(token_service, origin, on_divergence="fail")
    fields: dict[str, Any] = {} if instructions is None else {"instructions": instructions}
    responses = [respond(copy, input="find it", **fields)]
    for number in range(2):
        previous = {"previous_response_id": responses[-1]["id"], **fields}
        responses.append(respond(copy, input=[answer_item(responses[-1], str(number))], **previous))
    assert len(engine.generations) == asked, "all of them were replayed"
    assert [response["id"].removeprefix("resp_") for response in responses] == [call["call_id"] for call in origin.calls]
    assert [call["dialect"] for call in copy.calls] == ["responses"] * 3
    assert sampled(copy.calls) == sampled(origin.calls)
    for response in responses:
        assert copy.client.responses.retrieve(response["id"]).to_dict() == response
    listed = copy.client.responses.input_items.list(responses[-1]["id"], order="asc").data
    assert sorted({item.type for item in listed}) == ["function_call", "function_call_output", "message", "reasoning"]
    more = respond(copy, input=[answer_item(responses[-1], "2")], previous_response_id=responses[-1]["id"], **fields)
    assert engine.last.prompt_ids[: len(said := ids_of(origin.calls[-1]))] == said
    assert copy.calls[-1]["call_id"] == more["id"].removeprefix("resp_")


def ids_of(call: dict[str, Any]) -> list[int]:
    return [*call["prompt_ids"], *call["completion_ids"]]


def test_what_a_fork_was_given_by_chat_is_no_response_of_it(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    response = origin.client.responses.create(model="policy", input="q")
    copy = fork(token_service, origin, on_divergence="fail")
    assert copy.ask("q").id == response.id.replace("resp_", "chatcmpl-")
    with pytest.raises(NotFoundError):
        copy.client.responses.retrieve(response.id)


@pytest.mark.case(87)
@pytest.mark.parametrize("stored", [True, False])
def test_whether_a_replayed_response_is_stored_is_what_the_forks_own_request_says(
    engine: ScriptedEngine, token_service: RunningService, stored: bool
) -> None:
    origin = token_service.session()
    response = origin.client.responses.create(model="policy", input="q", store=not stored)
    copy = fork(token_service, origin, on_divergence="fail")
    assert copy.client.responses.create(model="policy", input="q", store=stored).id == response.id
    found = token_service.request("GET", f"/s/{copy.session_id}/v1/responses/{response.id}", token=copy.api_key)
    assert found.status_code == (200 if stored else 404)


def test_a_fork_in_its_origins_dialect_refers_to_the_records(
    engine: ScriptedEngine, token_service: RunningService, redis_server: RedisServer
) -> None:
    """Also where the client names itself otherwise, as Codex does in every run."""
    origin = token_service.session()
    origin.client.responses.create(model="policy", input="q", prompt_cache_key="one", metadata={"run": "1"})
    copy = fork(token_service, origin, on_divergence="fail")
    copy.client.responses.create(model="policy", input="q", prompt_cache_key="two", metadata={"run": "2"})
    with redis_server.client() as client:
        (entry,) = client.lrange(keys.calls(copy.session_id), 0, -1)
    assert is_reference(entry)


def test_an_attempt_that_a_retry_replaced_is_not_replayed(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    url = f"{token_service.url}/s/{origin.session_id}/v1/chat/completions"
    held = engine.generations
    engine.say(Say("never read", seconds_per_token=0.2), "read")
    with hanging_up(url, CHAT, origin.api_key):
        engine.wait_for(lambda: len(held) == 1, 60)
    wait_until(lambda: origin.calls and origin.calls[0]["status"] == "aborted", 60, "the first attempt is recorded")
    assert origin.post("/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"] == "read"
    copy = fork(token_service, origin, on_divergence="fail")
    assert copy.ask("q").choices[0].message.content == "read"
    assert [call["status"] for call in copy.calls] == ["finished"]
    name, attempt = origin.session_id, origin.calls[0]["call_id"]
    assert refuse(token_service, {"session_id": name, "until": 2})[0] == 400
    assert (
        f"call '{attempt}' of session '{name}' is quarantined"
        in refuse(token_service, {"session_id": name, "until": attempt})[1]
    )


def test_a_retry_gets_the_same_reply_again(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    origin.ask("q")
    copy = fork(token_service, origin, on_divergence="fail")
    first = copy.post("/v1/chat/completions", CHAT)
    again = copy.post("/v1/chat/completions", CHAT, headers={"x-stainless-retry-count": "1"})
    assert again.content == first.content
    assert len(copy.calls) == 1
    wait_until(lambda: copy.calls[0]["delivered"], 60, "the delivery is noted")
    # It was delivered, so that another request of the same kind is one that was not recorded.
    assert copy.post("/v1/chat/completions", CHAT).json()["error"]["code"] == "replay_diverged"


# Divergence


@pytest.mark.case(86)
def test_a_request_that_was_not_recorded_is_sampled_or_refused(engine: ScriptedEngine, service: RunningService) -> None:
    call_tools(engine)
    origin = service.session()
    recorded = tool_loop(origin, 3)
    strict, free = (fork(service, origin, 2, on_divergence=how) for how in ("fail", "live"))
    for copy in (strict, free):
        assert tool_loop(copy, 1) == recorded[:3]
    other = [*recorded[:2], tool_result(recorded[1], "something else")]
    with pytest.raises(ConflictError, match=r"message 3 \(tool\) differs") as refused:
        strict.ask(other, tools=TOOLS)
    assert refused.value.code == "replay_diverged"
    told = service.request("GET", f"/sessions/{strict.session_id}").json()["unserved"]
    assert told["code"] == "replay_diverged"
    # What the recording has goes on to be replayed.
    assert strict.answer(recorded[:3], tools=TOOLS) == recorded[3]
    said = free.answer(other, tools=TOOLS)
    assert [call["replay"] for call in free.calls] == [None, "diverged"]
    other += [said, tool_result(said, "more")]
    free.ask(other, tools=TOOLS)
    assert [call["session_id"] for call in free.calls] == [origin.session_id, free.session_id, free.session_id]
    rows, accounting = free.trajectories()
    assert {row["metadata"]["replay"]["diverged_at"] for row in rows} == {free.calls[1]["call_id"]}
    assert accounting["exported_tokens"] == sum(len(call["completion_ids"]) for call in free.calls[1:])
    metrics = plain_http.get(f"{service.url}/metrics", headers={"Authorization": "Bearer x"}).text
    assert 'verbatim_replay_requests_total{outcome="diverged"}' in metrics


@pytest.mark.case(88)
def test_a_fork_of_a_fork_diverges_also_after_the_pivot_that_it_replays(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """Its own pivot counts: a request that was not recorded was sampled before it, and no word said of it."""
    call_tools(engine)
    origin = token_service.session()
    tool_loop(origin, 2)
    first = fork(token_service, origin, 1)
    messages = tool_loop(first, 3)
    second = fork(token_service, first, 2, on_divergence="fail")
    assert tool_loop(second, 2) == messages[:5]
    with pytest.raises(ConflictError, match=r"message 5 \(tool\) differs"):
        second.ask([*messages[:4], tool_result(messages[3], "something else")], tools=TOOLS)
    ask_for_tool(second, messages[:5])
    (row,), _ = second.trajectories()
    assert row["metadata"]["replay"]["pivot"] == len(second.calls[2]["prompt_ids"]), "and not that of the first fork"


@pytest.mark.case(86)
def test_a_refusal_says_what_was_not_recorded(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    origin.ask("q")
    copy = fork(token_service, origin, on_divergence="fail")
    chat = "/v1/chat/completions"
    for body, reason in (
        ({**CHAT, "model": "another"}, "it asks for the model 'another', not for 'policy'"),
        ({**CHAT, "messages": [turn("user", "other")]}, "its message 1 (user) differs"),
        ({**CHAT, "messages": [turn("user", "q"), turn("user", "r")]}, "its history has 2 messages"),
        ({**CHAT, "tools": TOOLS}, "its tools, parameters"),
    ):
        answer = copy.post(chat, body)
        assert answer.status_code == 409
        assert reason in answer.json()["error"]["message"]
    answer = copy.post("/v1/messages", {**WHOLE["/v1/messages"], "messages": [turn("user", "x")]})
    assert (answer.status_code, answer.json()["type"]) == (409, "error")


def test_after_the_pivot_nothing_diverges(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    origin.ask("q")
    copy = fork(token_service, origin, 0, on_divergence="fail")
    copy.ask("q")
    copy.ask("a helper's question, which the origin never asked")
    assert [call["replay"] for call in copy.calls] == ["pivot", None]


def test_where_ids_prove_replies_tool_results_may_differ(
    engine: ScriptedEngine, token_service: RunningService, other_service: RunningService
) -> None:
    call_tools(engine)
    origin = token_service.session()
    recorded = tool_loop(origin, 5)
    copy = fork(token_service, origin, 4, echo_policy="minted", on_divergence="fail")
    results = ["0", "at 12:01", "2", "3"]
    asked = len(engine.generations)
    messages: list[Message] = [turn("user", "find it")]
    for number, result in enumerate(results):
        service = (token_service, other_service)[number % 2]
        answer = copy.post("/v1/chat/completions", {**CHAT, "messages": messages, "tools": TOOLS}, at=service)
        messages += [answer.json()["choices"][0]["message"]]
        messages += [tool_result(messages[-1], result)]
    assert [each.get("tool_calls") for each in messages[1::2]] == [each["tool_calls"] for each in recorded[1:8:2]]
    assert len(engine.generations) == asked
    copy.ask(messages, tools=TOOLS)
    # Sampled after what really happened.
    assert engine.last.prompt_ids == engine.family.render(messages, TOOLS)
    calls = copy.calls
    assert [call["call_id"] for call in calls[:4]] == [call["call_id"] for call in origin.calls[:4]]
    (row,), accounting = copy.trajectories()
    told = row["metadata"]["replay"]
    assert told["differs_from"] == calls[2]["call_id"]
    assert row["token_ids"][: len(engine.last.prompt_ids)] == engine.last.prompt_ids
    assert accounting["sampled_tokens"] == sum(row["loss_mask"]) == len(calls[4]["completion_ids"])
    assert accounting["replayed_tokens"] == sum(len(call["completion_ids"]) for call in origin.calls[:2])


@pytest.mark.case(91)
def test_lines_of_a_user_that_change_with_every_run_may_differ(
    engine: ScriptedEngine, token_service: RunningService, other_service: RunningService
) -> None:
    """A date in the first message, for example, where ids prove the replies. A system prompt's such lines never reach the model."""

    def ask(session: Session, date: str, replies: int) -> list[Message]:
        messages: list[Message] = [turn("user", f"find it\nx-anthropic-billing-header: {date}\nplease")]
        for number in range(replies):
            messages.append(ask_for_tool(session, messages))
            messages.append(tool_result(messages[-1], str(number)))
        return messages

    call_tools(engine)
    origin = token_service.session()
    recorded = ask(origin, "Monday", 3)
    asked = len(engine.generations)
    strict = fork(token_service, origin, 2, on_divergence="fail")
    with pytest.raises(ConflictError, match=r"message 1 \(user\) differs"):
        ask(strict, "Tuesday", 1)
    copy = fork(token_service, origin, 2, echo_policy="minted", on_divergence="fail")
    messages = ask(copy, "Tuesday", 2)
    assert [each["tool_calls"] for each in messages[1::2]] == [each["tool_calls"] for each in recorded[1:5:2]]
    assert len(engine.generations) == asked
    answer = copy.post("/v1/chat/completions", {**CHAT, "messages": messages, "tools": TOOLS}, at=other_service)
    assert answer.status_code == 200
    # Sampled after what really happened.
    assert engine.last.prompt_ids == engine.family.render(messages, TOOLS)
    calls = copy.calls
    assert [call["call_id"] for call in calls[:2]] == [call["call_id"] for call in origin.calls[:2]]
    (row,), accounting = copy.trajectories()
    assert row["metadata"]["replay"]["differs_from"] == calls[0]["call_id"]
    assert accounting["sampled_tokens"] == sum(row["loss_mask"]) == len(calls[2]["completion_ids"])
    other = fork(token_service, origin, 2, echo_policy="minted", on_divergence="fail")
    with pytest.raises(ConflictError, match=r"message 1 \(user\) differs"):
        other.ask([turn("user", "find it\nx-anthropic-billing-header: Monday\nnow")], tools=TOOLS)
    again = fork(token_service, copy, echo_policy="minted", on_divergence="fail")
    assert ask(again, "Wednesday", 1)[1]["tool_calls"] == recorded[1]["tool_calls"]


# Families of forks


class Walk(RandomHarness):
    """Without the steps whose course depends on time: with equal replies two of one seed make the same requests."""

    def steps(self) -> dict[str, tuple[int, Callable[[], None]]]:
        timed = ("walk_away",) if self.seed % 2 else ("walk_away", "at_once")
        return {name: step for name, step in super().steps().items() if name not in timed}


def walk(session: Session, seed: int, calls: int) -> None:
    harness = Walk(session.base_url, session.api_key, seed)
    try:
        harness.run(calls)
    finally:
        harness.close()


@pytest.mark.case(85, 88)
@pytest.mark.parametrize("seed", range(6))
def test_in_a_family_of_forks_each_sampled_token_is_counted_once(
    engine: ScriptedEngine, token_service: RunningService, other_service: RunningService, seed: int
) -> None:
    """A harness that does at random what harnesses do, its forks at random pivots, and forks of these."""
    draw = random.Random(seed)
    policy = draw.choice(["strict", "minted"])
    family = [token_service.session(echo_policy=policy)]
    walk(family[0], seed, 8)
    for _ in range(4):
        origin = draw.choice(family)
        pivot = draw.choice([call["call_id"] for call in origin.calls])
        copy = fork(draw.choice([token_service, other_service]), origin, pivot, echo_policy=policy)
        walk(copy, seed, 10)
        family.append(copy)
        before = [call["call_id"] for call in origin.calls]
        replayed = [call for call in copy.calls if call["session_id"] != copy.session_id]
        assert {call["call_id"] for call in replayed} <= set(before[: before.index(pivot)])
        if seed % 2 == 0:
            # The same harness with the same replies asks the same: it gets to the pivot, and all before that is replayed.
            assert "diverged" not in {call["replay"] for call in copy.calls}
            assert [call["call_id"] for call in replayed] == before[: before.index(pivot)]
    owned = [call for session in family for call in session.calls if call["session_id"] == session.session_id]
    said = sum(len(ids) for made in engine.generations for ids in made.sampled.values())
    assert len({call["call_id"] for call in owned}) == len(owned)
    assert sum(len(call["completion_ids"]) for call in owned) == said
    accounts = [session.trajectories() for session in family]
    assert sum(accounting["sampled_tokens"] for _, accounting in accounts) == said
    trained = sum(sum(row["loss_mask"]) for rows, _ in accounts for row in rows)
    assert trained == sum(accounting["exported_tokens"] for _, accounting in accounts)
    for session, (rows, accounting) in zip(family, accounts, strict=True):
        elsewhere = [call for call in session.calls if call["session_id"] != session.session_id]
        assert accounting["replayed_tokens"] == sum(len(call["completion_ids"]) for call in elsewhere)
        assert not {call["call_id"] for call in elsewhere} & {item["call_id"] for item in accounting["quarantined"]}
        for row in rows:
            assert row["logprobs"] == pytest.approx(expected_logprobs(row, session.calls))


def expected_logprobs(row: dict[str, Any], calls: list[dict[str, Any]]) -> list[float]:
    """Those of the row's trained tokens after the row's own ids, 0 elsewhere."""
    named = {call["call_id"]: call for call in calls}
    expected = [0.0] * len(row["token_ids"])
    for call_id in row["call_ids"]:
        prompt_ids, ids = named[call_id]["prompt_ids"], named[call_id]["completion_ids"]
        start = len(prompt_ids)
        assert row["token_ids"][: start + len(ids)] == [*prompt_ids, *ids]
        if any(row["loss_mask"][start : start + len(ids)]):
            assert named[call_id]["session_id"] == row["session_id"]
            expected[start : start + len(ids)] = logprobs_of(prompt_ids, ids)
    return expected


@pytest.mark.case(89)
def test_forks_between_pushes_know_whose_weights_sampled_what(tmp_path: Path) -> None:
    """Version 0 samples the origin, 1 its fork, 2 the fork's fork. Each row's own versions are those of what it trains."""
    with running_redis() as redis, ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis.url) as service:
        call_tools(engine)
        family = [service.session()]
        tool_loop(family[0], 1)
        for version in (1, 2):
            body = {"version": version, "path": str(tmp_path), "mode": "keep"}
            assert service.request("POST", "/weights", json=body).json()["applied"]
            family.append(fork(service, family[-1], version))
            tool_loop(family[-1], version + 1)
        for version, session in enumerate(family):
            (row,), _ = session.trajectories()
            places = [
                (len(call["prompt_ids"]), len(call["prompt_ids"]) + len(call["completion_ids"])) for call in session.calls
            ]
            assert len(places) == version + 1
            assert row["weight_versions"] == [[version, *places[-1]]]
            replayed = row["metadata"].get("replay", {}).get("weight_versions", [])
            assert replayed == [[at, *place] for at, place in enumerate(places[:-1])]


# The origin


def test_a_session_is_kept_as_long_as_forks_replay_it(engine: ScriptedEngine, token_service: RunningService) -> None:
    call_tools(engine)
    origin = token_service.session()
    recorded = tool_loop(origin, 3)
    first = fork(token_service, origin, 2)
    messages = tool_loop(first, 2)
    ask_for_tool(first, messages)
    second = fork(token_service, first, 3)
    assert tool_loop(second, 2) == recorded[:5]
    assert ask_for_tool(second, messages)["tool_calls"] == first.calls[2]["reply"]["tool_calls"]
    assert [call["session_id"] for call in second.calls] == [origin.session_id] * 2 + [first.session_id]
    for session, kept_by in ((origin, first), (first, second)):
        answer = token_service.request("DELETE", f"/sessions/{session.session_id}")
        assert answer.status_code == 409
        assert kept_by.session_id in answer.json()["error"]["message"]
    for session in (second, first, origin):
        assert token_service.request("DELETE", f"/sessions/{session.session_id}").status_code == 204


def test_a_fork_stores_references(engine: ScriptedEngine, token_service: RunningService, redis_server: RedisServer) -> None:
    engine.say(Say("word " * 500))
    origin = token_service.session()
    origin.ask("q")
    copy = fork(token_service, origin)
    copy.ask("q")
    client = redis_server.client()
    (entry,) = client.lrange(keys.calls(copy.session_id), 0, -1)
    (record,) = client.lrange(keys.calls(origin.session_id), 0, -1)
    assert len(entry) < 100 < len(record)


# Forks that are not opened


@pytest.mark.case(92)
def test_a_fork_that_cannot_be_is_refused_with_the_reason(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    origin.ask("q")
    name = origin.session_id
    call_id = origin.calls[0]["call_id"]
    for replay, status, reason in (
        ({"session_id": "nobody"}, 404, "there is no session 'nobody'"),
        ({"session_id": name, "until": "f" * 24}, 404, f"has no call '{'f' * 24}'"),
        ({"session_id": name, "until": 2}, 400, "has 1 recorded requests"),
        ({"session_id": name, "until": -1}, 400, "until"),
        ({"session_id": name, "tokens_per_second": 0}, 400, "tokens_per_second"),
        ({"session_id": name, "on_divergence": "guess"}, 400, "on_divergence"),
    ):
        found, message = refuse(token_service, replay)
        assert (found, reason in message) == (status, True), message
    assert refuse(token_service, {"session_id": "self"}, session_id="self")[0] == 400
    copy = fork(token_service, origin, call_id)
    copy.ask("q")
    # The fork's calls are its origin's: in a session of the origin's name they would count as its own.
    token_service.request("DELETE", f"/sessions/{copy.session_id}")
    assert token_service.request("DELETE", f"/sessions/{name}").status_code == 204


def test_a_pivot_must_be_a_call_with_exact_tokens(engine: ScriptedEngine, running: Running, redis_server: RedisServer) -> None:
    with (
        ScriptedEngine(plain=True) as plain,
        RunningService(plain.url, redis_server.url, engine_api="chat", engine_connect_seconds=60.0) as service,
    ):
        origin = service.session()
        origin.ask("q")
        status, message = refuse(service, {"session_id": origin.session_id, "until": origin.calls[0]["call_id"]})
    assert (status, "quarantined (no_token_ids)" in message) == (400, True), message


def test_a_call_without_a_result_is_no_pivot(
    engine: ScriptedEngine, token_service: RunningService, redis_server: RedisServer
) -> None:
    origin = token_service.session()
    name = origin.session_id
    with ThreadPoolExecutor(1) as pool:
        engine.say(Say("slow", seconds_per_token=0.5))
        asked = pool.submit(origin.ask, "q")
        wait_until(lambda: bool(origin.calls), 60, "the call is known")
        (call,) = origin.calls
        if call["status"] == "in_flight":
            assert "is still in flight" in refuse(token_service, {"session_id": name, "until": call["call_id"]})[1]
        asked.result()
    lost = Intent("f" * 24, None, b"digest", "replica", 1.0, process="of the dead")
    redis_server.client().hset(keys.intents(name), lost.call_id, keys.pack_versioned(lost))
    status, message = refuse(token_service, {"session_id": name, "until": lost.call_id})
    assert (status, "is dangling: its process died" in message) == (400, True), message


def test_a_session_of_a_model_that_is_not_served_is_not_replayed(engine: ScriptedEngine, token_service: RunningService) -> None:
    origin = token_service.session()
    origin.ask("q")
    redis, name = token_service.settings.redis, origin.session_id
    with (
        ScriptedEngine(model="other") as other,
        RunningService(other.url, redis, engine_api="token", strict_models=True) as service,
    ):
        status, message = refuse(service, {"session_id": name})
    assert (status, "the model 'policy', which no engine serves" in message) == (400, True), message


def test_a_fork_whose_records_are_gone_says_so(
    engine: ScriptedEngine, token_service: RunningService, redis_server: RedisServer, other_service: RunningService
) -> None:
    origin = token_service.session()
    origin.ask("q")
    copy = fork(token_service, origin)
    redis_server.client().delete(*keys.session(origin.session_id))
    answer = copy.post("/v1/chat/completions", CHAT, at=other_service)
    assert answer.status_code == 409
    assert f"the records of session '{origin.session_id}', which are to be replayed, are gone" in answer.text
