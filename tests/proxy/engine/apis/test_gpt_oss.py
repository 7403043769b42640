"""gpt-oss behind an engine that takes and returns token ids: its tool calls end in the token that ends the reply.

The renderers package renders this family with OpenAI's own encoder, which downloads its vocabulary. Here that encoder is a stand-in
which spells messages in the family's small tokenizer; what reads the replies is the package's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.local_format import require_renderers, write_format
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.template_families import FAMILIES, Family
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.sessions.conversations import TOOLS, assert_sampled_as_recorded, tool_result, turn

require_renderers()

THINKS = "step by step<|end|><|start|>assistant"
CALLS = '<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"key": "alpha"}'


RESULT = (
    "<|start|>functions.lookup<|channel|>commentary to=assistant<|message|>7<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>"
)


@dataclass(frozen=True)
class SmallHarmony:
    """What the renderer asks of `openai_harmony.HarmonyEncoding`."""

    family: Family

    def render(self, message: Any) -> list[int]:
        told = message.to_dict()
        to = f" to={message.recipient}" if message.recipient else ""
        channel = f"<|channel|>{message.channel}" if message.channel else ""
        text = "".join(part.get("text", str(part)) for part in told["content"])
        end = "<|call|>" if message.author.role.value == "assistant" and to else "<|end|>"
        who = message.author.name or message.author.role.value
        return self.family.encode(f"<|start|>{who}{channel}{to}<|message|>{text}{end}")

    def render_conversation(self, conversation: Any) -> list[int]:
        return [token for message in conversation.messages for token in self.render(message)]


@pytest.fixture(scope="module")
def serving(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ScriptedEngine, RunningService]]:
    redis_server.flushall()
    model: Path = write_format("harmony", tmp_path_factory.mktemp("format"))
    options = {"name": "gpt-oss", "conversation_start_date": "2026-01-01"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("renderers.gpt_oss.load_harmony_encoding", lambda name: SmallHarmony(FAMILIES["harmony"]))
        with (
            ScriptedEngine("harmony") as engine,
            RunningService(
                engine.url, redis_server.url, engine_api="completions", renderer=str(model), renderer_options=options
            ) as service,
        ):
            yield engine, service


@pytest.fixture
def engine(serving: tuple[ScriptedEngine, RunningService]) -> ScriptedEngine:
    return serving[0].reset()


@pytest.fixture
def service(serving: tuple[ScriptedEngine, RunningService]) -> RunningService:
    return serving[1]


def test_a_call_is_a_call_and_the_conversation_goes_on_from_it(engine: ScriptedEngine, service: RunningService) -> None:
    """Read without its last token, which closes it, the call was told to the harness as text."""
    engine.say(f"{THINKS}{CALLS}<|call|>", "<|channel|>final<|message|>it is 7<|return|>")
    session = service.session()
    message = session.answer("look", tools=TOOLS)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "lookup", "arguments": '{"key": "alpha"}'}]
    assert (message.get("content"), message["reasoning_content"]) == (None, "step by step")
    session.ask([turn("user", "look"), message, tool_result(message, "7")], tools=TOOLS)
    first, second = session.calls
    assert_sampled_as_recorded(engine, [first, second])
    assert (first["finish_reason"], second["parent_id"]) == ("tool_calls", first["call_id"])
    assert engine.family.decode(second["prompt_ids"]).endswith(RESULT)


def test_arguments_are_rendered_as_the_text_they_were(engine: ScriptedEngine, service: RunningService) -> None:
    """Also where they are no JSON: that is what the model said, and what vLLM renders for this family."""
    session = service.session()
    for arguments in ('{"key":"alpha"}', '{"key": "al', ""):
        call = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        session.ask([turn("user", "look"), asked, {"role": "tool", "tool_call_id": "call_1", "content": "7"}], tools=TOOLS)
        prompt = engine.family.decode(session.calls[-1]["prompt_ids"])
        assert prompt.endswith(f"<|channel|>commentary to=functions.lookup<|message|>{arguments}<|call|>{RESULT}")


@pytest.mark.parametrize("end", ["", "<|return|>"], ids=["cut", "ended otherwise"])
def test_a_call_that_is_not_closed_is_told_as_text(engine: ScriptedEngine, service: RunningService, end: str) -> None:
    asked: dict[str, Any] = {} if end else {"max_tokens": len(engine.family.encode(THINKS + CALLS))}
    engine.say(f"{THINKS}{CALLS}{end}")
    message = service.session().answer("look", tools=TOOLS, **asked)
    assert "tool_calls" not in message
    assert message["content"].endswith('{"key": "alpha"}')


def test_what_ends_a_reply_is_no_text_of_it(engine: ScriptedEngine, service: RunningService) -> None:
    engine.say(f"{THINKS}<|channel|>final<|message|>it is 7<|return|>")
    session = service.session()
    message = session.answer("look")
    assert (message["content"], message["reasoning_content"]) == ("it is 7", "step by step")
    assert session.calls[0]["completion_ids"][-1] == engine.family.end_id
