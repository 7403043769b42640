"""Servers that speak OpenAI's chat API and give no token ids: served, recorded, flagged, never trained.

The answers have the shape of llama.cpp's server (build b8681): content with reasoning beside it, logprobs with ids of their own, timings,
and in a stream the usage on the chunk that ends the reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.proxy.call.test_replay import fork
from tests.support.engine.scripted_engine import Exchange, ScriptedEngine
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService
from tests.support.sessions.conversations import TOOLS, assemble, turn

MODEL = "/models/qwen.gguf"
TIMINGS = {"cache_n": 0, "prompt_n": 11, "prompt_ms": 30.5, "predicted_n": 4, "predicted_ms": 80.1}
USAGE = {"completion_tokens": 4, "prompt_tokens": 11, "total_tokens": 15}
CALL = {"type": "function", "function": {"name": "lookup", "arguments": '{"key":"alpha"}'}, "id": "x7Gd"}
MESSAGE = {"role": "assistant", "reasoning_content": "think", "content": "hello", "tool_calls": [CALL]}
ENTRY = {"id": 14990, "token": "hello", "bytes": [104, 101, 108, 108, 111], "logprob": -0.25, "top_logprobs": []}


class LlamaCpp(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(plain=True)
        self._routes = {("GET", "/v1/models"): self._cards, ("POST", "/v1/chat/completions"): self._chat}

    async def _cards(self, exchange: Exchange, body: Any) -> None:
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "llamacpp", "meta": {"n_ctx_train": 4096}}
        await exchange.answer({"models": [{"name": MODEL}], "object": "list", "data": [card]})

    async def _chat(self, exchange: Exchange, body: Any) -> None:
        if len(str(body["messages"])) > 1000:
            message = "the request exceeds the available context size (4096 tokens), try increasing it"
            error = {
                "code": 400,
                "message": message,
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 5000,
                "n_ctx": 4096,
            }
            return await exchange.answer({"error": error}, 400)
        head = {"created": 1, "model": MODEL, "system_fingerprint": "b8681", "id": "chatcmpl-a"}
        if body.get("stream"):
            return await self._stream(exchange, {**head, "object": "chat.completion.chunk"})
        choice = {"finish_reason": "tool_calls", "index": 0, "message": MESSAGE, "logprobs": {"content": [ENTRY]}}
        answer = {**head, "object": "chat.completion", "choices": [choice], "usage": USAGE, "timings": TIMINGS}
        return await exchange.answer(answer)

    async def _stream(self, exchange: Exchange, head: dict[str, Any]) -> None:
        function = {"name": "lookup", "arguments": ""}
        deltas = [
            {"role": "assistant", "content": None},
            {"reasoning_content": "think"},
            {"content": "hel"},
            {"content": "lo"},
            {"tool_calls": [{"index": 0, "id": "x7Gd", "type": "function", "function": function}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"key":"alpha"}'}}]},
        ]
        await exchange.open_stream()
        for delta in deltas:
            await exchange.event({**head, "choices": [{"finish_reason": None, "index": 0, "delta": delta}]})
        last = {"choices": [{"finish_reason": "tool_calls", "index": 0, "delta": {}}], "usage": USAGE, "timings": TIMINGS}
        await exchange.event({**head, **last})
        await exchange.close_stream()


class Unnumbered(LlamaCpp):
    """Streams these pieces of tool calls, which say neither position nor id."""

    def __init__(self, chunks: list[list[dict[str, Any]]]) -> None:
        super().__init__()
        self.chunks = chunks

    async def _stream(self, exchange: Exchange, head: dict[str, Any]) -> None:
        await exchange.open_stream()
        for calls in self.chunks:
            delta = {"role": "assistant", "content": "", "tool_calls": calls}
            await exchange.event({**head, "choices": [{"finish_reason": None, "index": 0, "delta": delta}]})
        last = {"choices": [{"finish_reason": "tool_calls", "index": 0, "delta": {}}], "usage": USAGE}
        await exchange.event({**head, **last})
        await exchange.close_stream()


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """The server is probed, not declared."""
    with LlamaCpp() as engine, running_redis() as redis, RunningService(engine.url, redis.url) as service:
        yield service


@pytest.mark.case(11)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_without_ids_is_served_recorded_and_quarantined(service: RunningService, stream: bool) -> None:
    session = service.session()
    asked = session.ask([turn("user", "q")], tools=TOOLS, stream=stream)
    message = assemble(asked) if stream else asked.choices[0].message.model_dump(exclude_none=True)
    assert (message["content"], message["reasoning_content"]) == ("hello", "think")
    assert message["tool_calls"][0]["function"] == {"name": "lookup", "arguments": '{"key":"alpha"}'}
    (call,) = session.calls
    assert (call["api"], call["status"], call["finish_reason"]) == ("chat", "finished", "tool_calls")
    assert call["completion_ids"] == call["weight_versions"] == []
    rows, accounting = session.trajectories()
    assert rows == []
    assert accounting["sampled_tokens"] == accounting["exported_tokens"] == 0
    assert accounting["quarantined"] == [{"call_id": call["call_id"], "tokens": 0, "reason": "no_token_ids"}]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_the_servers_own_count(service: RunningService, stream: bool) -> None:
    """It said that nothing was sampled: there are no ids to count."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asked = service.session().ask([turn("user", "q")], tools=TOOLS, **options)
    usage = list(asked)[-1].usage if stream else asked.usage
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert counts == (USAGE["prompt_tokens"], USAGE["completion_tokens"], USAGE["total_tokens"])


def test_its_conversations_hang_together_all_the_same(service: RunningService) -> None:
    session = service.session()
    message = session.answer([turn("user", "q")], tools=TOOLS)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
    session.answer([turn("user", "q"), message, result], tools=TOOLS)
    first, second = session.calls
    assert second["parent_id"] == first["call_id"]


def test_its_replies_are_replayed_also_to_a_harness_that_asks_for_logprobs(service: RunningService) -> None:
    """It tells logprobs without ids: the fork answered 500, for it looked for the id of each."""
    origin = service.session()
    told = origin.ask([turn("user", "q")], logprobs=True).choices[0]
    replayed = fork(service, origin).ask([turn("user", "q")], logprobs=True).choices[0]
    assert (told.message.content, told.logprobs.content[0].logprob) == ("hello", -0.25)
    assert (replayed.message.content, replayed.logprobs) == ("hello", None)


def piece_of(arguments: str, **function: str) -> dict[str, Any]:
    return {"type": "function", "id": None, "function": {**function, "arguments": arguments}}


ALPHA, BETA = '{"key": "alpha"}', '{"key": "beta"}'
WHOLE = [piece_of(arguments, name="lookup") for arguments in (ALPHA, BETA)]


@pytest.mark.parametrize(
    "chunks",
    [
        [WHOLE],
        [[each] for each in WHOLE],
        [[piece_of("", name="lookup")], [piece_of(ALPHA[:5])], [piece_of(ALPHA[5:])], [WHOLE[1]]],
    ],
    ids=["in one chunk", "in one each", "in pieces"],
)
def test_tool_calls_that_come_without_position_and_id_are_told_as_they_are_recorded(chunks: list[list[dict[str, Any]]]) -> None:
    """They were told without either, and by the other dialects as one call with the arguments of both."""
    with Unnumbered(chunks) as engine, running_redis() as redis, RunningService(engine.url, redis.url) as service:
        session = service.session()
        told = assemble(session.ask([turn("user", "q")], tools=TOOLS, stream=True))["tool_calls"]
        assert [call["function"]["arguments"] for call in told] == [ALPHA, BETA]
        (call,) = session.calls
        assert told == call["reply"]["tool_calls"]
        assert [each["id"] for each in told] == [f"call_{call['call_id']}_{position}" for position in (0, 1)]


def test_that_it_cannot_count_tokens_is_said(service: RunningService) -> None:
    session = service.session()
    body = {"model": "policy", "messages": [turn("user", "q")]}
    refused = httpx.post(f"{session.base_url}/messages/count_tokens", json=body, headers={"x-api-key": session.api_key})
    assert refused.status_code == 400
    assert "cannot count tokens" in refused.json()["error"]["message"]
    assert session.calls == []


def test_a_context_too_long_is_said_in_the_harnesss_words(service: RunningService) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        service.session().ask("cat " * 1000)
    assert raised.value.code == "context_length_exceeded"
