"""Scores by engines of each kind: those that take ids give them over their own routes, a chat server is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.proxy.engine.test_detection import Vllm
from tests.proxy.scoring.test_scoring import check_row, lease, play
from tests.support.engine.local_format import QWEN3, require_renderers
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.shaped_sglang import ShapedSglang
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

require_renderers()


class Completions(Vllm):
    """vLLM without --enable-scale-out."""

    def __init__(self) -> None:
        super().__init__("0.32.0")
        self._routes["POST", "/detokenize"] = ScriptedEngine("qwen3")._routes["POST", "/detokenize"]


TEACHERS: dict[str, Any] = {
    "sglang": ShapedSglang,
    "completions": Completions,
    "chat": lambda: ScriptedEngine(plain=True),
}
FAULTS: dict[str, Any] = {
    "a short list": lambda told: told[:-1],
    "no list": lambda told: [],
    "another id": lambda told: [*told[:-1], told[-2]],
}
Running = tuple[dict[str, ScriptedEngine], RunningService]


@pytest.fixture(scope="module")
def running(redis_server: RedisServer, qwen3_format: Path) -> Iterator[Running]:
    redis_server.flushall()
    with ExitStack() as stack:
        student = stack.enter_context(ScriptedEngine("qwen3"))
        teachers = {name: stack.enter_context(make()) for name, make in TEACHERS.items()}
        scorers: Any = {name: {"policy": name, "top_k": 2, "required": False} for name in TEACHERS}
        engines = [student.url, *(f"{name}={teacher.url}" for name, teacher in teachers.items())]
        service = RunningService(engines, redis_server.url, scorers=scorers, renderer=str(qwen3_format), renderer_options=QWEN3)
        yield teachers, stack.enter_context(service)


@pytest.mark.parametrize("kind", ["sglang", "completions"])
def test_an_engine_that_takes_ids_scores_each_sampled_token_at_its_own_place(running: Running, kind: str) -> None:
    teachers, service = running
    teachers[kind].reset()
    for row in lease(service, play(service, branches=2, scores=[kind])):
        check_row(row, kind)
        told = row["scores"][kind]
        sampled = np.flatnonzero(row["loss_mask"])
        assert [told["top_ids"][at] for at in sampled] == [[row["token_ids"][at], row["token_ids"][at] + 1] for at in sampled]
        assert {span[0] for span in told["weight_versions"]} == {0}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["sglang", "completions"])
def test_an_answer_of_another_length_or_of_other_ids_is_asked_for_again(running: Running, kind: str, fault: str) -> None:
    teachers, service = running
    teacher, left = teachers[kind].reset(), [FAULTS[fault]]
    teacher.bend_scores = lambda generation, told: left.pop()(told) if left else told
    (row,) = lease(service, play(service, scores=[kind]))
    check_row(row, kind)
    assert not left


def test_a_chat_server_is_refused_with_the_way_out(running: Running) -> None:
    _, service = running
    (row,) = lease(service, play(service, scores=["chat"]))
    assert "no logprobs of ids that it did not sample: use vLLM" in row["scores"]["chat"]["error"]
    assert not any(row["scores"]["chat"]["logprobs"])
