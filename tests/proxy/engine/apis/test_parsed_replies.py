"""Replies that the engine parses where it samples them, as vLLM 0.33 can: what is recorded and read is what the derender route gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proxy.engine.apis.vllm_reply import DERENDER, GENERATE
from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine
from tests.support.service.running_service import RunningService, Session, streamed_text

TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def whole(session: Session, **fields: Any) -> Any:
    choices = session.ask("q", **fields).choices
    return [(choice.message.model_dump(), choice.finish_reason) for choice in choices]


def play(url: str, parses_itself: bool, said: str, ask: Callable[[Session], Any]) -> tuple[Any, list[str], list[Any]]:
    """What the harness read and the records, without what differs between any two calls; and the requests that sampled or parsed."""
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, url) as service:
        engine.parses_itself = parses_itself
        engine.say(*[Say(said)] * 2)
        session = service.session()
        read = ask(session)
        kept = ("completion_ids", "logprobs", "finish_reason", "weight_versions", "status")
        calls = [{**{name: call[name] for name in kept}, "reply": strip(call["reply"])} for call in session.calls]
        # Not what was asked to find out what the engine is.
        bodies = [(request.path, request.body) for request in engine.received if request.path in (GENERATE, DERENDER)]
        asked = [path for path, body in bodies if "output_mode" in body or "chat_request" in body]
        modes = [body["output_mode"] for _, body in bodies if "output_mode" in body]
        return [strip(read), calls], asked, modes


def strip(told: Any) -> Any:
    """Without the ids of tool calls, which are new each time."""
    if isinstance(told, dict):
        return {name: strip(value) for name, value in told.items() if name != "id"}
    return [strip(value) for value in told] if isinstance(told, (list, tuple)) else told


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("the sea", {}),
        ("<think>\nlet me see\n</think>\n\nthe sea", {}),
        ("the sea is blue", {"stop": ["blue"]}),
        ("the sea is blue", {"max_tokens": 2}),
        (CALL, {"tools": TOOLS}),
        (f"Let me see.\n{CALL}", {"tools": TOOLS}),
        ("the sea", {"n": 2}),
        ("", {}),
    ],
)
def test_a_whole_reply_is_parsed_where_it_is_sampled(redis_url: str, said: str, fields: dict[str, Any]) -> None:
    before, asked_before, _ = play(redis_url, False, said, lambda session: whole(session, **fields))
    after, asked, modes = play(redis_url, True, said, lambda session: whole(session, **fields))
    assert after == before
    assert modes == ["derender"]
    assert len(asked) == len(asked_before) - fields.get("n", 1) * bool(said)


@pytest.mark.parametrize(
    "ask",
    [
        lambda session: streamed_text(session.ask("q", stream=True))[0],
        lambda session: whole(session, logprobs=True, top_logprobs=1),
        lambda session: whole(session, extra_body={"include_reasoning": False}),
    ],
    ids=["a stream", "logprobs", "hidden reasoning"],
)
def test_where_that_would_tell_less_the_derender_route_parses(redis_url: str, ask: Callable[[Session], Any]) -> None:
    before, asked_before, _ = play(redis_url, False, "the sea", ask)
    after, asked, modes = play(redis_url, True, "the sea", ask)
    assert (after, modes) == (before, ["tokens"])
    assert DERENDER in asked and len(asked) == len(asked_before)


@pytest.mark.parametrize("fault", [Fail(400, "no valid tool call"), Fail(500)])
def test_a_reply_that_cannot_be_parsed_there_is_sampled_again_and_recorded(redis_url: str, fault: Fail) -> None:
    """Its tokens were lost with it. A request that is refused is refused again, in the same words."""
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, redis_url) as service:
        engine.parses_itself = True
        engine.fault(GENERATE, fault)
        engine.say("the sea")
        session = service.session()
        assert session.answer("q")["content"] == "the sea"
        modes = [request.body["output_mode"] for request in engine.received if "output_mode" in (request.body or ())]
        assert modes == ["derender", "tokens"]
        assert [call["status"] for call in session.calls] == ["finished"]
