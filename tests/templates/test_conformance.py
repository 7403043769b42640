"""Ten families' chat templates through the service: no more rows than docs/templates.md has, and prompts as the template renders them."""

from __future__ import annotations

import pytest

from tests.support.machine import unavailable
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.templates.__main__ import PAGE
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
    (listed,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    expected = [cell.strip() for cell in listed.split("|")[2:-1]]
    played = play_all(name, lambda engine: RunningService(engine.url, redis_server.url, engine_api="token"))
    assert any(isinstance(each, Played) for each in played.values())
    for shape, cell in zip(SHAPES, expected, strict=True):
        each = played[shape]
        assert isinstance(each, Played) is (cell != "–"), (shape, each)
        if isinstance(each, Played):
            assert each.rows <= int(cell), (shape, each.reasons)
            assert each.differing == (), shape
