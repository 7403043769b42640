"""The plugin inside vLLM beside the three routes, on one real vLLM: what is recorded and what the harness reads is the same, to the last
field. The routes are reached through a relay that hides the plugin.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from examples.vllm_server import VllmServer
from proxy.engine.apis.evidence import START
from proxy.engine.in_vllm.frames import ROUTE, SAMPLE
from tests.support.engine.real_engine import read_metric, sampled, wait_until_it_samples
from tests.support.engine.recording_relay import GENERATE, RecordingRelay
from tests.support.engine.routers import running_router
from tests.support.engine.scripted_experts import experts_of
from tests.support.engine.template_families import FAMILIES
from tests.support.engine.vllm_server import running_vllm
from tests.support.engine.weight_fixtures import Judge
from tests.support.service.redis_server import RedisServer, running_redis
from tests.support.service.running_service import TRAINER, RunningService, Session, hanging_up, wait_until
from trainer_client.wire import decode_trajectory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name} a thing.",
            "parameters": {"type": "object", "properties": {"key": {"enum": ["a", "b"]}}, "required": ["key"]},
        },
    }
    for name in ("open", "close")
]
TEMPLATES = Path(__file__).parents[1] / "support/engine/chat_templates"
BRIEF = {"enable_thinking": False}
CALL = r'<tool_call>\n\{"name": "open", "arguments": \{"key": "a"\}\}\n</tool_call>'
VOLATILE = (
    "session_id",
    "rollout_id",
    "replica",
    "started_at",
    "engine_seconds",
    "own_seconds",
    "trajectory_id",
    "engine_tool_call_ids",
)
Script = Callable[[Session, bool], Any]


class Side:
    """A service whose engine has the plugin, or seems to have none."""

    def __init__(self, relay: RecordingRelay, service: RunningService) -> None:
        self.relay = relay
        self.service = service

    def play(self, script: Script, stream: bool, *, sampled: bool = True, **session: Any) -> Any:
        """[what the harness read, the records, the rows]. Call ids are alike on both sides, since templates may show them."""
        self.relay.asked.clear()
        # What is in the engine's cache is reported, too.
        httpx.post(f"{self.relay.url}/reset_prefix_cache", verify=False).raise_for_status()
        with pytest.MonkeyPatch.context() as patch:
            ids = itertools.count(1)
            patch.setattr("proxy.call.run.new_call_id", lambda: f"{next(ids):024x}")
            played = self.service.session(**session)
            read = script(played, stream)
        asked = (self.relay.asked[SAMPLE] > 0, self.relay.asked[GENERATE] > 0)
        assert asked == self.expected or not sampled
        played.close("completed" if played.calls else "failed")
        told = strip([read, played.calls, played.trajectories()])
        return json.loads(json.dumps(told, default=list).replace(played.session_id, "SESSION"))

    expected = (True, False)


class Routes(Side):
    expected = (False, True)


@contextmanager
def both_sides(vllm: VllmServer, redis_server: RedisServer) -> Iterator[tuple[Side, Side]]:
    """(with the plugin, by the three routes)"""
    with ExitStack() as stack:
        made = []
        for kind in (Side, Routes):
            relay = stack.enter_context(RecordingRelay(vllm.url, plugin=kind is Side))
            service = stack.enter_context(RunningService(relay.url, redis_server.url))
            service.await_ready()
            made.append(kind(relay, service))
        yield made[0], made[1]


@pytest.fixture(scope="module")
def sides(vllm_server: VllmServer, redis_server: RedisServer) -> Iterator[tuple[Side, Side]]:
    with both_sides(vllm_server, redis_server) as sides:
        yield sides


@pytest.fixture(scope="module")
def glm_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Two API servers, which parse as GLM-4.5 speaks and report scripted experts."""
    parsers = ("--tool-call-parser", "glm45", "--reasoning-parser", "glm45", "--trust-request-chat-template")
    experts = ("--middleware", "tests.support.engine.scripted_experts.ScriptedExperts")
    with running_vllm(tiny_model, tmp_path_factory.mktemp("glm"), *parsers, *experts, api_servers=2) as server:
        yield server


@pytest.fixture(scope="module")
def glm_sides(glm_server: VllmServer) -> Iterator[tuple[Side, Side]]:
    """With a store of their own: weights that somebody pushes into an engine become those of its store, and of all engines there."""
    with running_redis() as redis, both_sides(glm_server, redis) as sides:
        yield sides


def strip(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: strip(value) for name, value in told.items() if name not in VOLATILE}
    return [strip(value) for value in told] if isinstance(told, (list, tuple)) else told


def differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for name in left:
            yield from differences(left[name], right[name], f"{path}.{name}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for at, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differences(one, other, f"{path}[{at}]")
    elif left != right:
        yield f"{path}: {left!r} != {right!r}"


def ask(session: Session, stream: bool, messages: Any, **fields: Any) -> dict[str, Any]:
    """What the harness read, chunks put together, and the message as it replays it."""
    fields = {"temperature": 0.9, "seed": 11, "max_tokens": 20, **fields}
    extra = fields.pop("extra", {})
    try:
        if not stream:
            return read_whole(session.ask(messages, extra_body=extra, **fields))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return read_stream(list(session.ask(messages, extra_body=extra, **options, **fields)))
    except openai.APIStatusError as error:
        return {"status": error.status_code, "error": error.body}


def read_whole(answer: Any) -> dict[str, Any]:
    told = answer.model_dump(exclude_none=True)
    choices = {}
    for choice in told["choices"]:
        message = choice["message"]
        calls = {at: (call["id"], call["function"]) for at, call in enumerate(message.get("tool_calls") or ())}
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        reasoning = message.get("reasoning_content") or ""
        choices[choice["index"]] = (message.get("content") or "", reasoning, calls, logprobs, choice["finish_reason"])
    return {"choices": choices, "usage": told["usage"]}


def read_stream(chunks: list[Any]) -> dict[str, Any]:
    made: dict[Any, Any] = {}
    usage = None
    for chunk in (chunk.model_dump(exclude_none=True) for chunk in chunks):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            one = made.setdefault(choice["index"], ["", "", {}, [], None])
            delta = choice["delta"]
            one[0] += delta.get("content") or ""
            one[1] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                identifier, function = one[2].get(call["index"], ("", {"name": "", "arguments": ""}))
                said = call.get("function") or {}
                added = {name: function[name] + (said.get(name) or "") for name in ("name", "arguments")}
                one[2][call["index"]] = (identifier or call.get("id"), added)
            one[3] += (choice.get("logprobs") or {}).get("content") or []
            one[4] = choice.get("finish_reason") or one[4]
    return {"choices": {index: tuple(one) for index, one in made.items()}, "usage": usage}


def replayed(read: dict[str, Any]) -> dict[str, Any]:
    """The first choice as a harness keeps it."""
    content, reasoning, calls, _, _ = read["choices"][0]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        made = [{"id": name, "type": "function", "function": function} for name, function in calls.values()]
        message["tool_calls"] = made
    return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def say(regex: str, thinking: bool = False) -> dict[str, Any]:
    return {"structured_outputs": {"regex": regex}, "chat_template_kwargs": {"enable_thinking": thinking}}


def once(**fields: Any) -> Script:
    return lambda session, stream: ask(session, stream, [user("Tell me of the sea.")], **fields)


def converse(**fields: Any) -> Script:
    """Three turns, each of which replays those before."""

    def script(session: Session, stream: bool) -> list[Any]:
        messages, read = [{"role": "system", "content": "Be brief."}], []
        for text in ("Tell me of the sea.", "And the wind?", "And the moon?"):
            messages.append(user(text))
            read.append(ask(session, stream, messages, **fields))
            if "status" in read[-1]:
                break
            messages.append(replayed(read[-1]))
        return read

    return script


def use_tools(choice: Any, **fields: Any) -> Script:
    """A call of a tool, its result, and another reply."""

    def script(session: Session, stream: bool) -> list[Any]:
        messages = [user("Open the door.")]
        first = ask(session, stream, messages, tools=TOOLS, tool_choice=choice, **{"max_tokens": 90, **fields})
        said = replayed(first)
        messages.append(said)
        for call in said.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "It is open."})
        if not said.get("tool_calls"):
            messages.append(user("And?"))
        return [first, ask(session, stream, messages, tools=TOOLS, extra={"chat_template_kwargs": BRIEF})]

    return script


SPECIAL = {"ignore_eos": True, "logit_bias": dict.fromkeys(("1015", "1016", "1017", "1018", "1019", "1023"), 3.0)}
"""The ends of text and turn, the beginning of a turn, of a tool call and its end, and the end of thinking, wherever the model likes."""
NAMED = {"type": "function", "function": {"name": "close"}}
SCRIPTS: dict[str, Script] = {
    "text": once(extra={"chat_template_kwargs": BRIEF}),
    "thinking": once(),
    "thinking and text": once(extra=say(r"\nstep by step\n</think>\n\nthe sea is blue", thinking=True), max_tokens=90),
    "thinking ends twice": once(extra=say(r"one</think>two</think>three", thinking=True), max_tokens=90),
    "turns": converse(extra={"chat_template_kwargs": BRIEF}),
    "thinking turns": converse(),
    "a required call": use_tools("required", extra={"chat_template_kwargs": BRIEF}),
    "a required call after thinking": use_tools("required", max_tokens=60),
    "a named call": use_tools(NAMED, extra={"chat_template_kwargs": BRIEF}),
    "no call allowed": use_tools("none", extra={"chat_template_kwargs": BRIEF}),
    "a call": use_tools("auto", extra=say(CALL)),
    "text and a call": use_tools("auto", extra=say(rf"Let me see.\n{CALL}")),
    "two calls": use_tools("auto", extra=say(rf"{CALL}\n{CALL}"), max_tokens=150),
    "two calls of which one is allowed": use_tools(
        "auto", extra=say(rf"{CALL}\n{CALL}"), parallel_tool_calls=False, max_tokens=150
    ),
    "a call cut by the limit": use_tools("auto", extra=say(CALL), max_tokens=14),
    "three choices": once(n=3),
    "three choices with calls": use_tools("auto", extra=say(CALL), n=3),
    "logprobs": once(logprobs=True, top_logprobs=3, extra={"chat_template_kwargs": BRIEF}),
    "logprobs of thinking": once(logprobs=True, n=2),
    "a stop string": once(stop=["blue"], extra=say(r"the sea is blue and deep"), max_tokens=60),
    "a stop string that shows": once(
        stop=["blue"], extra={**say(r"the sea is blue and deep"), "include_stop_str_in_output": True}, max_tokens=60
    ),
    "a stop string in thinking": once(stop=["step"], extra=say(r"\none step\n</think>\nx", thinking=True), max_tokens=60),
    "a stop string after a call": use_tools("auto", extra=say(rf"{CALL}\nblue"), stop=["blue"], max_tokens=120),
    "a stop token": once(extra={"stop_token_ids": list(range(300, 900))}),
    "control tokens in the text": once(extra={"ignore_eos": True, "logit_bias": {"1015": 3.0}}, max_tokens=40),
    "control tokens in brief text": once(
        extra={"ignore_eos": True, "logit_bias": {"1015": 3.0}, "chat_template_kwargs": BRIEF}, max_tokens=40
    ),
    "special tokens in mid-text": once(extra={**SPECIAL, "chat_template_kwargs": BRIEF}, max_tokens=40),
    "special tokens left out of the text": once(
        extra={**SPECIAL, "chat_template_kwargs": BRIEF, "skip_special_tokens": True}, max_tokens=40
    ),
    "special tokens in thinking, before tools": use_tools("auto", extra=SPECIAL, max_tokens=40),
    "a schema": once(
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": TOOLS[0]["function"]["parameters"]}},
        extra={"chat_template_kwargs": BRIEF},
    ),
    "the default of 16 tokens": once(max_tokens=16),
    "hidden reasoning": once(extra=say(r"x</think>y", thinking=True) | {"include_reasoning": False}),
    "an empty reply": once(extra={"stop_token_ids": list(range(1000)), "chat_template_kwargs": BRIEF}),
}


WHOLE = (
    *("turns", "thinking and text", "thinking ends twice", "hidden reasoning", "an empty reply"),
    *("a required call after thinking", "text and a call", "a call cut by the limit", "three choices with calls", "logprobs"),
    *("a stop string", "a stop string that shows", "a stop string after a call", "control tokens in the text"),
)
"""Also asked for whole. Under every reply that is streamed there is a parse of the whole, too, which is what is recorded."""


@pytest.mark.parametrize(("name", "stream"), [*((name, True) for name in SCRIPTS), *((name, False) for name in WHOLE)])
def test_the_plugin_gives_what_the_routes_give(sides: tuple[Side, Side], name: str, stream: bool) -> None:
    compare(sides, SCRIPTS[name], stream)


SHOWS_IDS = {"mistral", "kimi"}
"""The engine's random ids of tool calls stand in their prompts: see test_tool_call_ids.py, where their own parsers name the calls."""


def compare(sides: tuple[Side, Side], script: Script, stream: bool, **session: Any) -> Any:
    """What both sides gave, which must be alike."""
    plugin, routes = (side.play(script, stream, **session) for side in sides)
    different = list(differences(plugin, routes))
    assert not different, "\n".join(different)
    return plugin


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - SHOWS_IDS))
def test_prompts_are_planned_alike_under_every_template(sides: tuple[Side, Side], family: str) -> None:
    """A call, its result and two turns after it, of which each extends the one before, or branches for the same reason.

    Where the prompt has a `</think>`, the engine's streaming parser reads a reply as text that its parser of the whole reads as
    thinking: of streamed replies the former counts, however fast they come."""
    template = (TEMPLATES / f"{family}.jinja").read_text()

    def script(session: Session, stream: bool) -> list[Any]:
        messages, read = [user("Open the door.")], []
        shared = {"tools": TOOLS, "extra": {"chat_template": template}}
        read.append(
            ask(session, stream, messages, **{**shared, "extra": {"chat_template": template, **say(CALL)}}, max_tokens=90)
        )
        messages.append(replayed(read[-1]))
        identifier = messages[-1].get("tool_calls", [{"id": "none"}])[0]["id"]
        messages.append({"role": "tool", "tool_call_id": identifier, "content": "It is open."})
        for text in ("Thank you.", "And now?"):
            read.append(ask(session, stream, messages, **shared))
            messages += [replayed(read[-1]), user(text)]
        return read

    _, calls, _ = compare(sides, script, stream=True)
    assert len(calls) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_details_for_the_trainer_are_alike(sides: tuple[Side, Side], stream: bool) -> None:
    wanted = {"top_logprobs": 3, "prompt_logprobs": True, "max_tokens": 12}
    _, _, (rows, _) = compare(sides, converse(extra={"chat_template_kwargs": BRIEF}), stream, sampling=wanted)
    details = decode_trajectory(rows[0] | {"session_id": "s", "trajectory_id": "t"}).details
    assert details is not None and details.top_logprobs is not None and details.prompt_logprobs is not None


UNSPELT = {"27": -100.0}
"""A `<tool_call>` made of letters, as only a random model spells it, is no call to the streaming parser; "<" begins none here."""
GLM_ASKS: tuple[dict[str, Any], ...] = (
    {"tool_choice": "required", "extra": {"logit_bias": {**UNSPELT, "1023": 6.0}}},
    {"extra": {"logit_bias": {**UNSPELT, "1018": 5.0}, "chat_template_kwargs": BRIEF}},
)
"""Thinking, then calls that the limit cuts; text and calls in turn, without thinking."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_glms_parsers_read_is_alike(glm_sides: tuple[Side, Side], stream: bool) -> None:
    template = (TEMPLATES / "glm4.jinja").read_text()

    def script(session: Session, stream: bool) -> list[Any]:
        messages, read = [user("Open the door.")], []
        for fields in GLM_ASKS:
            extra = {"chat_template": template, **fields["extra"]}
            read.append(ask(session, stream, messages, tools=TOOLS, **{**fields, "extra": extra, "max_tokens": 40}))
            messages.append(replayed(read[-1]))
            for call in messages[-1].get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "It is open."})
            messages.append(user("And now?"))
        return read

    read, _, _ = compare(glm_sides, script, stream)
    said = [[bool(part) for part in reply["choices"]["0"][:3]] for reply in read]
    assert said == [[False, True, True], [True, False, True]], "content, reasoning, calls"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_routed_experts_are_alike_and_those_of_each_token(glm_sides: tuple[Side, Side], stream: bool) -> None:
    """Also those of a second turn, for which the engine is asked for what is new."""
    kept = {"routed_experts": True}
    _, calls, (rows, _) = compare(glm_sides, converse(extra={"chat_template_kwargs": BRIEF}), stream, sampling=kept)
    assert len(rows) == 1 and len(calls) == 3
    row = decode_trajectory(rows[0] | {"session_id": "s", "trajectory_id": "t"})
    assert row.details is not None and row.details.routed_experts is not None
    np.testing.assert_array_equal(row.details.routed_experts[:-1], experts_of(row.token_ids)[:-1])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_prompts_in_place_of_messages_are_alike(sides: tuple[Side, Side], stream: bool) -> None:
    """Text, ids, text that goes on from what was sampled, with logprobs and a stop string."""

    def complete(session: Session, stream: bool, prompt: Any, **fields: Any) -> tuple[str, Any]:
        made = session.client.completions.create(
            model="policy", prompt=prompt, temperature=0.9, seed=5, **{"max_tokens": 12, **fields}, stream=stream
        )
        chunks = list(made) if stream else [made]
        told = [chunk.choices[0].model_dump() for chunk in chunks if chunk.choices]
        logprobs = [each["logprobs"] or {} for each in told]
        flat = {name: [x for each in logprobs for x in each.get(name) or ()] for name in ("tokens", "token_logprobs")}
        return "".join(each["text"] for each in told), (flat, told[-1]["finish_reason"])

    def script(session: Session, stream: bool) -> list[Any]:
        text, end = complete(session, stream, "The sea is")
        read = [text, end, complete(session, stream, f"The sea is{text} and the moon", logprobs=2)]
        read.append(complete(session, stream, [5, 300, 301, 302]))
        read.append(complete(session, stream, "The sea is", stop=["a"], max_tokens=40))
        return read

    compare(sides, script, stream)


REFUSED: dict[str, dict[str, Any]] = {
    "a prompt over the window": {"messages": [user("the sea " * 5000)]},
    "a temperature": {"temperature": -1.0},
    "a penalty": {"presence_penalty": 9.0},
    "too many logprobs": {"logprobs": True, "top_logprobs": 20},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}}},
    "a message": {"messages": [{"role": "tool", "content": 3}]},
    "a regex": {"extra": {"structured_outputs": {"regex": "("}}},
    "a tool that is not there": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "lock"}}},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_alike(sides: tuple[Side, Side], name: str, stream: bool) -> None:
    fields = dict(REFUSED[name])
    messages = fields.pop("messages", [user("?")])
    plugin, routes = (
        side.play(lambda session, stream: ask(session, stream, messages, **fields), stream, sampled=False) for side in sides
    )
    assert plugin[0]["status"] in (400, 404) and plugin[1] == routes[1] == []
    # A stream that vLLM's generate route refuses has begun by then, so that the routes can only break it off.
    assert plugin[0] == routes[0] or (stream and routes[0]["status"] == 502)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("budget", ["max_total_tokens", "max_completion_tokens"])
def test_a_budget_cuts_and_refuses_alike(sides: tuple[Side, Side], budget: str, stream: bool) -> None:
    read, calls, _ = compare(sides, converse(max_tokens=60), stream, **{budget: 80})
    assert calls[0]["finish_reason"] == "length" and read[-1]["status"] == 401


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_reply_cut_in_the_middle_keeps_what_was_sampled(
    sides: tuple[Side, Side], vllm_server: VllmServer, stream: bool
) -> None:
    """The harness hangs up, so the engine is asked to end the call. Both sides have sampled the same by then, as far as they came."""
    body = {"model": "policy", "messages": [user("x")], "max_tokens": 30000, "ignore_eos": True, "seed": 3, "stream": stream}
    cut = []
    for side in sides:
        # On a slow machine a reply may end before the engine hears that it is cut: another one is tried.
        for _ in range(10):
            session, before = side.service.session(), sampled(vllm_server)
            with hanging_up(f"{session.base_url}/chat/completions", body, session.api_key):
                wait_until_it_samples(vllm_server, before, 50)
            wait_until(lambda: are_recorded(session.calls, 1), 120, "the call is recorded")  # noqa: B023
            if session.calls[0]["status"] != "finished":
                break
        cut += session.calls
        refused = [(item["tokens"], item["reason"]) for item in session.trajectories()[1]["quarantined"]]
        assert refused == [(len(cut[-1]["completion_ids"]), "not_delivered")]
    for call in cut:
        assert (call["status"], call["finish_reason"], call["reply"]["role"]) == ("aborted", "abort", "assistant")
        ends = [end for _, _, end in call["weight_versions"]]
        assert ends == [len(call["completion_ids"])]
    shorter = min(len(call["completion_ids"]) for call in cut)
    for name in ("completion_ids", "logprobs"):
        assert cut[0][name][:shorter] == cut[1][name][:shorter]


def are_recorded(calls: list[dict[str, Any]], count: int) -> bool:
    return len(calls) == count and all(call["status"] not in ("in_flight", "dangling") for call in calls)


def test_a_cut_reply_is_recorded_whichever_api_server_samples_it(glm_server: VllmServer, glm_sides: tuple[Side, Side]) -> None:
    """Whole replies were lost, and their calls left dangling, where the abort reached the other of two API servers; of streamed ones
    the weight versions were."""
    prompt = {"model": "policy", "messages": [user("x")], "max_tokens": 30000, "ignore_eos": True}
    session, begun = glm_sides[0].service.session(), partial(read_metric, glm_server, "time_to_first_token_seconds_count")
    before = begun()
    for number in range(1, 7):
        body = prompt | {"seed": number, "stream": number % 2 == 0}
        with hanging_up(f"{session.base_url}/chat/completions", body, session.api_key):
            wait_until(lambda: begun() == before + number, 60, "it has a token")  # noqa: B023
        wait_until(lambda: are_recorded(session.calls, number), 60, "the call is recorded")  # noqa: B023
    calls = session.calls
    assert [(call["status"], call["finish_reason"]) for call in calls] == [("aborted", "abort")] * 6
    for call in calls:
        assert call["completion_ids"] and [end for _, _, end in call["weight_versions"]] == [len(call["completion_ids"])]


def test_a_plugin_that_is_gone_after_a_restart_is_not_asked_again(vllm_server: VllmServer, redis_server: RedisServer) -> None:
    """The service met the engine with the plugin; the call that finds it gone is made over the three routes."""
    with RecordingRelay(vllm_server.url) as relay, RunningService(relay.url, redis_server.url) as service:
        service.await_ready()
        replica = find_replica(service)
        assert (replica["plugin"], replica["trainable"], replica["takes_weights"], replica["notes"]) == (True, True, True, [])
        assert replica["version"] == httpx.get(f"{vllm_server.url}/version").json()["version"]
        session = service.session()
        read = [ask(session, False, [user("?")])]
        relay.asked.clear()
        relay.plugin = False
        read.append(ask(session, False, [user("?")]))
        relay.plugin = True
        read.append(ask(session, False, [user("?")]))
    assert read[0]["choices"] == read[1]["choices"] == read[2]["choices"]
    assert relay.asked[SAMPLE] == 0 and relay.asked[GENERATE] == 2


def find_replica(service: RunningService) -> dict[str, Any]:
    (replica,) = service.request("GET", "/engines").json()["replicas"]
    return dict(replica)


def test_api_servers_of_one_engine_are_no_router(
    vllm_server: VllmServer, glm_server: VllmServer, glm_sides: tuple[Side, Side]
) -> None:
    """With the plugin they have one name, and without it their workers do; the relay hides the plugin of the second. One server says when
    it started, several do not."""
    starts = [httpx.get(server.url + START.routes[0]).text for server in (vllm_server, glm_server)]
    assert [bool(START.read(text.encode())) for text in starts] == [True, False]
    assert max(map(len, starts)) < 500
    told = {httpx.get(f"{glm_server.url}{ROUTE}", headers={"Connection": "close"}).json()["engine"] for _ in range(20)}
    assert len(told) == 1
    for side in glm_sides:
        replica = find_replica(side.service)
        assert (replica["router"], replica["takes_weights"]) == (False, True)


def test_two_engines_behind_vllms_router_serve_calls_and_take_no_weights(
    vllm_server: VllmServer, glm_server: VllmServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    """The plugin was found through it, and its requests were refused: no call worked. A push left one engine paused and half updated."""
    with (
        running_router("vllm_router", vllm_server.url, glm_server.url, policy="consistent_hash") as router,
        RunningService(router, redis_server.url, engine_router={"session_header": "X-Session-ID"}) as service,
    ):
        service.await_ready()
        replica = find_replica(service)
        assert (replica["api"], replica["router"], replica["plugin"], replica["takes_weights"]) == ("token", True, False, False)
        for _ in range(4):
            session = service.session()
            read = [ask(session, stream, [user("?")]) for stream in (False, True)]
            assert read[0]["choices"] == read[1]["choices"]
            assert all(call["completion_ids"] and call["weight_versions"] for call in session.calls)
        answer = service.request("POST", "/weights", json={"version": 1, "path": str(tmp_path)}).json()
        assert answer["applied"] is False and "is a router" in answer["error"]
    for engine in (vllm_server, glm_server):
        assert httpx.get(f"{engine.url}/is_paused").json() == {"is_paused": False}


def test_the_plugin_behind_a_router_that_reads_json_alone_is_left_alone(
    vllm_server: VllmServer, redis_server: RedisServer
) -> None:
    with (
        running_router("vllm_router", vllm_server.url, policy="round_robin") as router,
        RunningService(router, redis_server.url) as service,
    ):
        service.await_ready()
        assert find_replica(service)["router"] is False
        session = service.session()
        read = [ask(session, stream, [user("?")]) for stream in (False, True)]
        assert read[0]["choices"] == read[1]["choices"]
        assert find_replica(service)["plugin"] is False


def test_a_push_reaches_both_api_servers_and_each_token_is_of_the_version_it_names(
    glm_server: VllmServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Last, since the engine keeps these weights. Replies in flight go on under them, whichever of the two takes a step or a call."""
    from examples.demo.tiny_model import make_tiny_model

    checkpoints, judge = [tiny_model, make_tiny_model(tmp_path / "seed1", seed=1)], Judge()
    begun = partial(read_metric, glm_server, "time_to_first_token_seconds_count")
    with running_redis() as redis, RunningService(glm_server.url, redis.url) as service, ThreadPoolExecutor() as pool:
        service.await_ready()
        sessions, before = [service.session() for _ in range(4)], begun()
        long = {"max_tokens": 600, "extra_body": {"ignore_eos": True}}
        asked = [pool.submit(session.answer, "count", **long) for session in sessions]
        wait_until(lambda: begun() == before + 4, 120, "each has a token")
        push = {"version": 1, "path": str(checkpoints[1]), "mode": "keep"}
        applied = service.request("POST", "/weights", TRAINER, json=push).json()
        assert applied["applied"], applied
        for answer in asked:
            answer.result(120)
        list(pool.map(lambda session: session.answer("and now?", max_tokens=20), sessions))
        calls = [session.calls for session in sessions]
        # A new connection each time, to either of the two.
        labels = {httpx.get(f"{glm_server.url}/weight_info", verify=False).json()["weight_version"] for _ in range(12)}
    assert labels == {"1"}
    for first, second in calls:
        assert [[version for version, _, _ in call["weight_versions"]] for call in (first, second)] == [[0, 1], [1]]
        for call in (first, second):
            for version, start, end in call["weight_versions"]:
                recomputed = judge.logprobs(checkpoints[version], call["prompt_ids"], call["completion_ids"])
                np.testing.assert_allclose(call["logprobs"][start:end], recomputed[start:end], rtol=0, atol=1e-4)
