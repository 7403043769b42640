"""What chat.jsonl holds is what those who fine-tune take: it loads with datasets, and a chat template renders it as the model saw it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import PreTrainedTokenizerFast
from trl.data_utils import apply_chat_template, is_conversational

from cli.generation.folder import CONVERSATION, render_card, simplify_message, write_conversations
from tests import ROOT
from tests.support.engine.template_families import FAMILIES

ASKED = "Look the number up."
TEMPLATE = ROOT / "tests/support/engine/chat_templates/qwen3.jinja"


def call(name: str, arguments: str) -> dict[str, Any]:
    """As harnesses write it."""
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(name: str, arguments: str, content: Any) -> dict[str, Any]:
    said = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]},
        {
            "role": "tool",
            "tool_call_id": f"call_{name}",
            "content": [{"type": "text", "text": "41"}, {"type": "text", "text": "42"}],
        },
        {"role": "assistant", "content": "It is 42.", "reasoning_content": "41 or 42"},
    ]
    return {"messages": [simplify_message(message) for message in said], "metadata": {name: 1}}


def test_the_messages_load_as_a_dataset_and_are_rendered_as_they_were_said(tmp_path: Path) -> None:
    """Harnesses write text as a string or as parts, and arguments as text; the tools of two rows have nothing in common."""
    rows = [
        conversation("lookup", '{"key": "alpha"}', [{"type": "text", "text": ASKED}]),
        conversation("open", '{"path": ["a"], "mode": {"w": true}}', ASKED),
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=FAMILIES["qwen3"].tokenizer, chat_template=TEMPLATE.read_text())
    rendered = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in loaded]
    for text, written in zip(
        rendered, ('"arguments": {"key": "alpha"}}', '"arguments": {"path": ["a"], "mode": {"w": true}}}'), strict=True
    ):
        assert f"<|im_start|>user\n{ASKED}<|im_end|>\n" in text
        assert written in text and "41\n42" in text and text.endswith("It is 42.<|im_end|>\n")


def test_what_is_no_text_and_no_object_stays_as_it_is() -> None:
    image = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    assert simplify_message({"role": "user", "content": image})["content"] == image
    broken = [call("open", "{oops"), call("list", "[1]")]
    assert simplify_message({"role": "assistant", "content": "", "tool_calls": broken})["tool_calls"] == broken


def test_a_prompt_of_token_ids_stays_as_it_is() -> None:
    """It used to end the command, which looked for a text in each id, after all had been attempted."""
    assert simplify_message({"role": "prompt", "content": [11, 12]}) == {"role": "prompt", "content": [11, 12]}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_table_of_conversations_has_each_rows_own_tools_and_arguments_and_trl_takes_them(tmp_path: Path) -> None:
    """Read as structs, each tool and each call had the fields of all others, as nulls."""
    tools = [[tool("lookup", key={"type": "string"})], [tool("open", path={"type": "array"}, mode={"enum": ["w", 1]})], None]
    rows = [
        conversation("lookup", '{"key": "alpha"}', ASKED),
        conversation("open", '{"path": ["a"], "mode": {"w": true}}', ASKED),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}], "metadata": {}},
    ]
    given = dict.fromkeys(CONVERSATION) | {"reward": 0.5, "truncated": True, "session_id": "s"}
    lines = [{**given, **row, "tools": own} for row, own in zip(rows, tools, strict=True)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_conversations(tmp_path / "chat.jsonl", tmp_path / "conversations.parquet")
    (tmp_path / "README.md").write_text(render_card({"--accept": "a | b"}, 3, 3, 3, 3, 3, 0))
    loaded = load_dataset(str(tmp_path), "conversations", split="train", cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == [{name: line[name] for name in CONVERSATION} for line in lines]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=FAMILIES["qwen3"].tokenizer, chat_template=TEMPLATE.read_text())
    for row, name in zip(loaded, ("lookup", "open"), strict=False):
        assert is_conversational(row)
        text = apply_chat_template({"messages": row["messages"]}, tokenizer, tools=row["tools"])["text"]
        assert json.dumps(row["tools"][0]) in text and f'"name": "{name}"' in text
    write_conversations(Path("/dev/null"), tmp_path / "conversations.parquet")
    assert not (tmp_path / "conversations.parquet").exists() and "configs" not in render_card({}, 1, 1, 0, 0, 0, 0)
