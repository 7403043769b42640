"""What a bound on staleness costs and what asynchrony gains: a simulation with measured times of engines and trainer.

    python -m benchmarks.staleness [--times FILE] [--bounds 0,1,2,4,8] [--steps 60] [--seeds 3] [--json FILE] [--png FILE]

For each case: synchronous (rollouts, then training), synchronous with all machines sampling and then all training, and asynchronous
under each bound, with partial rollouts (replies go on across a push: mode keep) and without (a push waits for them: mode wait). The
rules are those of the service, see staleness_run.py. Use is of the whole run, from its first second; ages are of the groups trained.
Dropped as too old are mostly groups with long replies, so that a tight bound also changes what is trained on.

Your own times: a JSON file of cases as `--json` writes them under "cases". Reference: ROLL Flash reports up to 2.24 times the
synchronous throughput on RLVR tasks and 2.72 on agentic ones, on the same number of GPUs (Lu et al., arXiv:2510.11345).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.staleness_engines import Speed
from benchmarks.staleness_run import Machines, Mode, Outcome, Work, simulate
from examples.demo.ages import mean_age, shares_of

PUBLISHED = {"RLVR": 2.24, "agentic": 2.72}
"""Speed-ups of ROLL Flash over its synchronous baseline, arXiv:2510.11345, abstract."""
BOUNDS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """`kind` says which published speed-up is its reference."""

    name: str
    kind: str
    source: str
    machines: Machines
    work: Work


MEASURED = """engine: vLLM 0.32 on two CPU cores, a model of a million parameters in float32: 142 tokens/s for one reply, 1,000 for 16,
0.1 s for a push; trainer: forward, backward and AdamW of that model, CPU seconds of steps of 256 to 4,096 tokens"""
ASSUMED = """not measured: decoding bound by memory (20 ms a token, 0.1 ms more for each further reply of 64), and a trainer that takes
a third of a synchronous step or less (rollouts are said to take over 70 %: ROLL Flash, section 1)"""

CPU = Machines(2, 1, Speed(0.0064, 0.0006, 16), 64, 1.14, 0.00029, 0.1)
GPU = Machines(8, 4, Speed(0.02, 0.0001, 64), 768, 10.0, 0.0003, 2.0)
RLVR = Work(32, 8, 1, 2000, 1.0, 30000)
AGENTIC = Work(32, 8, 8, 300, 0.8, 8000, 5.0, 1.2)
CASES = (
    Case("CPU, RLVR", "RLVR", MEASURED, CPU, Work(8, 8, 1, 400, 1.0, 8000)),
    Case("CPU, agentic", "agentic", MEASURED, CPU, Work(8, 8, 6, 60, 0.8, 2000, 1.0, 1.2)),
    Case("GPU (assumed), RLVR", "RLVR", ASSUMED, GPU, RLVR),
    Case("GPU (assumed), agentic", "agentic", ASSUMED, replace(GPU, train_token_seconds=0.0001), AGENTIC),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One line: a way to run, over all seeds. `speed_up` is over synchronous on the same machines kept apart, `shared_speed_up` over
    synchronous on shared ones. `dropped`: share of the sampled tokens that were dropped as too old."""

    way: str
    bound: int | None
    steps_per_hour: float
    speed_up: float
    shared_speed_up: float
    engine_use: float
    engine_busy: float
    trainer_use: float
    dropped: float
    staleness: dict[int, int]

    @property
    def mean_staleness(self) -> float:
        return mean_age(self.staleness)


def compare(case: Case, bounds: Sequence[int], steps: int, seeds: int) -> list[Shown]:
    def runs(mode: Mode, bound: int, machines: Machines) -> list[Outcome]:
        return [simulate(mode, bound, case.work, machines, steps=steps, seed=seed) for seed in range(seeds)]

    apart, shared = runs("synchronous", 0, case.machines), runs("synchronous", 0, case.machines.shared())
    bases = _pace(apart), _pace(shared)
    found = [_shown("synchronous", None, apart, bases), _shown("synchronous, shared machines", None, shared, bases)]
    for mode, way in (("keep", "asynchronous, keep"), ("wait", "asynchronous, wait")):
        found += [_shown(way, bound, runs(mode, bound, case.machines), bases) for bound in bounds]  # type: ignore[arg-type]
    return found


def _pace(runs: Sequence[Outcome]) -> float:
    """Steps per hour."""
    return 3600 * sum(run.steps for run in runs) / sum(run.seconds for run in runs)


def _shown(way: str, bound: int | None, runs: Sequence[Outcome], bases: tuple[float, float]) -> Shown:
    seconds, pace = sum(run.seconds for run in runs), _pace(runs)

    def over_time(name: str) -> float:
        return float(sum(getattr(run, name) * run.seconds for run in runs) / seconds)

    trained, dropped = sum(run.tokens_trained for run in runs), sum(run.tokens_dropped for run in runs)
    ages = sum((Counter(run.staleness) for run in runs), Counter[int]())
    uses = (over_time("engine_use"), over_time("engine_busy"), over_time("trainer_use"))
    return Shown(
        way, bound, pace, pace / bases[0], pace / bases[1], *uses, dropped / (trained + dropped), dict(sorted(ages.items()))
    )


def table(case: Case, lines: Sequence[Shown]) -> Table:
    reference = f"published for {case.kind}: {PUBLISHED[case.kind]} x" if case.kind in PUBLISHED else ""
    made = Table(title=f"{case.name} ({reference})", caption=case.source, caption_justify="left")
    for name in (
        "way",
        "bound",
        "steps/h",
        "x sync",
        "x shared",
        "engines",
        "busy",
        "trainer",
        "dropped",
        "age",
        "ages of groups",
    ):
        made.add_column(name, justify="left" if name in ("way", "ages of groups") else "right")
    for line in lines:
        uses = [f"{share:.0%}" for share in (line.engine_use, line.engine_busy, line.trainer_use, line.dropped)]
        paces = (f"{line.steps_per_hour:.1f}", f"{line.speed_up:.2f}", f"{line.shared_speed_up:.2f}")
        bound = "" if line.bound is None else str(line.bound)
        made.add_row(line.way, bound, *paces, *uses, f"{line.mean_staleness:.2f}", shares_of(line.staleness))
    return made


def plot(results: Sequence[tuple[Case, Sequence[Shown]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(results), figsize=(4.2 * len(results), 7), squeeze=False, layout="constrained")
    for column, (case, lines) in enumerate(results):
        _plot_case(axes[0][column], axes[1][column], case, lines)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot_case(above: Any, below: Any, case: Case, lines: Sequence[Shown]) -> None:
    for way, style in (("asynchronous, keep", "o-"), ("asynchronous, wait", "s--")):
        mine = [line for line in lines if line.way == way]
        bounds = [line.bound for line in mine]
        above.plot(bounds, [line.speed_up for line in mine], style, label=way.removeprefix("asynchronous, "))
        below.plot(bounds, [line.engine_use for line in mine], style, label=f"engines, {way.removeprefix('asynchronous, ')}")
        below.plot(
            bounds,
            [line.trainer_use for line in mine],
            style,
            alpha=0.5,
            label=f"trainer, {way.removeprefix('asynchronous, ')}",
        )
    shared = next(line for line in lines if line.way == "synchronous, shared machines")
    above.axhline(shared.speed_up, color="grey", linestyle="-.", label="synchronous, shared machines")
    if case.kind in PUBLISHED:
        above.axhline(PUBLISHED[case.kind], color="black", linestyle=":", label=f"published, {case.kind}")
    above.set(title=case.name, ylabel="times the steps of synchronous")
    below.set(xlabel="most versions behind", ylabel="use", ylim=(0, 1.05))
    for axis in (above, below):
        axis.legend(fontsize=7)


def cases_in(path: Path) -> list[Case]:
    """The cases of a JSON file: {"cases": [{name, kind, source, machines, work}]}. Raises TypeError for fields it does not know."""
    found = []
    for case in json.loads(path.read_text())["cases"]:
        machines = case["machines"] | {"speed": Speed(**case["machines"]["speed"])}
        found.append(Case(**(case | {"machines": Machines(**machines), "work": Work(**case["work"])})))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=Path, help="JSON file of cases; default: the built-in ones")
    parser.add_argument("--bounds", default=",".join(map(str, BOUNDS)), help="bounds on staleness, comma-separated")
    parser.add_argument("--steps", type=int, default=60, help="training steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--png", type=Path, help="where to draw them")
    options = parser.parse_args(argv)
    console = Console(width=150)
    bounds = [int(bound) for bound in options.bounds.split(",")]
    results = []
    for case in cases_in(options.times) if options.times else CASES:
        results.append((case, compare(case, bounds, options.steps, options.seeds)))
        console.print(table(*results[-1]))
    if options.json:
        options.json.write_text(json.dumps(_as_json(results, options.steps, options.seeds), indent=2) + "\n")
    if options.png:
        plot(results, options.png)


def _as_json(results: Sequence[tuple[Case, Sequence[Shown]]], steps: int, seeds: int) -> dict[str, Any]:
    lines = {case.name: [asdict(line) | {"mean_staleness": line.mean_staleness} for line in shown] for case, shown in results}
    published = {"speed_ups": PUBLISHED, "source": "ROLL Flash, Lu et al., arXiv:2510.11345"}
    cases = [asdict(case) for case, _ in results]
    return {"steps": steps, "seeds": seeds, "published": published, "cases": cases, "results": lines}


if __name__ == "__main__":
    main()
