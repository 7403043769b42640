"""The tiny model: a tokenizer that loses nothing, and a chat template with the properties of Qwen3's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.tiny_model import MARKUP, make_tiny_model

TOOL = {"type": "function", "function": {"name": "open", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "open", "arguments": '{"key": 2}'}}
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_encode_and_decode(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_markup_is_one_token_each_and_stays_when_special_tokens_are_skipped(tokenizer: Any) -> None:
    for text in MARKUP:
        ids = tokenizer.encode(text)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode("<|im_end|>"), skip_special_tokens=True) == ""


def test_the_same_seed_gives_the_same_files(directory: Path, tmp_path: Path) -> None:
    def digests(folder: Path) -> dict[str, str]:
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}

    again = digests(make_tiny_model(tmp_path / "same"))
    other = digests(make_tiny_model(tmp_path / "other", seed=1))
    assert again == digests(directory)
    assert [name for name in again if again[name] != other[name]] == ["model.safetensors"]


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it(tmp_path: Path, tied: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, tie_word_embeddings=tied))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.num_parameters() < 2_000_000


def test_tools_stand_in_the_system_turn(tokenizer: Any) -> None:
    text = rendered(tokenizer, [{"role": "system", "content": "Be short."}, USER], tools=[TOOL])
    system, user, _ = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe short.\n\n") and '"name": "open"' in system
    assert user == "<|im_start|>user\nhello"


def test_tool_results_share_one_user_turn(tokenizer: Any) -> None:
    results = [{"role": "tool", "tool_call_id": "a", "content": "one"}, {"role": "tool", "tool_call_id": "b", "content": "two"}]
    text = rendered(tokenizer, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, *results])
    call = '<tool_call>\n{"name": "open", "arguments": {"key": 2}}\n</tool_call>'
    assert text.endswith(
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_arguments_render_alike_as_text_and_as_an_object(tokenizer: Any) -> None:
    parsed = {**CALL, "function": {"name": "open", "arguments": {"key": 2}}}
    turns: list[Any] = [[USER, {"role": "assistant", "content": "", "tool_calls": [call]}] for call in (CALL, parsed)]
    assert rendered(tokenizer, turns[0]) == rendered(tokenizer, turns[1])


def test_reasoning_is_shown_after_the_last_query_and_dropped_before(tokenizer: Any) -> None:
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert rendered(tokenizer, [USER, thought]).endswith("assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>\n")
    assert "<think>" not in rendered(tokenizer, [USER, thought, USER])
    after_a_tool: list[Any] = [
        USER,
        {**thought, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
    ]
    assert "<think>\nhm\n</think>" in rendered(tokenizer, after_a_tool)


def test_the_generation_prompt_can_end_thinking_at_once(tokenizer: Any) -> None:
    prompt = rendered(tokenizer, [USER], add_generation_prompt=True)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert rendered(tokenizer, [USER], add_generation_prompt=True, enable_thinking=False) == f"{prompt}<think>\n\n</think>\n\n"


def test_an_empty_think_block_in_the_last_turn_is_shown_on_request(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, empty_think_when_last=True))
    assistant = {"role": "assistant", "content": "yes"}
    assert rendered(tokenizer, [USER, assistant]).endswith("assistant\n<think>\n\n</think>\n\nyes<|im_end|>\n")
    assert "<think>" not in rendered(tokenizer, [USER, assistant, USER])
