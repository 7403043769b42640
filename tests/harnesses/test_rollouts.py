"""Rollouts of the example tasks by real agents over two nodes, of which one is killed: `benchmarks/rollouts.py` in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harnesses.rollout_plays import CLIS, exercises
from tests.harnesses.rollout_trial import RolloutTrial
from tests.support.machine import require

ROLLOUTS, SEED = 16, 3


@pytest.mark.timeout(3000)
def test_no_rollout_is_lost_or_doubled_when_a_node_is_killed_and_all_tokens_are_accounted_for(tmp_path: Path) -> None:
    """What must be true of them is in rollout_accounts.py; which plays there are follows from the seed."""
    require("bwrap")
    given = exercises(ROLLOUTS, samples=2, seed=SEED, hang_seconds=30)
    trial = RolloutTrial(tmp_path, given, seed=SEED, nodes=2, most_seconds=2400)
    tried = trial.run(pause_seconds=0, most_kills=1)
    done = tried.accounted
    assert tried.kills.total() == 1
    assert done.rollouts == ROLLOUTS
    assert set(done.outcomes) == {cli.harness for cli in CLIS}
    assert done.retried["node_lost"] >= 1
    assert done.statuses["completed"] and done.groups
