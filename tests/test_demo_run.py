"""The demo itself, short: two engines, agents that never wait for the trainer, every check of its verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from verbatim_process import ROOT, environment
from vllm_server import require_vllm

pytestmark = pytest.mark.engine

STEPS, GROUPS = 6, 4
FLAGS = {"--steps": STEPS, "--groups": GROUPS, "--rollouts": 4, "--replicas": 2, "--max-staleness": 1}


def run(command: list[str]) -> tuple[int, str]:
    """Its exit code and what it printed. A demo that is broken off is told so, for it ends the engines it started."""
    demo = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = demo.communicate()
        return demo.returncode, output
    finally:
        demo.terminate()
        demo.wait()


@pytest.mark.timeout(3600)
def test_agents_go_on_while_the_trainer_trains_and_the_verdict_holds(tmp_path: Path) -> None:
    """The verdict's own checks: tokens accounted for, recomputed, trained on once, within the bound, from both engines."""
    require_vllm()
    words = [word for flag, value in FLAGS.items() for word in (flag, str(value))]
    command = [sys.executable, "-m", "examples.demo.demo", "--asynchronous", "--out", str(tmp_path), *words]
    code, output = run(command)
    assert code == 0, output
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["passed"]
    assert verdict["expected"]["replicas"] == len(verdict["idle"]) == 2
    assert sum(verdict["ages"].values()) == STEPS * GROUPS
    assert len(verdict["rewards"]) == STEPS
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
