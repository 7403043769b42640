"""How many kill -9 the service survives: hundreds of rounds of what `tests/end_to_end/test_crashes.py` does a few of, and the figures.

    python -m benchmarks.crashes [--rounds 300] [--seed 1] [--json FILE]

The rounds come in runs of 25, each with a seed, a store and processes of its own; every third run is of one service with its embedded
Redis, the others of two services on one Redis. In each run some harnesses close a session and die before they have the answer. A
broken promise ends everything with the log of its run, and `--rounds 25 --seed N` plays that run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.processes import machine
from tests.support.crashes.rounds import CrashRounds, Survived
from tests.support.crashes.setups import embedded, shared

ROUNDS_PER_RUN = 25
AGENTS = 10


def survive(seed: int, rounds: int) -> Survived:
    setup = embedded if seed % 3 == 0 else shared
    with tempfile.TemporaryDirectory(prefix="verbatim-crashes-", ignore_cleanup_errors=True) as folder:
        rounds_of_kills = CrashRounds(seed, setup, Path(folder), agents=AGENTS, forgetful=True, note=_print)
        return rounds_of_kills.run(rounds)


def figures(runs: list[Survived]) -> dict[str, Any]:
    """The sums over all runs. `losses` and `duplicates_after_acknowledgement` are none, or there would be no figures."""
    kills: Counter[str] = sum((run.kills for run in runs), Counter())
    quarantined: Counter[str] = sum((run.checked.quarantined for run in runs), Counter())
    summed = (
        "replies",
        "tokens",
        "calls",
        "sessions",
        "dangling",
        "groups",
        "deliveries",
        "redelivered",
        "acknowledged_unheard",
    )
    return {
        "seeds": [run.seed for run in runs],
        "rounds": sum(run.rounds for run in runs),
        "kills": dict(kills),
        "faults": kills.total(),
        "seconds": round(sum(run.seconds for run in runs), 1),
        "calls_asked_again": sum(run.asked_again for run in runs),
        **{name: sum(getattr(run.checked, name) for run in runs) for name in summed},
        "quarantined": dict(quarantined),
        "losses": 0,
        "duplicates_after_acknowledgement": 0,
    }


def _print(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones count on")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    runs: list[Survived] = []
    while (left := options.rounds - sum(run.rounds for run in runs)) > 0:
        runs.append(survive(options.seed + len(runs), min(left, ROUNDS_PER_RUN)))
        _print(json.dumps(figures(runs)))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **figures(runs)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
