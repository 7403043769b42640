"""Are rollouts lost or doubled when nodes die? Hundreds of rollouts of the example tasks by real command-line agents, and kill -9.

    python -m benchmarks.rollouts [--rollouts 200] [--nodes 3] [--seed 1] [--kill-seconds 8] [--json FILE]

What `tests/harnesses/test_rollouts.py` does with a few: pi, mini-swe-agent, codex and claude-code work in sandboxes of `verbatim node`
processes, of which a random one is killed every few seconds while it runs something, and started again. The engine is scripted: in a
conversation it solves the task, claims that it is done, runs into an error, or never answers, as the seed has it. Afterwards
everything is held against what the engine sampled and what a trainer is given; a broken promise ends the benchmark with the logs.

The agents have to be installed (`make harnesses`), and so has bubblewrap.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import machine
from tests.harnesses.rollout_plays import exercises
from tests.harnesses.rollout_trial import RolloutTrial, Tried

PLAYS = ("solve", "fail", "crash", "hang")


def figures(tried: Tried) -> dict[str, Any]:
    """`lost` and `doubled` are none, or there would be no figures."""
    done = tried.accounted
    return {
        "seconds": round(tried.seconds, 1),
        "rollouts_per_minute": round(60 * done.rollouts / tried.seconds, 1),
        "kills": dict(sorted(tried.kills.items())),
        "rollouts": done.rollouts,
        "lost": len(done.lost),
        "doubled": len(done.doubled),
        "attempts": done.attempts,
        "statuses": dict(done.statuses),
        "failures": dict(done.failures),
        "retried": dict(done.retried),
        "plays_drawn": dict(tried.drawn),
        "outcomes": {harness: dict(plays) for harness, plays in sorted(done.outcomes.items())},
        "calls": done.calls,
        "sampled_tokens": done.sampled_tokens,
        "quarantined": dict(done.quarantined),
        "groups_leased": done.groups,
        "rows_leased": done.rows,
        "trained_tokens": done.trained_tokens,
    }


def tables(shown: dict[str, Any]) -> list[Table]:
    """By agent and play, and everything else."""
    outcomes = Table("agent", *PLAYS, title="rollouts", title_justify="left")
    total: Counter[str] = Counter()
    for harness, plays in shown["outcomes"].items():
        outcomes.add_row(harness, *(str(plays.get(play, 0)) for play in PLAYS))
        total.update(plays)
    outcomes.add_row("all", *(str(total[play]) for play in PLAYS))
    rest = Table(show_header=False)
    for name, value in shown.items():
        if name != "outcomes":
            told = ", ".join(f"{what} {count}" for what, count in value.items()) if isinstance(value, dict) else f"{value:,}"
            rest.add_row(name.replace("_", " "), told)
    return [outcomes, rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4, help="rollouts of a task")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-seconds", type=float, default=8.0, help="between one kill and the next, at least")
    parser.add_argument("--hang-seconds", type=float, default=30.0, help="the agents' budget where the model hangs")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    # Told to end in either way, it ends its nodes first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = exercises(options.rollouts, options.samples, options.seed, hang_seconds=options.hang_seconds)
    with tempfile.TemporaryDirectory(prefix="verbatim-rollouts-", ignore_cleanup_errors=True) as folder:
        trial = RolloutTrial(Path(folder), given, seed=options.seed, nodes=options.nodes, note=_note)
        tried = trial.run(pause_seconds=options.kill_seconds)
    shown = figures(tried)
    console = Console()
    for table in tables(shown):
        console.print(table)
    if options.json:
        setting = {name: getattr(options, name) for name in ("seed", "samples", "nodes", "kill_seconds", "hang_seconds")}
        options.json.write_text(json.dumps({"machine": machine(), **setting, **shown}, indent=2) + "\n")


def _note(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
