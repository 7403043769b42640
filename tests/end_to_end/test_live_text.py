"""Text told while it is sampled is what the engine's parsers make of the whole, on the real vLLM: random replies, cut anywhere.

Beside each other: what is told in steps, however the ids are split into chunks, and one derender of all ids.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_server import VllmServer
from proxy.dialects.base import Request
from proxy.engine.apis.base import SamplingJob
from proxy.engine.apis.reply import Assembly, plain_message
from proxy.engine.apis.vllm_reply import LiveText, Parser
from proxy.engine.pool.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp
from proxy.settings import Settings
from proxy.timeline import CancelScope
from reconstruct.records import pack_ids

pytestmark = pytest.mark.engine

Message = dict[str, Any]

REPLIES = 25
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
    }
    for name in ("open", "read_file")
]
WORDS = ["the door", " is red", "\n", "\n\n", " ", "é", "日本", "🚪", '{"a": 1}', "<", "think", "tool_call", "\\n", '"', "."]


def words(dice: random.Random, most: int = 12) -> str:
    return "".join(dice.choice(WORDS) for _ in range(dice.randint(0, most)))


def whole_reply(dice: random.Random) -> str:
    """What a well-trained model says: perhaps thinking, perhaps text, perhaps calls of tools."""
    text = f"<think>\n{words(dice)}\n</think>\n\n" if dice.random() < 0.6 else ""
    text += words(dice) if dice.random() < 0.7 else "yes"
    for _ in range(dice.choice((0, 0, 1, 1, 2, 3))):
        arguments = json.dumps({"key": words(dice), "n": dice.randint(0, 9)}, ensure_ascii=dice.random() < 0.5)
        text += f'<tool_call>\n{{"name": "{dice.choice(("open", "read_file"))}", "arguments": {arguments}}}\n</tool_call>'
        text += words(dice) if dice.random() < 0.4 else ""
    return text


def cut_reply(dice: random.Random, ids: list[int]) -> list[int]:
    """What a limit leaves of it."""
    return ids[: dice.randint(1, len(ids))] if ids else [0]


def noise(dice: random.Random, vocabulary: int) -> list[int]:
    """What a model says that was never trained."""
    return [dice.randrange(vocabulary) for _ in range(dice.randint(1, 30))]


def chunks(dice: random.Random, ids: list[int]) -> list[list[int]]:
    made = []
    while ids:
        size = dice.choice((1, 1, 2, 3, 7, 40))
        made.append(ids[:size])
        ids = ids[size:]
    return made or [[]]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def side_by_side(url: str, replies: list[tuple[list[int], str]], dice: random.Random) -> list[tuple[Message, Message, int]]:
    """(message told in pieces, message of the whole, pieces) per reply and its finish reason."""

    async def both() -> list[tuple[Message, Message, int]]:
        pool = EnginePool(Settings(engine=[url], redis="redis://unused"))
        await pool.start()
        http, replica = pool.http, pool.replicas[0]
        try:
            return [await _both(http, replica, ids, finish, chunks(dice, ids)) for ids, finish in replies]
        finally:
            await pool.stop()

    return asyncio.run(both())


async def _both(
    http: EngineHttp, replica: Replica, ids: list[int], finish: str, parts: list[list[int]]
) -> tuple[Message, Message, int]:
    request = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "tools": TOOLS}
    canonical = Request("chat", "policy", [], tools=TOOLS)
    canonical._messages = request["messages"]  # type: ignore[assignment]
    parser = Parser(http, replica, SamplingJob("x", canonical, {}, CancelScope("s", "x"), prompt_ids=pack_ids([1, 2, 3])))
    live, told, pieces = LiveText(0), Assembly(0), 0
    for part in parts[:-1]:
        live.pending.extend(part)
        delta = await parser.advance(live)
        if delta is not None:
            pieces += 1
            told.add({"content": delta.content, "reasoning_content": delta.reasoning})
    body = {
        "model": "policy",
        "generate_response": {
            "request_id": "x",
            "choices": [{"index": 0, "token_ids": ids, "finish_reason": finish}],
            "prompt_token_ids": [1, 2, 3],
        },
        "chat_request": request,
    }
    answer = await http.ask(replica, "/v1/chat/completions/derender", body, dict[str, Any])
    whole = plain_message(answer["choices"][0]["message"])
    assert live.is_prefix_of(whole), (told.message(), whole)
    rest = live.take_rest(whole)
    if rest is not None:
        told.add({"content": rest.content, "reasoning_content": rest.reasoning, "tool_calls": rest.tool_calls})
    return told.message(), whole, pieces


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Tool-call ids are made up anew by every parse; the service puts its own in their place."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"content": message.get("content") or "", "reasoning": message.get("reasoning_content") or "", "calls": calls}


@pytest.mark.parametrize("kind", ["whole", "cut", "noise"])
def test_what_is_told_in_steps_is_what_the_whole_says(vllm_server: VllmServer, tokenizer: Any, kind: str) -> None:
    dice = random.Random(7)
    replies = []
    makers: dict[str, Callable[[], tuple[list[int], str]]] = {
        "whole": lambda: (tokenizer.encode(whole_reply(dice), add_special_tokens=False), "stop"),
        "cut": lambda: (cut_reply(dice, tokenizer.encode(whole_reply(dice), add_special_tokens=False)), "length"),
        "noise": lambda: (noise(dice, len(tokenizer)), "length"),
    }
    for _ in range(REPLIES):
        replies.append(makers[kind]())
    made = side_by_side(vllm_server.url, replies, dice)
    for told, whole, _ in made:
        assert without_ids(told) == without_ids(whole)
    assert sum(pieces for _, _, pieces in made) > len(replies), "most of it is told before the end"
