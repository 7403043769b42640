"""What a run of many agents needs, calculated from measured costs: proxies, Redis, network, and what gives out first.

    python -m benchmarks.capacity                              # the table for 10,000, 100,000 and 1,000,000 sessions at once
    python -m benchmarks.capacity --sessions 2000 --turns 100 --context 128000
    python -m benchmarks.capacity --inputs                     # every figure it starts from, and where that comes from
    python -m benchmarks.capacity --write                      # writes the table into docs/deploy.md

`make bench ONLY=sessions,store_load` measures what it starts from, and writes the table. Figures of other code than that in the checkout
are refused.

A run is a number of sessions that go on at the same time, each of so many turns until its context is full. Every figure below can be
given as a flag instead. What it starts from is read from `benchmarks/results`; machines and limits are assumptions, and say so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.needs import Costs, Need, Run, end, need
from benchmarks.processes import ROOT
from benchmarks.results import RESULTS
from benchmarks.tables import describe_measurement, outdated, refusal

PAGE = ROOT / "docs" / "deploy.md"
MARKS = ("<!-- capacity: python -m benchmarks.capacity --write -->\n", "<!-- end of capacity -->")
SCALES = (10_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class Input:
    """A measured figure and where it was found."""

    value: float
    source: str


def _sessions_json(found: Mapping[str, Any]) -> dict[str, float]:
    """A call's CPU at the end of sessions of several lengths, as a straight line over their tokens; and the body's bytes."""
    measured = found["sessions"]
    slope, fixed = np.polyfit([item["tokens"] / 1000 for item in measured], [item["own_cpu_ms_last"] for item in measured], 1)
    longest = max(measured, key=lambda item: item["tokens"])
    return {
        "cpu_ms_per_call": max(0.0, float(fixed)),
        "cpu_ms_per_thousand_tokens": float(slope),
        "text_bytes_per_token": longest["body_bytes_last"] / longest["tokens"],
    }


def _store_json(found: Mapping[str, Any]) -> dict[str, float]:
    shares = found["shares"]
    cpu, memory, file = shares["cpu_seconds"], shares["memory_bytes"], shares["file_bytes"]
    wire = {what: shares["bytes_in"][what] + shares["bytes_out"][what] for what in ("call", "token")}
    return {
        "redis_cpu_ms_per_session": cpu["session"] * 1000,
        "redis_cpu_ms_per_call": cpu["call"] * 1000,
        "redis_cpu_ms_per_thousand_tokens": cpu["token"] * 1_000_000,
        "redis_bytes_per_session": memory["session"],
        "redis_bytes_per_call": memory["call"],
        "redis_bytes_per_token": memory["token"],
        "redis_wire_bytes_per_call": wire["call"],
        "redis_wire_bytes_per_token": wire["token"],
        "file_bytes_per_call": file["call"],
        "file_bytes_per_token": file["token"],
    }


MEASURED: Mapping[str, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    "sessions.json": _sessions_json,
    "store_load.json": _store_json,
}
"""By file of results, the figures taken from it."""


def inputs(results: Path = RESULTS, given: Mapping[str, float] | None = None) -> dict[str, Input]:
    """Every field of `Costs`, given ones first. Raises SystemExit, naming the file, where a figure is neither measured nor given."""
    found: dict[str, Input] = {}
    for field in fields(Costs):
        if isinstance(field.default, (int, float)):
            found[field.name] = Input(field.default, "assumed")
    missing = []
    for name, read in MEASURED.items():
        if (results / name).is_file():
            taken = read(json.loads((results / name).read_text()))
            found |= {figure: Input(value, f"benchmarks/results/{name}") for figure, value in taken.items()}
        else:
            missing.append(name)
    found |= {name: Input(value, "given") for name, value in (given or {}).items()}
    lacking = [field.name for field in fields(Costs) if field.name not in found]
    if lacking:
        raise SystemExit(f"not measured ({', '.join(missing)} missing in {results}) and not given: {', '.join(lacking)}")
    return found


def costs(found: Mapping[str, Input]) -> Costs:
    made: dict[str, Any] = {name: one.value for name, one in found.items()}
    return Costs(**made)


COLUMNS: Sequence[tuple[str, Callable[[Need], str]]] = (
    ("sessions at once", lambda need: f"{need.run.sessions:,}"),
    ("calls/s", lambda need: f"{need.run.calls_per_second:,.0f}"),
    ("proxy processes", lambda need: f"{need.processes:,}"),
    ("machines", lambda need: f"{need.machines:,}"),
    ("harness side", lambda need: _gbit(need.harness_gbit)),
    ("engine side", lambda need: _gbit(need.engine_gbit)),
    ("Redis memory", lambda need: f"{need.redis_gib:,.0f} GiB"),
    ("Redis primaries", lambda need: f"{need.primaries:,}"),
    ("Redis traffic", lambda need: f"{need.redis_mb:,.0f} MB/s"),
    ("written to disk", lambda need: f"{need.file_mb:,.0f} MB/s"),
    ("to the trainer", lambda need: _gbit(need.trainer_gbit)),
    ("first bottleneck", lambda need: need.first_bottleneck),
)


def _gbit(value: float) -> str:
    return f"{value:,.2g} Gbit/s" if value < 10 else f"{value:,.0f} Gbit/s"


def table(needs: Iterable[Need]) -> str:
    """As markdown."""
    lines = [[name for name, _ in COLUMNS], ["---:"] * (len(COLUMNS) - 1) + ["---"]]
    lines += [[show(each) for _, show in COLUMNS] for each in needs]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def told(run: Run, cost: Costs, scales: Sequence[int]) -> str:
    """The table and what it means, as markdown."""
    needs = [need(replace(run, sessions=sessions), cost) for sessions in scales]
    last = end(run, cost)
    about = (
        f"Sessions of {run.turns} turns that end at {run.context_tokens:,} tokens, {run.sampled_tokens} of them sampled per turn, "
        f"one call each {run.turn_seconds:g} s; {cost.kept:g} sessions in the store for each that runs; machines of {cost.cores} cores "
        f"and {cost.nic_gbit:g} Gbit/s; primaries of {cost.primary_gib:g} GiB."
    )
    ends = f"The design ends at about {_round(last.sessions):,} sessions at once: {last.reason}. {last.remedy}"
    return f"{about}\n\n{table(needs)}\n{ends}\n"


def _round(number: int) -> int:
    """To two digits: no more is known."""
    digits = max(0, len(str(number)) - 2)
    unit: int = 10**digits
    return number // unit * unit


def page_text() -> str:
    """What the page says between its marks: the table, and what its figures were measured on."""
    measured = (describe_measurement(name, json.loads((RESULTS / name).read_text())["machine"]) for name in MEASURED)
    return "\n".join((told(Run(1), costs(inputs()), SCALES), *measured))


def write() -> dict[str, str]:
    """Writes the table into the page; returns why it was not written, by section, where results are of other code."""
    why = outdated([name.removesuffix(".json") for name in MEASURED], RESULTS)
    if not why:
        PAGE.write_text(fill_page(PAGE.read_text(), page_text()))
        print(f"written: {PAGE.relative_to(ROOT)}")
    return why


def fill_page(page: str, text: str) -> str:
    """The page with `text` between its marks. Raises SystemExit if they are missing."""
    before, begin, rest = page.partition(MARKS[0])
    _, finish, after = rest.partition(MARKS[1])
    if not begin or not finish:
        raise SystemExit(f"{PAGE.name} has no {MARKS[0].strip()} and {MARKS[1]}")
    return f"{before}{begin}\n{text}\n{finish}{after}"


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=_numbers, default=SCALES, metavar="N,N,...", help="sessions at once")
    for field in fields(Run)[1:]:
        kind = float if isinstance(field.default, float) else int
        flag = "--" + field.name.removesuffix("_tokens").replace("_", "-")
        parser.add_argument(
            flag, dest=field.name, type=kind, default=field.default, metavar="N", help=f"default: {field.default}"
        )
    for field in fields(Costs):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, dest=field.name, type=float, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the measured figures")
    parser.add_argument("--inputs", action="store_true", help="show every figure, its flag and its source")
    parser.add_argument("--write", action="store_true", help="write the table into docs/deploy.md")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _shown_inputs(found: Mapping[str, Input]) -> Iterator[str]:
    for name, one in found.items():
        yield f"--{name.replace('_', '-'):36}{one.value:>14,.4g}  {one.source}"


def main() -> None:
    options = _flags().parse_args()
    given = {field.name: getattr(options, field.name) for field in fields(Costs) if getattr(options, field.name) is not None}
    found = inputs(options.results, given)
    run = Run(1, **{field.name: getattr(options, field.name) for field in fields(Run)[1:]})
    if options.inputs:
        print("\n".join(_shown_inputs(found)))
        return
    if options.write:
        if why := write():
            raise SystemExit(refusal(why))
        return
    print(told(run, costs(found), options.sessions))


if __name__ == "__main__":
    main()
