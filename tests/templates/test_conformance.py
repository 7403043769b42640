"""Ten families' chat templates through the service: as few rows as in the last written run, and prompts as the template renders them."""

from __future__ import annotations

import json

import pytest

from tests.support.machine import unavailable
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.templates.__main__ import RESULTS
from tests.templates.conversations import SHAPES, Played, play_all
from tests.templates.native_families import TEMPLATES

FAMILIES = (
    "ByteDance-Seed-OSS",
    "GLM-4.6",
    "MiniMax-M2",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen-Qwen3-0.6B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-4-31B-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "moonshotai-Kimi-K2",
    "openai-gpt-oss-120b",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_conversations_have_the_rows_of_the_page_and_prompts_as_its_template_renders_them(
    redis_server: RedisServer, name: str
) -> None:
    if not (TEMPLATES / f"{name}.jinja").exists():
        unavailable("the templates are not there: run `make templates`")
    expected = json.loads(RESULTS.read_text(encoding="utf-8"))[name]
    played = play_all(name, lambda engine: RunningService(engine.url, redis_server.url, engine_api="token"))
    assert any(isinstance(each, Played) for each in played.values())
    assert list(expected) == list(SHAPES)
    for shape, before in expected.items():
        each = played[shape]
        assert isinstance(each, Played) is (before is not None), (shape, each)
        if isinstance(each, Played):
            assert each.rows <= before["rows"], (shape, each.reasons)
            assert each.differing == (), shape
