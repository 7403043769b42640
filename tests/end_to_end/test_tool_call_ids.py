"""The engine's own ids of tool calls in its prompts, on a real vLLM, under templates that refuse or show them, with their parsers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.support.engine.real_engine import reaching
from tests.support.engine.vllm_server import running_vllm
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.sessions.engine_ids import with_engine_ids
from tests.templates.native_families import TEMPLATES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "open",
            "description": "Opens a door.",
            "parameters": {"type": "object", "properties": {"key": {"enum": ["a", "b"]}}, "required": ["key"]},
        },
    }
]
PATHS = ("plugin", "token", "chat")
MARKUP = (
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[INST]", "[/INST]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|im_middle|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the markup of both families as tokens."""
    from examples.demo.tiny_model import make_tiny_model

    directory = make_tiny_model(tmp_path_factory.mktemp("model") / "markup", vocabulary=1000)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer.save_pretrained(directory)
    return directory


def section(key: str) -> str:
    """A call as Kimi's model writes it, with its id, which the template shows again."""
    call = rf'functions\.open:0<\|tool_call_argument_begin\|>\{{"key": "{key}"\}}'
    return rf"<\|tool_calls_section_begin\|><\|tool_call_begin\|>{call}<\|tool_call_end\|><\|tool_calls_section_end\|>"


CALLS = {
    "mistral": [rf'\[TOOL_CALLS\]open\[ARGS\]\{{"key": "{key}"\}}' for key in ("a", "b")],
    "kimi_k2": [section("a"), section("b")],
}
FAMILIES = {
    "mistral": ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"),
    "kimi_k2": ("moonshotai-Kimi-K2",),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def parser(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def services(
    parser: str, model: Path, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningService]]:
    flags = ["--tool-call-parser", parser, "--trust-request-chat-template"]
    # Mistral's reasoning parser wants tokens that only its thinking models have.
    flags += ["--reasoning-parser", parser] if parser == "kimi_k2" else []
    with running_vllm(model, tmp_path_factory.mktemp(parser), *flags) as vllm, ExitStack() as stack:
        ways = {path: reaching(path, vllm.url, redis_server.url) for path in PATHS}
        yield {path: stack.enter_context(way)[1] for path, way in ways.items()}


@pytest.mark.case(61)
@pytest.mark.parametrize("path", PATHS)
def test_a_tool_loop_is_served_and_its_prompts_show_the_engines_own_ids(
    services: dict[str, RunningService], parser: str, model: Path, path: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name in FAMILIES[parser]:
        template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        session = services[path].session()
        messages: list[Any] = [{"role": "user", "content": "Open both doors."}]
        for regex, barred in zip((*CALLS[parser], "both are open"), bars(tokenizer), strict=True):
            extra = {
                "chat_template": template,
                "structured_outputs": {"regex": regex},
                "logit_bias": {str(token): -100.0 for token in barred},
                "chat_template_kwargs": {"enable_thinking": False},
            }
            said = session.answer(messages, tools=TOOLS, extra_body=extra, max_tokens=120)
            messages.append(said)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "It is open."} for call in said.get("tool_calls") or ()
            ]
        assert messages[-1]["content"] == "both are open", name
        written, spelled, _ = ({*tokenizer.convert_ids_to_tokens(call["completion_ids"])} & {*MARKUP} for call in session.calls)
        assert written and not spelled
        assert_own_ids_are_shown(session.calls, messages, model, parser)
        rows, _ = session.trajectories()
        assert path == "chat" or len(rows) == 1, [call["branch_reason"] for call in session.calls]
        for call in session.calls:
            assert all(any(starts(row, call) for row in rows) for _ in call["completion_ids"][:1])


def bars(tokenizer: Any) -> list[set[int]]:
    """The ids that each turn may not sample: the first writes its markup as tokens, the second spells it. Of a turn's two ends only the
    template's own is left: the other would be another conversation."""
    markup, ends = set(tokenizer.convert_tokens_to_ids(list(MARKUP))), {tokenizer.eos_token_id}
    brackets = {token for token in range(len(tokenizer)) if {*"<["} & {*tokenizer.decode([token])}}
    return [{tokenizer.pad_token_id, *barred} for barred in (brackets - markup - ends, markup, ())]


def starts(row: dict[str, Any], call: dict[str, Any]) -> bool:
    """Whether the row holds the call's prompt and what was sampled after it."""
    seen = call["prompt_ids"] + call["completion_ids"]
    return bool(row["token_ids"][: len(seen)] == seen)


def assert_own_ids_are_shown(calls: list[dict[str, Any]], messages: list[Any], model: Path, parser: str) -> None:
    own = [identifier for call in calls for identifier in call["engine_tool_call_ids"]]
    if parser == "kimi_k2":
        assert own == ["functions.open:0"] * 2
    else:
        assert len(own) == 2 and all(len(each) == 9 and each.isalnum() for each in own)
    shown = AutoTokenizer.from_pretrained(model).decode(calls[-1]["prompt_ids"])
    assert all(identifier in shown for identifier in own)
    assert not any(call["call_id"] in shown for call in calls)
    assert with_engine_ids(messages, calls) != messages
