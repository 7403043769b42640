"""What is left when the demo ends: the reward as a picture, the numbers as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from examples.demo.verdict import Expectation, Verdict


def draw_rewards(path: Path, rounds: Sequence[Sequence[float]], *, push: bool, chance: float) -> None:
    """Write a PNG: mean reward of each round with its standard error, and the reward of trying keys at random."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(rounds) + 1)
    means = [sum(rewards) / len(rewards) for rewards in rounds]
    errors = [_standard_error(rewards) for rewards in rounds]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150)
    low, high = zip(*((mean - error, mean + error) for mean, error in zip(means, errors, strict=True)), strict=True)
    axes.fill_between(steps, low, high, color="tab:blue", alpha=0.2, linewidth=0, label="± standard error")
    axes.plot(steps, means, color="tab:blue", marker="o", markersize=4, label=f"mean of {len(rounds[0])} rollouts")
    axes.axhline(chance, color="gray", linestyle="--", linewidth=1, label="random keys")
    axes.set_title(f"Reward over training, weight push {'on' if push else 'OFF'}")
    axes.set_xlabel("training step")
    axes.set_ylabel("reward (share of doors opened)")
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def verdict_table(verdict: Verdict, expected: Expectation) -> Table:
    """The verdict's numbers for the terminal."""
    versions = verdict.weight_versions
    table = Table(title="Verdict", show_header=False, title_justify="left")
    table.add_column(justify="left")
    table.add_column(justify="right")
    rows = [
        ("conversations", f"{verdict.sessions:,}"),
        ("calls", f"{verdict.calls:,}"),
        ("rows per conversation", f"{verdict.rows_per_conversation:.3f}"),
        ("tokens sampled", f"{verdict.sampled_tokens:,}"),
        ("  = exported", f"{verdict.exported_tokens:,}"),
        ("  + quarantined", _quarantined(verdict)),
        ("tokens the agent was told of", f"{verdict.agent_tokens:,}"),
        ("tokens the trainer trained on", f"{verdict.trained_tokens:,}"),
        ("tokens recomputed with transformers", f"{verdict.recomputed_tokens:,}"),
        ("largest |stored - recomputed logprob|", f"{verdict.largest_difference:.1e} (< {expected.difference:g})"),
        ("weight versions seen", f"{len(versions)} ({versions[0]} to {versions[-1]})" if versions else "0"),
        ("rows sampled across an update", f"{verdict.mixed_rows:,}"),
        ("reward, first and last rounds", f"{verdict.first_reward:.3f} → {verdict.last_reward:.3f}"),
        ("weight push", "on" if expected.push else "OFF"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def write_verdict(path: Path, verdict: Verdict, expected: Expectation, seconds: float) -> None:
    """The same as JSON, with `passed`, `failures` and the seconds the whole demo took."""
    failures = verdict.failures(expected)
    derived = {
        "rows_per_conversation": verdict.rows_per_conversation,
        "first_reward": verdict.first_reward,
        "last_reward": verdict.last_reward,
        "rise": verdict.rise,
    }
    record = {"passed": not failures, "failures": failures, **asdict(verdict), **derived}
    path.write_text(json.dumps(record | {"expected": asdict(expected), "seconds": round(seconds, 1)}, indent=2) + "\n")


def _quarantined(verdict: Verdict) -> str:
    reasons = ", ".join(f"{reason}: {tokens}" for reason, tokens in verdict.quarantine_reasons.items())
    return f"{verdict.quarantined_tokens:,}" + (f" ({reasons})" if reasons else "")


def _standard_error(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values)) / len(values)
