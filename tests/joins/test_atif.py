"""Sessions as ATIF, read by Harbor's own models, and back as rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from tests.joins.conftest import Framework
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_images import SEEING, picture, url_of
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.sessions.random_harness import RandomHarness
from trainer_client.integrations.atif import read_rows

CALLS = 12
SEEDS = range(6)
VALIDATE = """
import sys
from pathlib import Path
from harbor.models.trajectories import Trajectory

for path in Path(sys.argv[1]).glob("*.json"):
    document = Trajectory.model_validate_json(path.read_text())
    print(path.stem, 1 + len(document.subagent_trajectories or ()))
"""


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with (
        ScriptedEngine(SEEING, most_images=1) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token", strict_models=True) as running,
    ):
        yield running


def test_harbor_reads_every_session_that_is_exported_and_its_rows_are_read_back(
    service: RunningService, client_wheel: Path, tmp_path: Path
) -> None:
    """Of random harnesses: tools, helpers, edits, retries, compaction, replies cut short. And of an agent that saw an image, whose ids
    would be trained without it."""
    for seed in SEEDS:
        session = service.session(session_id=f"walk-{seed}")
        harness = RandomHarness(session.base_url, session.api_key, seed)
        try:
            harness.run(CALLS)
        finally:
            harness.close()
        session.close(reward=0.5)
    seeing = service.session(session_id="seeing")
    shown = {"type": "image_url", "image_url": {"url": url_of(picture("red"))}}
    seeing.ask([{"role": "user", "content": [{"type": "text", "text": "What is it?"}, shown]}])
    seeing.close(reward=0.5)
    variables = {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN}
    words = ["export", "--out", str(tmp_path / "out"), "--atif", str(tmp_path / "atif")]
    assert CliRunner().invoke(app, words, env=variables, catch_exceptions=False).exit_code == 0

    harbor = Framework("harbor", tmp_path, client_wheel, service.url)
    read = dict(line.split() for line in harbor.run("python", "-c", VALIDATE, tmp_path / "atif").stdout.splitlines())
    assert set(read) == {"seeing", *(f"walk-{seed}" for seed in SEEDS)}
    unread = json.loads((tmp_path / "atif" / "seeing.json").read_text())
    assert unread["steps"][0]["message"] == "What is it?[image]"
    assert unread["steps"][1]["extra"]["images"] == 1 and read_rows(unread) == []
    assert int(read.pop("seeing")) == len(seeing.trajectories()[0]) == 1
    for session_id, parts in read.items():
        answer = service.request("GET", f"/sessions/{session_id}/trajectories").json()
        assert len(answer["trajectories"]) == int(parts)
        assert_reads_back(json.loads((tmp_path / "atif" / f"{session_id}.json").read_text()), answer)


def assert_reads_back(document: dict[str, Any], answer: dict[str, Any]) -> None:
    """Each row is a row of the service's as far as it is trained."""
    rows = read_rows(document)
    assert sum(int(row.loss_mask.sum()) for row in rows) == answer["accounting"]["exported_tokens"]
    for row in rows:
        assert row.reward == 0.5
        (whole,) = [each for each in answer["trajectories"] if row.trajectory_id.startswith(each["trajectory_id"])]
        length = len(row.token_ids)
        for name in ("token_ids", "loss_mask", "logprobs"):
            assert getattr(row, name).tolist() == whole[name][:length]
        assert [[span.version, span.start, span.end] for span in row.weight_versions] == whole["weight_versions"]
