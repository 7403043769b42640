"""The acceptance table: how many of the attempts that `verbatim generate` made were rewarded, by kind of task and agent.

python -m examples.pretrained.acceptance demo-out-smollm2-pi/demonstrations
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ALL = "all"


def count_attempts(lines: Iterable[Mapping[str, Any]]) -> Mapping[tuple[str, str], Counter[str]]:
    """`attempts`, `solved` and `failed` by kind and agent; ALL stands for all kinds. `failed` attempts have no reward."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for line in lines:
        told = line["metadata"]
        found = {"attempts": 1, "solved": int((line["reward"] or 0) > 0), "failed": int(line["failure"] is not None)}
        for kind in (told["label"], ALL):
            counts.setdefault((kind, told["agent"]), Counter()).update(found)
    return counts


def read_attempts(folders: Sequence[Path]) -> list[Mapping[str, Any]]:
    return [json.loads(line) for folder in folders for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def show_acceptance(console: Console, folders: Sequence[Path]) -> None:
    counts = count_attempts(read_attempts(folders))
    agents = sorted({agent for _, agent in counts})
    table = Table(title="Rewarded attempts", title_justify="left")
    table.add_column("kind")
    for agent in agents:
        table.add_column(agent)
    for kind in [*sorted({kind for kind, _ in counts} - {ALL}), ALL]:
        table.add_row(kind, *(_spell(counts.get((kind, agent))) for agent in agents))
    console.print(table)


def _spell(count: Counter[str] | None) -> str:
    if count is None:
        return ""
    failed = f", {count['failed']} failed" if count["failed"] else ""
    return f"{count['solved']} of {count['attempts']} ({count['solved'] / count['attempts']:.0%}){failed}"


def main(folders: Annotated[list[Path], typer.Argument(help="What `verbatim generate` wrote.")]) -> None:
    """Print the table."""
    show_acceptance(Console(), folders)


if __name__ == "__main__":
    typer.run(main)
