"""What the token path and the chat path tell of a reply while it grows, and how a call on them ends that is cut."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from proxy.engine.apis.vllm import VllmTokens
from proxy.engine.pool.pool import EnginePool
from proxy.engine.wire.http import EngineHttp
from tests.support.engine.scripted_answers import Live, call_deltas
from tests.support.engine.scripted_calls import SamplingCalls
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_fixtures import Running
from tests.support.engine.scripted_sampling import POLL_SECONDS, Say
from tests.support.service.running_service import RunningService, streamed_text
from tests.support.sessions.conversations import TOOLS, turn

SETTINGS = {"keepalive_seconds": 0}
"""Without signs of life, which would begin a stream, too."""


@pytest.fixture
def services(running: Running) -> dict[str, RunningService]:
    return running[1]


def test_with_parallel_calls_all_of_them_come(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say(engine.family.speak(calls=[("lookup", {"key": key}) for key in ("alpha", "beta")]))
    message = service.session().answer("q", tools=TOOLS, parallel_tool_calls=True)
    assert len(message["tool_calls"]) == 2


def test_a_reasoning_effort_that_the_template_ignores_is_no_new_root(engine: ScriptedEngine, service: RunningService) -> None:
    """On the token path its renderings say so, on the chat path the ids that the engine sampled after."""
    session = service.session()
    engine.say("hello world", "it is sunny", "the number")
    history: list[Any] = [turn("user", "q")]
    for effort in ("low", "low", "high"):
        history += [session.answer(history, reasoning_effort=effort), turn("user", "more")]
    assert [call["parent_id"] for call in session.calls] == [None, *(call["call_id"] for call in session.calls[:2])]
    assert len(session.trajectories()[0]) == 1


def test_a_parameter_that_changes_how_a_reply_begins_is_no_new_root(engine: ScriptedEngine, service: RunningService) -> None:
    """Without thinking, Qwen3's template begins the reply with an empty thought; the history reads the same."""
    session = service.session()
    engine.say("hello world", "it is sunny")
    first = session.answer("q")
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    session.ask([turn("user", "q"), first, turn("user", "more")], extra_body=kwargs)
    calls = session.calls
    assert [call["parent_id"] for call in calls] == [None, calls[0]["call_id"]]
    ((row,), _) = session.trajectories()
    assert row["token_ids"] == [*calls[1]["prompt_ids"], *calls[1]["completion_ids"]]
    assert row["token_ids"][: len(calls[0]["prompt_ids"])] == calls[0]["prompt_ids"]
    assert engine.family.decode(calls[1]["prompt_ids"]).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("calls", "parallel"), [([], True), ([("lookup", {"key": "a"})], True), ([("lookup", {"key": key}) for key in "ab"], False)]
)
def test_a_reply_whose_whole_parse_contradicts_what_was_told_is_what_the_steps_say_to_its_end(
    engine: ScriptedEngine,
    services: dict[str, RunningService],
    monkeypatch: pytest.MonkeyPatch,
    calls: list[Any],
    parallel: bool,
) -> None:
    """Told text cannot be taken back; then no word of the rest may be lost either, and the record says what the harness saw."""
    whole = SamplingCalls._derendered

    def contradicted(self: SamplingCalls, *of: Any) -> dict[str, Any]:
        derendered = whole(self, *of)
        derendered["message"]["content"] = "something else"
        return derendered

    monkeypatch.setattr(SamplingCalls, "_derendered", contradicted)
    text = "one two three four five six seven eight nine ten"
    engine.say(Say(engine.family.speak(text, calls=calls), seconds_per_token=0.02))
    session = services["token"].session()
    chunks = list(session.ask("q", stream=True, tools=TOOLS, parallel_tool_calls=parallel))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert len([delta for delta in deltas if delta.content]) > 2, "most of it is told before the end"
    assert "".join(delta.content or "" for delta in deltas).rstrip() == text
    called = [call for delta in deltas for call in delta.tool_calls or ()]
    wanted = calls if parallel else calls[:1]
    assert [call.function.name for call in called] == [name for name, _ in wanted]
    assert [json.loads(call.function.arguments) for call in called] == [arguments for _, arguments in wanted]
    history = [turn("user", "q"), {"role": "assistant", "content": text}, turn("user", "r")]
    if not calls:
        engine.say("again")
        session.ask(history, tools=TOOLS)
        first, second = session.calls
        assert second["parent_id"] == first["call_id"]


def test_a_stream_begins_with_the_first_token_though_nothing_of_it_is_certain(
    engine: ScriptedEngine, service: RunningService
) -> None:
    gate = threading.Event()
    engine.say(Say(engine.family.speak("", calls=[("lookup", {"key": "a"})]), gate=gate, gate_after=1))
    stream = iter(service.session().ask("q", stream=True, tools=TOOLS))
    try:
        assert next(stream).choices[0].delta.role == "assistant"
    finally:
        gate.set()
    assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "tool_calls"


def test_what_arrives_while_the_engine_parses_is_told_though_the_engine_pauses(
    engine: ScriptedEngine, services: dict[str, RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told with the next token, however long that took. Every id is parsed in one step, and no step has none."""
    text, gate, steps = "one two three four five", threading.Event(), []
    sampled, parse = engine.family.encode(text), SamplingCalls._derender_step

    async def parse_late(self: SamplingCalls, exchange: Any, body: Any) -> None:
        steps.append(body["generate_chunk"]["choices"][0]["token_ids"])
        while len(engine.last.sampled[0]) < len(sampled):
            await asyncio.sleep(POLL_SECONDS)
        await parse(self, exchange, body)

    monkeypatch.setattr(SamplingCalls, "_derender_step", parse_late)
    engine.say(Say(text, gate=gate, gate_after=len(sampled)))
    opened = threading.Timer(60, gate.set)
    opened.start()
    stream = iter(services["token"].session().ask("q", stream=True))
    told = ""
    try:
        while told != text:
            told += next(stream).choices[0].delta.content or ""
        assert not gate.is_set()
    finally:
        opened.cancel()
        gate.set()
    assert list(stream)[-1].choices[0].finish_reason == "stop"
    assert all(steps) and [token for step in steps for token in step] == sampled


def test_a_tool_call_is_told_when_it_is_whole_though_the_engine_goes_on(
    engine: ScriptedEngine, services: dict[str, RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the chat path, from an engine that tells each call as it closes: the second has not been sampled when the harness knows
    the first."""
    late = Live.tell

    def early(self: Live, text: str, finish_reason: str | None) -> tuple[dict[str, Any], bool]:
        delta, called = late(self, text, finish_reason)
        before = self.__dict__.setdefault("closed", 0)
        calls = [("lookup", json.dumps({"key": key})) for key in ("alpha", "beta")][: text.count("</tool_call>")]
        self.__dict__["closed"] = len(calls)
        delta["tool_calls"] = [
            piece for n, call in enumerate(calls) if n >= before for piece in call_deltas(n, f"call_{n}", *call)
        ]
        return delta, called or bool(calls)

    monkeypatch.setattr(Live, "tell", early)
    gate = threading.Event()
    text = engine.family.speak("I look.", calls=[("lookup", {"key": "alpha"}), ("lookup", {"key": "beta"})])
    sampled = engine.family.encode(text)
    engine.say(Say(text, gate=gate, gate_after=len(sampled) - 8))
    opened = threading.Timer(20, gate.set)
    opened.start()
    stream = iter(services["chat"].session().ask("q", stream=True, tools=TOOLS))
    told: dict[int, str] = {}
    try:
        while told.get(0) != '{"key": "alpha"}':
            for call in next(stream).choices[0].delta.tool_calls or ():
                told[call.index] = told.get(call.index, "") + (call.function.arguments or "")
        assert not gate.is_set() and 1 not in told
    finally:
        opened.cancel()
        gate.set()
    rest = [call.function.arguments for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(rest) == '{"key": "beta"}'


@pytest.mark.parametrize(
    ("path", "owner", "method"),
    [("token", VllmTokens, "render"), ("token", EnginePool, "wait_for_gate")],
    ids=["render", "gate"],
)
def test_a_call_that_is_cut_before_its_engine_samples_is_answered(
    engine: ScriptedEngine,
    services: dict[str, RunningService],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    owner: type,
    method: str,
) -> None:
    """Where the prompt is rendered, and where a weight update holds calls back."""
    asked = threading.Event()

    async def hang(*_: Any) -> None:
        asked.set()
        await asyncio.sleep(3600)

    session = services[path].session()
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        patched.setattr(owner, method, hang)
        answer = pool.submit(session.ask, "q", timeout=240)
        assert asked.wait(120)
        session.close("cancelled")
        with pytest.raises(openai.APIStatusError):
            answer.result()
    assert not any(call["completion_ids"] for call in session.calls)


def test_a_call_that_is_cut_is_recorded_though_its_engine_does_not_say_its_version(
    engine: ScriptedEngine, services: dict[str, RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are there; an engine that hangs when asked for the version after them must not keep the session open."""
    gate = threading.Event()

    async def hang(*_: Any) -> str | None:
        await asyncio.sleep(3600)
        return None

    monkeypatch.setattr(EngineHttp, "read_label", hang)
    monkeypatch.setattr("proxy.timeline.ABORT_SECONDS", 0.3)
    monkeypatch.setattr("proxy.timeline.HUNG_UP_SECONDS", 0.3)
    engine.say(Say("hello world the cat", gate=gate, gate_after=2))
    session = services["chat"].session()
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(streamed_text, session.ask("q", stream=True, timeout=240))
        engine.wait_for(lambda: bool(engine.generations))
        closed = pool.submit(session.close, "cancelled")
        closed.result(120)
        gate.set()
        answer.exception(120)
    (call,) = session.calls
    assert (call["status"], call["weight_versions"]) == ("aborted", [])
