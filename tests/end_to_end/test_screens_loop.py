"""A policy learns to click what it sees: agent, service, engine, store and trainer in one loop, with a tiny vision model on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.screen.screens import PER_SESSION
from tests.support.engine.forked_vllm import ForkedVllm
from tests.support.engine.vllm_server import require_vllm
from tests.support.sessions.demo_process import judged

pytestmark = pytest.mark.engine

GROUPS, ROLLOUTS = 6, 8


def click(out: Path, steps: int, *words: str) -> dict[str, Any]:
    """The verdict. Its own checks hold: each session is one row, its tokens accounted for, trained on once and recomputed with the pixels
    under the weights that sampled them; the reward rose or, without pushes, did not change."""
    require_vllm()
    sizes = {"--steps": steps, "--groups": GROUPS, "--rollouts": ROLLOUTS, "--learning-rate": 1e-3}
    every = [*(str(word) for pair in sizes.items() for word in pair), *words]
    verdict = judged("examples.screen.click", out, *every, **ForkedVllm.forking_env())
    sessions = steps * GROUPS * ROLLOUTS
    assert verdict["sessions"] == verdict["rows"] == sessions and verdict["calls"] <= PER_SESSION * sessions
    return verdict


@pytest.mark.case(78)
@pytest.mark.timeout(3600)
def test_a_policy_learns_to_click_what_it_sees(tmp_path: Path) -> None:
    verdict = click(tmp_path, 10)
    assert verdict["rise"] >= verdict["expected"]["rise"] > 0
    assert verdict["weight_versions"][0] == 0 < verdict["weight_versions"][-1]


@pytest.mark.case(78)
@pytest.mark.timeout(3600)
def test_without_pushes_the_curve_stays_flat(tmp_path: Path) -> None:
    """All was sampled by the first weights, though the trainer learned."""
    verdict = click(tmp_path, 6, "--no-push")
    assert abs(verdict["rise"]) < verdict["expected"]["rise"] < 0.25
    assert verdict["weight_versions"] == [0] and verdict["trained_tokens"] > 0
