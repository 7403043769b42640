"""Tables that never truncate a cell, because people copy ids and paths out of them and programs read them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cli.feedback import remove_controls
from contract.attempts import ENDED, Status

PIPE_WIDTH = 1000


def standard_output() -> Console:
    """As wide as the terminal. Without a terminal and without COLUMNS, wide enough for one line per table row."""
    return Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH)


def make_table(*columns: str | Column) -> Table:
    """A table that wraps a cell instead of truncating it."""
    return Table(*(Column(column, overflow="fold") if isinstance(column, str) else column for column in columns))


def as_cell(value: Any) -> str:
    """The value as it is, "" for None: what an agent printed or an engine answered is no markup, and must not steer the terminal."""
    return "" if value is None else escape(remove_controls(str(value)))


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_listing(
    found: list[dict[str, Any]], make: Callable[[list[dict[str, Any]]], Table], as_json: bool, cut_at: int | None = None
) -> None:
    """Print the objects as a JSON array, or as the table that `make` makes of them. `cut_at`: the limit that left some out."""
    if as_json:
        print_json(found)
    else:
        standard_output().print(make(found))
    if cut_at is not None:
        typer.echo(f"There are more: raise --limit above {cut_at}.", err=True)


def format_time(at: float) -> str:
    """Epoch seconds as local time."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def count_ended(task: dict[str, Any]) -> int:
    """The number of the task's rollouts that have ended."""
    return sum(task["rollouts"].get(status, 0) for status in ENDED)


def tasks_table(tasks: Iterable[dict[str, Any]]) -> Table:
    table = make_table(
        Column("task", no_wrap=True, overflow="fold"), "status", "ended", "usable", "rollouts", "harness", "priority", "created"
    )
    for task in tasks:
        table.add_row(
            as_cell(task["task_id"]),
            task["status"],
            f"{count_ended(task)}/{task['num_samples']}",
            str(task["usable"]),
            _counts(task["rollouts"]),
            as_cell(task["harness"]),
            str(task["priority"]),
            format_time(task["created_at"]),
        )
    return table


def rollouts_table(rollouts: Iterable[dict[str, Any]]) -> Table:
    table = make_table("rollout", "status", "attempt", "node", "session", "calls", "exit", "reward", "logs")
    for rollout in rollouts:
        verdict = rollout["verdict"] or {}
        table.add_row(
            str(rollout["index"]),
            rollout["status"],
            str(rollout["attempt"]),
            as_cell(rollout["node"]),
            as_cell(rollout["session_id"]),
            as_cell(rollout["calls"]),
            as_cell(rollout["exit_code"]),
            as_cell(verdict.get("reward")),
            as_cell(rollout["logs"]),
        )
    return table


def failures_table(rollouts: Iterable[dict[str, Any]]) -> Table:
    table = make_table("rollout", "failure", "message", "where to look")
    for rollout in rollouts:
        final = (rollout["verdict"] or {}).get("failure")
        for failure in [*rollout["failures"], *([final] if final else [])]:
            told = (as_cell(failure[name]) for name in ("failure", "message", "look"))
            table.add_row(str(rollout["index"]), *told)
    return table


def callback_line(callback: dict[str, Any]) -> str:
    if callback["delivered_at"] is not None:
        return f"callback delivered to {callback['url']} at {format_time(callback['delivered_at'])}"
    if not callback["tries"]:
        return f"callback to {callback['url']} when the task ends"
    again = f"next try at {format_time(callback['next_try_at'])}" if callback["next_try_at"] else "no further try"
    return f"callback to {callback['url']} failed {callback['tries']} times ({callback['last_error']}); {again}"


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts.get(status))
