"""Calls as NeMo Gym's own records, read by its own models."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests import ROOT
from tests.joins.conftest import find_shown
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.sessions.random_harness import RandomHarness
from trainer_client import Sessions
from trainer_client.integrations.nemo_gym import describe_calls

CALLS = 12
SEEDS = range(6)
RECORDS = ROOT / ".cache/joins/nemo-gym/nemo_gym/token_id_capture/records.py"
"""This module alone: the package asks for thirty others, and for a Python that hardly anybody has."""


@pytest.fixture(scope="module")
def records() -> Any:
    spec = importlib.util.spec_from_file_location("nemo_gym_records", RECORDS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its classes look their annotations up here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, strict_models=True) as running:
        yield running


def test_gym_reads_every_trained_call_with_its_lineage(service: RunningService, records: Any) -> None:
    entries, trained = [], 0
    with Sessions(service.url, ADMIN) as sessions:
        for seed in SEEDS:
            with sessions.open() as session:
                harness = RandomHarness(session.base_urls["openai"], session.api_key, seed)
                try:
                    harness.run(CALLS)
                finally:
                    harness.close()
                session.reward = 1.0
            rows = session.rows()
            entries += describe_calls(session.calls(), rows, session.session_id)
            trained += sum(int(row.loss_mask.sum()) for row in rows)
    read = {each["model_call_id"]: records.TokenEntry.model_validate(json.loads(json.dumps(each))) for each in entries}
    assert sum(len(entry.generation_token_ids) for entry in read.values()) == trained > 0
    parents = [(read[entry.parent_call_id], entry) for entry in read.values() if entry.parent_call_id is not None]
    assert len(parents) > len(SEEDS)
    for parent, entry in parents:
        assert entry.prompt_token_ids[: parent.cum_len] == records.cumulative_tokens(parent)
    assert all(entry.digest == records.compute_digest(records.cumulative_tokens(entry)) for entry in read.values())


def test_the_program_that_is_shown_runs(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rollout calls nothing."""
    monkeypatch.setenv("VERBATIM_URL", service.url)
    monkeypatch.setenv("VERBATIM_ADMIN_TOKEN", ADMIN)
    names: dict[str, Any] = {}
    exec(find_shown("import describe_calls"), names)
    assert (names["entries"], names["session"].status) == ([], "failed")
