"""A policy learns to click what it sees: agent, service, engine, store and trainer in one loop, with a tiny vision model on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.screen.screens import PER_SESSION
from tests.support.engine.forked_vllm import ForkedVllm
from tests.support.engine.vllm_server import require_vllm
from tests.support.sessions.demo_process import judged

pytestmark = pytest.mark.engine

STEPS, GROUPS, ROLLOUTS = 6, 6, 8


@pytest.mark.timeout(3600)
def test_a_policy_learns_to_click_what_it_sees(tmp_path: Path) -> None:
    """The verdict's own checks: the reward rose; each session one row, its tokens accounted for, trained on once and recomputed with the
    pixels under the weights that sampled them."""
    require_vllm()
    sizes = {"--steps": STEPS, "--groups": GROUPS, "--rollouts": ROLLOUTS, "--learning-rate": 1e-3}
    words = [str(word) for pair in sizes.items() for word in pair]
    verdict = judged("examples.screen.click", tmp_path, *words, **ForkedVllm.forking_env())
    assert verdict["sessions"] == verdict["rows"] == STEPS * GROUPS * ROLLOUTS
    assert verdict["calls"] <= PER_SESSION * verdict["sessions"]
    assert verdict["rise"] >= verdict["expected"]["rise"] > 0
