"""What a token of a streamed reply costs the service, in functions entered; and what comes in one read goes out in one write."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.processes import ROOT

TOGETHER = 8
MOST = {"chat": 5.7, "token": 2.1, "plugin": 5.7}
"""Functions of the service per token, by the way to the engine, where so many arrive in one read."""


@pytest.fixture(scope="module")
def counts() -> dict[str, tuple[float, float]]:
    """By way to the engine: functions entered and writes to the harness, per token."""
    argv = [sys.executable, "-m", "benchmarks.stream_cost", "--tokens=", "--only=chat", f"--together={TOGETHER}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()[1:]]
    return {way: (float(entered), float(writes)) for _, way, entered, _, writes, _ in rows}


def test_a_token_enters_few_functions_by_the_plugin_and_by_the_chat_path(counts: dict[str, tuple[float, float]]) -> None:
    entered = {way: functions for way, (functions, _) in counts.items()}
    assert all(entered[way] <= most for way, most in MOST.items()), entered
    assert entered["plugin"] <= entered["chat"]


def test_tokens_that_arrive_together_are_written_together(counts: dict[str, tuple[float, float]]) -> None:
    for way in ("chat", "plugin"):
        assert counts[way][1] <= 1 / TOGETHER + 0.01
