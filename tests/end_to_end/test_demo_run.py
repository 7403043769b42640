"""The demo itself, short: two engines that share a mirror, agents that never wait for the trainer, every check of its verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.deltas import is_delta
from tests.support.engine.forked_vllm import ForkedVllm
from tests.support.engine.vllm_server import require_vllm
from tests.support.sessions.demo_process import judged

pytestmark = pytest.mark.engine

STEPS, GROUPS = 4, 3
FLAGS = {"--steps": STEPS, "--groups": GROUPS, "--rollouts": 4, "--replicas": 2, "--max-staleness": 1}


@pytest.mark.timeout(3600)
def test_agents_go_on_while_the_trainer_trains_and_the_verdict_holds(tmp_path: Path) -> None:
    """The verdict's own checks: tokens accounted for, recomputed, trained on once, within the bound, from both engines, which after pushes
    of deltas hold the trainer's bits.

    The demo and its processes are forked off one that has imported torch and vLLM; test_tasks_loop starts its own as a user does."""
    require_vllm()
    words = [word for flag, value in FLAGS.items() for word in (flag, str(value))]
    verdict = judged("examples.demo.demo", tmp_path, "--asynchronous", "--delta", *words, **ForkedVllm.forking_env())
    assert verdict["expected"]["replicas"] == len(verdict["idle"]) == 2
    assert sum(verdict["ages"].values()) == STEPS * GROUPS
    assert len(verdict["rewards"]) == STEPS
    assert [is_delta(tmp_path / "weights" / f"version-{step}") for step in range(1, STEPS + 1)] == [False, True, True, True]
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
