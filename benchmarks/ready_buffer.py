"""What prepared rollouts that wait for a run slot gain: one node, the same rollouts with a ready buffer of 0, 2 and 8.

Each rollout has a prepare step of some seconds, as if dependencies were installed, and an agent that works for some seconds between
two calls; both are drawn by the seed and the same for every size of the buffer. Compared are

    to first call   how long after a run slot became free the next agent makes its first call
    utilisation     the share of the run slots' time in which agents work, from the first call until nothing waits any more

    python -m benchmarks.ready_buffer [--ready 0 2 8] [--rollouts 36] [--run 3] [--prepare-seconds 3] [--work-seconds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import ADMIN, ROOT, Parts, machine, request, running

PREPARING = 8
"""Runtimes that are prepared at once, whatever the buffer: the steps wait and take no CPU."""
AGENT = """python3 - <<'PYTHON'
import json, os, time, urllib.request
def ask():
    body = json.dumps({{"model": os.environ["OPENAI_MODEL"], "messages": [{{"role": "user", "content": "hello"}}]}}).encode()
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
ask()
time.sleep({seconds:.2f})
ask()
PYTHON
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """One rollout, in epoch seconds: its agent's first call, and the end of its run."""

    first_call: float
    ended: float


@dataclass(frozen=True, slots=True)
class Load:
    """`rollouts` tasks of one rollout; the seconds are means, of which each gets between a half and one and a half."""

    rollouts: int
    prepare_seconds: float
    work_seconds: float
    seed: int

    def tasks(self, prefix: str) -> Iterator[dict[str, Any]]:
        dice = random.Random(self.seed)
        for number in range(self.rollouts):
            prepare, work = (mean * dice.uniform(0.5, 1.5) for mean in (self.prepare_seconds, self.work_seconds))
            yield {
                "task_id": f"{prefix}-{number}",
                "instruction": AGENT.format(seconds=work),
                "harness": "shell",
                "model": "policy",
                "prepare": [{"exec": f"sleep {prepare:.2f}"}],
                "runtime": {"kind": "local", "memory_mb": 256},
            }


def ran(parts: Parts, load: Load, ready: int, run: int) -> list[Ran]:
    """The load over a node with a buffer of `ready`, in the order of first calls."""
    prefix = f"ready-{ready}"
    for task in load.tasks(prefix):
        request(parts.url, "POST", "/tasks", task)
    with node(parts, f"ready-{ready}-{os.getpid()}", "--ready", str(ready), "--run", str(run), "--prepare", str(PREPARING)):
        while _unended(parts):
            time.sleep(0.5)
    rollouts = [_rollout(parts, f"{prefix}-{number}") for number in range(load.rollouts)]
    return sorted(rollouts, key=lambda each: each.first_call)


def _unended(parts: Parts) -> int:
    return sum(task["ended_at"] is None for task in request(parts.url, "GET", "/tasks?limit=1000")["tasks"])


def _rollout(parts: Parts, task_id: str) -> Ran:
    (rollout,) = request(parts.url, "GET", f"/tasks/{task_id}/rollouts")["rollouts"]
    if rollout["status"] != "completed":
        raise SystemExit(f"{task_id} ended as {rollout['status']}: {rollout['verdict']}")
    calls = request(parts.url, "GET", f"/sessions/{rollout['session_id']}/calls")["calls"]
    return Ran(min(call["started_at"] for call in calls), rollout["times"]["concluding"])


def figures(rollouts: Sequence[Ran], run: int) -> dict[str, Any]:
    """With so many `run` slots, every first call but the first ones is made in the slot of the run that ended just so many before."""
    ends = sorted(each.ended for each in rollouts)
    waits = [later.first_call - end for later, end in zip(rollouts[run:], ends, strict=False)]
    begun, dry = rollouts[0].first_call, rollouts[-1].first_call
    worked = sum(min(each.ended, dry) - min(each.first_call, dry) for each in rollouts)
    return {
        "to_first_call_seconds_mean": round(statistics.mean(waits), 2),
        "to_first_call_seconds_p50": round(statistics.median(waits), 2),
        "to_first_call_seconds_p95": round(statistics.quantiles(waits, n=20)[-1], 2),
        "utilisation": round(worked / (run * (dry - begun)), 3),
        "seconds": round(ends[-1] - begun, 1),
    }


@contextmanager
def node(parts: Parts, name: str, *flags: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="verbatim-node-", ignore_cleanup_errors=True) as folder:
        place = ["--url", parts.url, "--data-dir", folder, "--name", name]
        room = ["--cpus", "64", "--memory-mb", "65536", "--runtime", "local", "--log-level", "warning"]
        env = os.environ | {"VERBATIM_ADMIN_TOKEN": ADMIN, "VERBATIM_LOCAL_DIR": f"{folder}/runtimes"}
        process = subprocess.Popen([sys.executable, "-m", "cli.main", "node", *place, *room, *flags], cwd=ROOT, env=env)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def table(found: dict[int, dict[str, Any]]) -> Table:
    shown = Table(
        "ready buffer", "free slot to first call, mean s", "p50", "p95", "utilisation", "all, s", title_justify="left"
    )
    for ready, each in found.items():
        waits = [
            f"{each[name]:.2f}"
            for name in ("to_first_call_seconds_mean", "to_first_call_seconds_p50", "to_first_call_seconds_p95")
        ]
        shown.add_row(str(ready), *waits, f"{each['utilisation']:.0%}", f"{each['seconds']:.0f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ready", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--rollouts", type=int, default=36)
    parser.add_argument("--run", type=int, default=3, help="run slots")
    parser.add_argument("--prepare-seconds", type=float, default=3.0)
    parser.add_argument("--work-seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    load = Load(options.rollouts, options.prepare_seconds, options.work_seconds, options.seed)
    with running() as parts:
        found = {ready: figures(ran(parts, load, ready, options.run), options.run) for ready in options.ready}
    Console().print(table(found))
    if options.json:
        setting = {name: getattr(options, name) for name in ("rollouts", "run", "prepare_seconds", "work_seconds", "seed")}
        options.json.write_text(json.dumps({"machine": machine(), **setting, "by_ready": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
