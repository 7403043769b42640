"""A real agent on a real vLLM, once in each dialect that it speaks: Pi, whose prompt is the smallest, and a tiny random model.

What the model says means nothing, so the agent stops after a turn or two; what was recorded of them is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.agent_run import Cli, run
from tests.harnesses.outside import Outside
from tests.harnesses.scratch import TASK, make_repository
from tests.support.engine.real_engine import assert_true, row_of
from tests.support.engine.vllm_server import running_vllm
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

pytestmark = pytest.mark.engine

APIS = {
    "chat": ("openai-completions", "/v1"),
    "responses": ("openai-responses", "/v1"),
    "messages": ("anthropic-messages", ""),
    "gemini": ("google-generative-ai", "/v1beta"),
}
PI = Cli("pi", "chat", steps=lambda workdir: [], change_at=0)
MODELS = Path(".pi") / "agent" / "models.json"


@pytest.fixture(scope="module")
def service(tiny_model: Path, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("vllm")
    with (
        running_vllm(tiny_model, folder, "--max-model-len", "16384") as engine,
        RunningService(engine.url, redis_server.url, engine_api="token") as service,
    ):
        yield service


@pytest.mark.parametrize("dialect", APIS)
def test_pi_on_a_real_engine_is_recorded_as_it_was_sampled(
    service: RunningService, tiny_model: Path, tmp_path: Path, dialect: str
) -> None:
    # No seed: on a CPU, vLLM 0.32 dies of a seeded prompt that it prefills in several pieces.
    session = service.session(sampling={"max_tokens": 40})
    address, (api, suffix) = session.base_url.removesuffix("/v1"), APIS[dialect]

    def speak_the_dialect(home: Path) -> None:
        told = (home / MODELS).read_text(encoding="utf-8")
        assert '"openai-completions"' in told and f'"{address}/v1"' in told
        told = told.replace('"openai-completions"', f'"{api}"').replace(f'"{address}/v1"', f'"{address}{suffix}"')
        (home / MODELS).write_text(told, encoding="utf-8")

    workdir = make_repository(tmp_path / "work")
    with Outside() as outside:
        options: dict[str, Any] = {"at_home": speak_the_dialect, "timeout_seconds": 240.0}
        ended = run(PI, address, session.api_key, TASK, workdir, outside.variables, **options)
    calls = session.calls
    assert calls and {(call["dialect"], call["api"]) for call in calls} == {(dialect, "token")}, str(ended)
    assert all(call["delivered"] and call["completion_ids"] for call in calls)
    rows, accounting = session.trajectories()
    assert accounting["quarantined"] == []
    assert accounting["exported_tokens"] == sum(len(call["completion_ids"]) for call in calls)
    assert_true([row_of(row) for row in rows], tiny_model)
