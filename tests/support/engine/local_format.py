"""A family of template_families.py as a folder that the renderers package loads: its tokenizer and its chat template."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.apis.chat_format import ChatFormat
from tests.support.engine.template_families import FAMILIES

QWEN3: dict[str, Any] = {"name": "qwen3"}
TEMPLATE: dict[str, Any] = {"name": "default", "tool_parser": "qwen3", "reasoning_parser": "think"}
"""The model's own chat template, read as Qwen3 writes."""


def require_renderers() -> None:
    """CI fails without the package; see tests/peers.txt."""
    if os.environ.get("CI") != "true":
        pytest.importorskip("renderers", reason="renderers is not installed: see tests/peers.txt")
        pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="session")
def qwen3_format(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_format("qwen3", tmp_path_factory.mktemp("format"))


def write_format(family: str, folder: Path) -> Path:
    from transformers import PreTrainedTokenizerFast

    known = FAMILIES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=known.tokenizer, eos_token=known.end, clean_up_tokenization_spaces=False
    )
    template = Path(__file__).parent / "chat_templates" / f"{family}.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    # The libraries are loaded here: no call of a test has to wait for them.
    ChatFormat(str(folder), TEMPLATE)
    return folder
