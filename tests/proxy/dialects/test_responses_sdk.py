"""OpenAI Responses through the real service and a real Redis, as the openai SDK and the agents SDK see it.

The engine samples what a script says, with a real tokenizer and template; `service` runs every test once per engine path.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import ResponseItemList
from pydantic import BaseModel, TypeAdapter

from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer
from tests.support.service.responses_client import ask, ask_stream, ask_whole, read_events
from tests.support.service.running_service import RunningService, Session, wait_until

if TYPE_CHECKING:
    import agents

LOOKUP = {
    "type": "function",
    "name": "lookup",
    "description": "Looks a key up.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}
AGENTS = {
    "type": "namespace",
    "name": "team",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}}],
}
SHELL = {"type": "local_shell"}


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer_to(item: dict[str, Any], output: Any = "done") -> dict[str, Any]:
    return {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": output}


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def assert_one_row(session: Session, calls: int) -> None:
    """Every call goes on from the one before, and all of them are one training row."""
    recorded = session.calls
    assert [call["branch_reason"] for call in recorded] == [None] * calls
    assert [call["parent_id"] for call in recorded] == [None, *(call["call_id"] for call in recorded[:-1])]
    rows, accounting = session.trajectories()
    assert len(rows) == 1
    assert (
        accounting["sampled_tokens"] == accounting["exported_tokens"] == sum(len(call["completion_ids"]) for call in recorded)
    )


# What a reply is, streamed and whole


def test_text_is_a_message_named_after_its_call(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say("hello world")
    session = service.session()
    response = ask(session, stream, input="q", instructions="be brief", max_output_tokens=50, metadata={"a": "b"})
    (call,) = session.calls
    assert response["id"] == f"resp_{call['call_id']}"
    (message,) = response["output"]
    assert (message["id"], message["content"][0]["text"]) == (f"msg_{call['call_id']}", "hello world")
    assert response["usage"]["input_tokens"] == len(call["prompt_ids"])
    assert response["usage"]["output_tokens"] == len(call["completion_ids"])
    assert (response["status"], response["metadata"], response["instructions"]) == ("completed", {"a": "b"}, "be brief")
    assert call["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    assert call["sampling"]["max_tokens"] == 50
    assert call["dialect"] == "responses"


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("include", [None, ["reasoning.encrypted_content"]])
def test_reasoning_goes_out_as_the_harness_asked_for_it(
    engine: ScriptedEngine, service: RunningService, stream: bool, summary: Any, include: Any
) -> None:
    engine.say(engine.family.speak("so it is", reasoning="step by step"))
    session = service.session()
    fields = {"reasoning": {"summary": summary}} if summary else {}
    response = ask(session, stream, input="q", **fields, **({"include": include} if include else {}))
    reasoning, message = response["output"]
    shown, hidden = ("summary", "content") if summary else ("content", "summary")
    assert [part["text"] for part in reasoning[shown]] == ["\nstep by step\n"]
    assert not reasoning.get(hidden)
    assert bool(reasoning.get("encrypted_content")) == bool(include)
    assert message["content"][0]["text"].strip() == "so it is"
    engine.say("more")
    ask(session, stream, input=[user("q"), *response["output"], user("and?")], **fields)
    # The template drops earlier thinking at a new user turn: found all the same.
    assert session.calls[1]["parent_id"] == session.calls[0]["call_id"]


@pytest.mark.case(37)
def test_parallel_tool_calls_are_items_of_their_own(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say(engine.family.speak(calls=[("lookup", {"key": "a"}), ("lookup", {"key": "b"})]), "both")
    session = service.session()
    response = ask(session, stream, input="q", tools=[LOOKUP])
    (call,) = session.calls
    assert [(item["id"], item["call_id"], json.loads(item["arguments"])) for item in response["output"]] == [
        (f"fc_{call['call_id']}_{at}", f"call_{call['call_id']}_{at}", {"key": key}) for at, key in enumerate("ab")
    ]
    answers = [answer_to(item, f"value {at}") for at, item in enumerate(response["output"])]
    ask(session, stream, input=[user("q"), *response["output"], *answers], tools=[LOOKUP])
    assert "value 0" in engine.last.prompt and "value 1" in engine.last.prompt
    assert_one_row(session, 2)


def test_a_reply_cut_by_its_limit_is_incomplete(engine: ScriptedEngine, service: RunningService, stream: bool) -> None:
    engine.say("hello world in Paris")
    session = service.session()
    response = ask(session, stream, input="q", max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"
    assert session.client.responses.retrieve(response["id"]).to_dict() == response


def test_logprobs_come_with_the_text_where_they_are_asked_for(
    engine: ScriptedEngine, service: RunningService, stream: bool
) -> None:
    engine.say("hello world")
    session = service.session()
    response = ask(session, stream, input="q", include=["message.output_text.logprobs"], top_logprobs=2)
    told = response["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in told] == session.calls[0]["logprobs"]
    assert len(told[0]["top_logprobs"]) == 2


class Weather(BaseModel):
    city: str
    sunny: bool


def test_structured_output_is_parsed_by_the_sdk(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say('{"city": "Paris", "sunny": true}')
    session = service.session()
    parsed = session.client.responses.parse(model="policy", input="weather?", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Paris", sunny=True)
    asked = [request.body["response_format"] for request in engine.received if "response_format" in (request.body or {})]
    assert asked and asked[0]["json_schema"]["schema"]["required"] == ["city", "sunny"]


def test_the_sdks_own_stream_helper_puts_the_same_response_together(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say(engine.family.speak("let me see", reasoning="hm", calls=[("lookup", {"key": "a"})]))
    session = service.session()
    with session.client.responses.stream(model="policy", input="q", tools=[LOOKUP]) as told:
        seen = list(told)
        final = told.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == final.output_text


def test_text_reaches_the_harness_while_the_model_still_speaks(engine: ScriptedEngine, service: RunningService) -> None:
    gate = threading.Event()
    engine.say(Say(text="hello world", gate=gate, gate_after=1))
    session = service.session()
    told: list[str] = []
    try:
        for event in session.client.responses.create(model="policy", input="q", stream=True):
            if event.type == "response.output_text.delta":
                told.append(event.delta)
                gate.set()
    finally:
        gate.set()
    assert len(told) > 1 and "".join(told) == "hello world"


# Replays: every form comes back to its node


def replays(response: dict[str, Any]) -> dict[str, list[Any]]:
    """A reply's items as harnesses send them back."""
    items = response["output"]
    bare = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
    return {
        "verbatim": items,
        "without reasoning": [item for item in items if item["type"] != "reasoning"],
        "without ids": bare,
        "sealed": [{**item, "content": None} if item["type"] == "reasoning" else item for item in items],
        "by reference": [{"type": "item_reference", "id": item["id"]} for item in items],
    }


@pytest.mark.parametrize("form", ["verbatim", "without reasoning", "without ids", "sealed", "by reference"])
def test_a_reply_is_known_again_in_every_form(
    engine: ScriptedEngine, token_service: RunningService, stream: bool, form: str
) -> None:
    engine.say(engine.family.speak("let me see", reasoning="think", calls=[("lookup", {"key": "a"})]), "done")
    session = token_service.session()
    fields: dict[str, Any] = {"tools": [LOOKUP], "include": ["reasoning.encrypted_content"]}
    first = ask(session, stream, input="q", **fields)
    assert kinds(first) == ["reasoning", "message", "function_call"]
    ask(session, stream, input=[user("q"), *replays(first)[form], answer_to(first["output"][2], "A")], **fields)
    assert_one_row(session, 2)
    assert session.calls[1]["projection"] == ("reasoning_dropped" if form == "without reasoning" else "exact")


@pytest.mark.parametrize("form", ["verbatim", "by reference"])
def test_identical_siblings_are_told_apart_by_their_items(
    engine: ScriptedEngine, token_service: RunningService, form: str
) -> None:
    session = token_service.session()
    engine.say(*["the same"] * 3)
    replies = [ask(session, input="q") for _ in range(3)]
    for reply in (replies[1], replies[0], replies[2]):
        ask(session, input=[user("q"), *replays(reply)[form], user("go on")])
    calls = session.calls
    assert [call["parent_id"] for call in calls[3:]] == [calls[1]["call_id"], calls[0]["call_id"], calls[2]["call_id"]]


def test_items_that_stand_between_outputs_still_belong_to_their_reply(
    engine: ScriptedEngine, token_service: RunningService
) -> None:
    """Some harnesses put each output right behind its call."""
    engine.say(engine.family.speak(calls=[("lookup", {"key": "a"}), ("lookup", {"key": "b"})]), "both")
    session = token_service.session()
    one, two = ask(session, input="q", tools=[LOOKUP])["output"]
    ask(session, input=[user("q"), one, answer_to(one), two, answer_to(two)], tools=[LOOKUP])
    assert_one_row(session, 2)


def test_an_edited_reply_is_a_prompt_and_no_replay(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say("hello", "again")
    session = token_service.session()
    (message,) = ask(session, input="q")["output"]
    message["content"][0]["text"] = "something that was never sampled"
    ask(session, input=[user("q"), message, user("go on")])
    assert session.calls[1]["parent_id"] is None
    assert "never sampled" in engine.last.prompt


# Kinds of tools


def test_a_custom_tool_is_called_with_text(engine: ScriptedEngine, token_service: RunningService, stream: bool) -> None:
    patch = '*** Begin Patch\n+say "hi"\n*** End Patch'
    engine.say(engine.family.speak(calls=[("apply_patch", {"input": patch})]), "done")
    session = token_service.session()
    response = ask(session, stream, input="q", tools=[PATCH])
    (item,) = response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    ask(session, stream, input=[user("q"), item, answer_to(item)], tools=[PATCH])
    assert_one_row(session, 2)


@pytest.mark.parametrize("arguments", [{"patch": "x"}, {"input": 5}, {"input": "a", "more": 1}, ["x"]])
def test_a_custom_call_of_another_shape_goes_out_as_it_was_sampled_and_is_known_again(
    engine: ScriptedEngine, token_service: RunningService, redis_server: RedisServer, stream: bool, arguments: Any
) -> None:
    engine.say(engine.family.speak(calls=[("apply_patch", arguments)]), "done", "and done")
    session = token_service.session()
    (item,) = ask(session, stream, input="q", tools=[PATCH])["output"]
    assert json.loads(item["input"]) == arguments
    # A process that has not answered the call finds it in the store.
    history = [user("q"), item, answer_to(item)]
    with RunningService(engine.url, redis_server.url, engine_api="token") as other:
        body = {"model": "policy", "input": history, "tools": [PATCH]}
        elsewhere = session.post("/v1/responses", body, at=other).json()
    ask(session, stream, input=[*history, *elsewhere["output"], user("go on")], tools=[PATCH])
    assert_one_row(session, 3)


def test_calls_of_a_namespace_carry_it(engine: ScriptedEngine, token_service: RunningService, stream: bool) -> None:
    engine.say(engine.family.speak(calls=[("team__wait", {})]), "done")
    session = token_service.session()
    added = {"type": "additional_tools", "role": "developer", "tools": [AGENTS]}
    (item,) = ask(session, stream, input=[added, user("q")], tools=[LOOKUP])["output"]
    assert (item["namespace"], item["name"]) == ("team", "wait")
    ask(session, stream, input=[added, user("q"), item, answer_to(item)], tools=[LOOKUP])
    assert_one_row(session, 2)


def test_a_local_shell_call_is_an_action(engine: ScriptedEngine, token_service: RunningService, stream: bool) -> None:
    arguments = {"command": ["ls", "-l"], "workdir": "/tmp"}
    engine.say(engine.family.speak(calls=[("local_shell", arguments)]), "done")
    session = token_service.session()
    (item,) = ask(session, stream, input="q", tools=[SHELL])["output"]
    assert item["type"] == "local_shell_call"
    assert (item["action"]["command"], item["action"]["working_directory"]) == (["ls", "-l"], "/tmp")
    # The agents SDK names the call by `id`, the API's own examples by `call_id`.
    output = {"type": "local_shell_call_output", "id": item["call_id"], "output": "total 0"}
    ask(session, stream, input=[user("q"), item, output], tools=[SHELL])
    assert_one_row(session, 2)


def test_a_shell_call_of_another_shape_is_a_function_call(
    engine: ScriptedEngine, token_service: RunningService, stream: bool
) -> None:
    engine.say(engine.family.speak(calls=[("local_shell", {"command": "ls"})]), "done")
    session = token_service.session()
    (item,) = ask(session, stream, input="q", tools=[SHELL])["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "local_shell", {"command": "ls"})
    ask(session, stream, input=[user("q"), item, answer_to(item, "no such call")], tools=[SHELL])
    assert_one_row(session, 2)


def test_tools_that_only_openai_can_run_are_left_out_and_counted(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say("hello")
    session = token_service.session()
    ask(session, input="q", tools=[LOOKUP, {"type": "web_search", "external_web_access": True}])
    rendered = [request.body for request in engine.received if request.path.endswith("/render")]
    assert [tool["function"]["name"] for tool in rendered[-1]["tools"]] == ["lookup"]
    assert "web_search" not in engine.last.prompt
    counted = token_service.request("GET", "/metrics").text
    assert any("web_search" in line and "responses" in line for line in counted.splitlines())


# The store is the state


def test_a_chain_of_previous_responses_is_one_row(engine: ScriptedEngine, token_service: RunningService, stream: bool) -> None:
    engine.say(engine.family.speak(calls=[("lookup", {"key": "a"})]), "it is A", "indeed")
    session = token_service.session()
    fields: dict[str, Any] = {"instructions": "be brief", "tools": [LOOKUP]}
    first = ask(session, stream, input=[{"role": "developer", "content": "rules"}, user("q")], **fields)
    second = ask(session, stream, input=[answer_to(first["output"][0], "A")], previous_response_id=first["id"], **fields)
    third = ask(session, stream, input="sure?", previous_response_id=second["id"], **fields)
    assert third["previous_response_id"] == second["id"]
    assert session.calls[0]["messages"][0] == {"role": "system", "content": "be brief\n\nrules"}
    assert_one_row(session, 3)


def test_instructions_are_not_carried_over(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say("hello", "again")
    session = token_service.session()
    first = ask(session, input=[{"role": "system", "content": "rules"}, user("q")], instructions="be brief")
    ask(session, input="go on", previous_response_id=first["id"], instructions="be long")
    assert "be brief" not in engine.last.prompt
    assert session.calls[1]["messages"][0] == {"role": "system", "content": "be long\n\nrules"}


def test_another_process_goes_on_from_a_response_and_shows_it(
    engine: ScriptedEngine, token_service: RunningService, redis_server: RedisServer
) -> None:
    engine.say("one", "two", "three")
    session = token_service.session()
    first = ask(session, input="q")
    with RunningService(engine.url, redis_server.url, engine_api="token") as other:
        assert session.request("GET", f"/v1/responses/{first['id']}", at=other).json() == first
        body = {"model": "policy", "input": "r", "previous_response_id": first["id"]}
        second = session.post("/v1/responses", body, at=other).json()
        # Now the first process has something to learn, and the second knows it.
        third = ask(session, input="s", previous_response_id=second["id"])
        assert session.request("GET", f"/v1/responses/{third['id']}", at=other).json() == third
    assert session.client.responses.retrieve(second["id"]).to_dict() == second
    assert_one_row(session, 3)


def test_a_stored_response_is_what_was_sent(engine: ScriptedEngine, token_service: RunningService, stream: bool) -> None:
    calls = [
        ("lookup", {"key": "a"}),
        ("apply_patch", {"input": "x"}),
        ("team__wait", {}),
        ("local_shell", {"command": ["ls"]}),
    ]
    engine.say(engine.family.speak("let me see", reasoning="think", calls=calls), "done")
    session = token_service.session()
    tools: list[dict[str, Any]] = [LOOKUP, PATCH, AGENTS, SHELL]
    fields: dict[str, Any] = {"tools": tools, "reasoning": {"summary": "auto", "effort": "low"}, "instructions": "be brief"}
    response = ask(session, stream, input="q", include=["reasoning.encrypted_content"], temperature=0.5, **fields)
    found = session.client.responses.retrieve(response["id"]).to_dict()
    assert {key: found[key] for key in found if key != "tools"} == {key: response[key] for key in response if key != "tools"}
    assert [tool["type"] for tool in found["tools"]] == [tool["type"] for tool in tools]
    answers = [answer_to(item) for item in response["output"] if "call_id" in item]
    second = ask(session, stream, input=answers, previous_response_id=response["id"], **fields)
    raw = session.client.responses.input_items.with_raw_response.list(second["id"])
    listed = TypeAdapter(ResponseItemList).validate_json(raw.content, strict=True)
    types = [item.type for item in reversed(listed.data)]
    assert types == ["message", *kinds(response), *(answer["type"] for answer in answers)]
    assert_one_row(session, 2)


def test_a_response_that_is_not_to_be_stored_is_not_found(
    engine: ScriptedEngine, token_service: RunningService, stream: bool
) -> None:
    engine.say("hello")
    session = token_service.session()
    response = ask(session, stream, input="q", store=False)
    with pytest.raises(NotFoundError):
        session.client.responses.retrieve(response["id"])
    for identifier in (response["id"], "resp_" + "0" * 24, "resp_of_another_kind"):
        with pytest.raises(BadRequestError) as refused:
            ask(session, input="r", previous_response_id=identifier)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(NotFoundError, match="not found"):
        ask(session, input=[{"type": "item_reference", "id": response["output"][0]["id"]}])
    assert len(session.calls) == 1


def test_calls_of_another_session_in_a_history_are_no_error(engine: ScriptedEngine, token_service: RunningService) -> None:
    """A harness may go on with a conversation under another session's key."""
    engine.say(engine.family.speak(calls=[("apply_patch", {"patch": "x"})]), "done")
    (item,) = ask(token_service.session(), input="q", tools=[PATCH])["output"]
    session = token_service.session()
    ask(session, input=[user("q"), item, answer_to(item)], tools=[PATCH])
    assert [call["parent_id"] for call in session.calls] == [None]


# Errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "additional_tools", "role": "developer", "tools": [LOOKUP]}]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}], "instructions": "be brief"}, "input"),
        ({"input": [{"type": "no_such_item"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
        ({"input": [{"type": "compaction", "encrypted_content": "of another service"}]}, "input"),
        ({"input": "q", "background": True}, "background"),
        ({"input": "q", "conversation": "conv_1"}, "conversation"),
        ({"input": "q", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": "q", "tool_choice": "required"}, "tool_choice"),
        ({"input": "q", "tools": [LOOKUP], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"input": "q", "tools": [{"type": "function"}]}, "tools"),
        ({"input": "q", "text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": "q", "reasoning": {"effort": "enormous"}}, "effort"),
        ({"input": "q", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_and_not_recorded(
    token_service: RunningService, fields: dict[str, Any], param: str
) -> None:
    session = token_service.session()
    with pytest.raises(BadRequestError) as refused:
        session.client.responses.create(model="policy", **fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert session.calls == []


@pytest.mark.parametrize(("status", "told"), [(500, 502), (503, 503), (429, 503)])
def test_a_failing_engine_is_an_error_to_be_asked_again(
    engine: ScriptedEngine, token_service: RunningService, stream: bool, status: int, told: int
) -> None:
    engine.fault("/inference/v1/generate", Fail(status))
    session = token_service.session()
    with pytest.raises(APIStatusError) as failed:
        session.client.responses.create(model="policy", input="q", stream=stream)
    assert failed.value.status_code == told
    assert int(failed.value.response.headers["retry-after"]) >= 1
    assert session.calls == []


def test_a_wrong_key_and_a_closed_session_are_errors(token_service: RunningService) -> None:
    session = token_service.session()
    wrong = plain_http.post(f"{session.base_url}/responses", headers={"Authorization": "Bearer no"}, json={})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
    session.close("failed")
    with pytest.raises(APIStatusError) as closed:
        session.client.responses.create(model="policy", input="q")
    assert closed.value.status_code == 409


def test_a_full_context_is_said_in_the_stream(engine: ScriptedEngine, token_service: RunningService) -> None:
    """Codex makes its history shorter only for this code, and looks for it only there."""
    session = token_service.session()
    long = "hello world " * 9000
    with pytest.raises(BadRequestError) as refused:
        session.client.responses.create(model="policy", input=long)
    assert refused.value.code == "context_length_exceeded"
    body = {"model": "policy", "input": long, "stream": True}
    answer = session.post("/v1/responses", body)
    assert answer.status_code == 200
    events = read_events(answer.text.splitlines())
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert session.calls == []


@pytest.mark.parametrize("fault", [{"break_after": 3}, {"error_after": 3}])
def test_a_reply_that_breaks_off_fails_and_its_tokens_are_kept(
    engine: ScriptedEngine, token_service: RunningService, fault: dict[str, Any]
) -> None:
    engine.say(Say(text="hello world in Paris is sunny", seconds_per_token=0.05, **fault))
    session = token_service.session()
    seen = []
    with pytest.raises(APIError):
        for event in session.client.responses.create(model="policy", input="q", stream=True):
            seen.append(event)
            assert event.type != "response.completed"
            if event.type == "response.failed":
                assert event.response.error is not None and event.response.error.code == "server_error"
                raise APIError("as the SDK's users see it", request=httpx.Request("POST", session.base_url), body=None)
    (call,) = session.calls
    assert len(call["completion_ids"]) == 3
    assert session.client.responses.retrieve(f"resp_{call['call_id']}").status == "failed"


def test_events_keep_a_waiting_harness_alive(engine: ScriptedEngine, redis_server: RedisServer) -> None:
    """The engine says nothing before three signs of life have come."""
    gate, signs = threading.Event(), 0

    def count(line: str) -> None:
        nonlocal signs
        signs += line == "event: response.in_progress"
        if signs == 3:
            gate.set()

    engine.say(Say(text="hello", gate=gate))
    with RunningService(engine.url, redis_server.url, engine_api="token", keepalive_seconds=0.05) as service:
        _, events = ask_stream(service.session(), input="q", on_line=count)
    assert [event["type"] for event in events].count("response.in_progress") >= 3


def test_a_harness_that_hangs_up_leaves_what_was_sampled(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.say(Say(text="hello world in Paris is sunny", gate=threading.Event(), gate_after=3))
    session = token_service.session()
    with session.client.responses.create(model="policy", input="q", stream=True) as told:
        for event in told:
            if event.type == "response.output_text.delta":
                break
    wait_until(lambda: [call["status"] for call in session.calls] == ["aborted"], 120, "the cut call is recorded")
    (call,) = session.calls
    assert session.client.responses.retrieve(f"resp_{call['call_id']}").status == "incomplete"


# The agents SDK


def agent_on(session: Session, client: AsyncOpenAI, **settings: Any) -> agents.Agent[Any]:
    # Takes a second or two, and is needed by one test.
    import agents

    @agents.function_tool  # type: ignore[untyped-decorator]
    def lookup(key: str) -> str:
        """Looks a key up."""
        return f"the value of {key}"

    model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
    model_settings = agents.ModelSettings(**settings)
    return agents.Agent(name="a", instructions="be brief", model=model, tools=[lookup], model_settings=model_settings)


@pytest.mark.parametrize(("store", "chained"), [(True, False), (False, False), (True, True)])
async def test_an_agent_of_several_turns_is_one_row(
    engine: ScriptedEngine, token_service: RunningService, stream: bool, store: bool, chained: bool
) -> None:
    from agents import Runner, set_tracing_disabled

    set_tracing_disabled(True)
    family = engine.family
    engine.say(
        family.speak("first", calls=[("lookup", {"key": "a"}), ("lookup", {"key": "b"})]),
        family.speak(calls=[("lookup", {"key": "c"})]),
        "three values",
        "you are welcome",
    )
    session = token_service.session()
    http = httpx.AsyncClient(verify=False, timeout=120)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, http_client=http) as client:
        agent = agent_on(session, client, store=store)
        given: Any = "look them up"
        previous: str | None = None
        for _ in range(2):
            more: dict[str, Any] = {"auto_previous_response_id": True, "previous_response_id": previous} if chained else {}
            if stream:
                result: Any = Runner.run_streamed(agent, given, **more)
                async for _event in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, given, **more)
            previous = result.last_response_id
            given = "thank you" if chained else [*result.to_input_list(), user("thank you")]
    assert result.final_output == "you are welcome"
    assert "the value of c" in engine.last.prompt
    assert_one_row(session, 4)


@pytest.mark.case(38)
def test_whole_and_streamed_items_are_the_same(engine: ScriptedEngine, service: RunningService) -> None:
    calls = [("lookup", {"key": "a"}), ("apply_patch", {"input": "x"}), ("lookup", {"key": "b"})]
    engine.say(*[engine.family.speak("let me see", reasoning="think", calls=calls)] * 2)
    fields: dict[str, Any] = {"input": "q", "tools": [LOOKUP, PATCH]}
    whole, told = ask_whole(service.session(), **fields), ask_stream(service.session(), **fields)[0]
    assert [without_ids(item) for item in whole["output"]] == [without_ids(item) for item in told["output"]]
    assert {key: told[key] for key in told if key not in ("id", "output", "created_at")} == {
        key: whole[key] for key in whole if key not in ("id", "output", "created_at")
    }


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}
