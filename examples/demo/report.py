"""What is left when the demo ends: the reward as a picture, the numbers as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.demo.ages import mean_age, shares_of
from examples.demo.verdict import Expectation, Verdict


def draw_run(
    path: Path, rewards: Sequence[Sequence[float]], verdict: Verdict, expected: Expectation, *, chance: float | None
) -> None:
    """Write a PNG: the rewards of each training step, how old the groups were that it trained on, how idle the engines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), dpi=150, width_ratios=(3, 1), layout="constrained")
    _draw_rewards(left, rewards, chance)
    _draw_ages(right, verdict.ages)
    way = "asynchronous" if expected.asynchronous else "in rounds"
    idle = ", ".join(f"{share:.0%}" for share in verdict.idle.values())
    control = ", rewards SHUFFLED" if expected.shuffled else ""
    figure.suptitle(f"{way}, weight push {'on' if expected.push else 'OFF'}{control}; engine idle {idle} of the time")
    figure.savefig(path)
    pyplot.close(figure)


def _draw_rewards(axes: Any, rewards: Sequence[Sequence[float]], chance: float | None) -> None:
    """Mean reward of each step with its standard error, and the reward of trying at random."""
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(rewards) + 1)
    means = [sum(step) / len(step) for step in rewards]
    errors = [_standard_error(step) for step in rewards]
    low, high = zip(*((mean - error, mean + error) for mean, error in zip(means, errors, strict=True)), strict=True)
    axes.fill_between(steps, low, high, color="tab:blue", alpha=0.2, linewidth=0, label="± standard error")
    axes.plot(steps, means, color="tab:blue", marker="o", markersize=4, label=f"mean of {len(rewards[0])} rollouts")
    if chance is not None:
        axes.axhline(chance, color="gray", linestyle="--", linewidth=1, label="at random")
    axes.set_xlabel("training step")
    axes.set_ylabel("reward")
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def _draw_ages(axes: Any, ages: Mapping[int, int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.bar(list(ages), list(ages.values()), color="tab:orange")
    axes.set_xlabel("versions behind the trainer")
    axes.set_ylabel("groups trained on")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


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
        ("  and that no step took any more", f"{verdict.untrained_tokens:,}"),
        ("tokens recomputed with transformers", f"{verdict.recomputed_tokens:,}"),
        ("largest |stored - recomputed logprob|", f"{verdict.largest_difference:.1e} (< {expected.difference:g})"),
        ("weight versions seen", f"{len(versions)} ({versions[0]} to {versions[-1]})" if versions else "0"),
        ("rows sampled across an update", f"{verdict.mixed_rows:,}"),
        ("groups by versions behind", f"{shares_of(verdict.ages)} (≤ {expected.max_staleness})"),
        ("share of the time without a call, by engine", ", ".join(f"{share:.0%}" for share in verdict.idle.values())),
        ("reward, first and last rounds", f"{verdict.first_reward:.3f} → {verdict.last_reward:.3f}"),
        ("agents", "asynchronous" if expected.asynchronous else "in rounds"),
        ("weight push", "on" if expected.push else "OFF"),
        *([("rewards", "SHUFFLED")] if expected.shuffled else []),
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
        "mean_age": mean_age(verdict.ages),
    }
    record = {"passed": not failures, "failures": failures, **asdict(verdict), **derived}
    path.write_text(json.dumps(record | {"expected": asdict(expected), "seconds": round(seconds, 1)}, indent=2) + "\n")


def _quarantined(verdict: Verdict) -> str:
    reasons = ", ".join(f"{reason}: {tokens}" for reason, tokens in verdict.quarantine_reasons.items())
    return f"{verdict.quarantined_tokens:,}" + (f" ({reasons})" if reasons else "")


def _standard_error(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values)) / len(values)
