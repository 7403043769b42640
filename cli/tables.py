"""Tables that lose nothing: the ids and folders in them are there to be copied, or to be read by another program."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from rollout.attempts import ENDED, Status

ANY_WIDTH = 1000
"""Characters of a line that no screen has to hold."""


def standard_output() -> Console:
    """As wide as the terminal; where it is none and COLUMNS says nothing, a row of a table is one line, however long."""
    return Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else ANY_WIDTH)


def whole_table(*columns: str | Column) -> Table:
    """What has no room in its column goes on in the line below it."""
    return Table(*(Column(column, overflow="fold") if isinstance(column, str) else column for column in columns))


# Tasks, their rollouts and what failed, as tables.


def ended(task: dict[str, Any]) -> int:
    """How many of its rollouts have ended."""
    return sum(task["rollouts"].get(status, 0) for status in ENDED)


def tasks_table(tasks: Iterable[dict[str, Any]]) -> Table:
    # An id that is cut cannot be copied.
    table = whole_table(
        Column("task", no_wrap=True, overflow="fold"), "status", "ended", "usable", "rollouts", "harness", "priority", "created"
    )
    for task in tasks:
        table.add_row(
            escape(task["task_id"]),
            task["status"],
            f"{ended(task)}/{task['num_samples']}",
            str(task["usable"]),
            _counts(task["rollouts"]),
            escape(task["harness"]),
            str(task["priority"]),
            _when(task["created_at"]),
        )
    return table


def rollouts_table(rollouts: Iterable[dict[str, Any]]) -> Table:
    table = whole_table("rollout", "status", "attempt", "node", "session", "calls", "exit", "reward", "logs")
    for rollout in rollouts:
        verdict = rollout["verdict"] or {}
        table.add_row(
            str(rollout["index"]),
            rollout["status"],
            str(rollout["attempt"]),
            _text(rollout["node"]),
            _text(rollout["session_id"]),
            _text(rollout["calls"]),
            _text(rollout["exit_code"]),
            _text(verdict.get("reward")),
            _text(rollout["logs"]),
        )
    return table


def failures_table(rollouts: Iterable[dict[str, Any]]) -> Table:
    table = whole_table("rollout", "failure", "message", "where to look")
    for rollout in rollouts:
        final = (rollout["verdict"] or {}).get("failure")
        for failure in [*rollout["failures"], *([final] if final else [])]:
            table.add_row(str(rollout["index"]), failure["failure"], escape(failure["message"]), escape(failure["look"]))
    return table


def callback_line(callback: dict[str, Any]) -> str:
    if callback["delivered_at"] is not None:
        return f"callback delivered to {callback['url']} at {_when(callback['delivered_at'])}"
    if not callback["tries"]:
        return f"callback to {callback['url']} at the task's end"
    again = f"tried again at {_when(callback['next_try_at'])}" if callback["next_try_at"] else "not tried again"
    return f"callback to {callback['url']} failed {callback['tries']} times ({callback['last_error']}); {again}"


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts.get(status))


def _when(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _text(value: Any) -> str:
    return "" if value is None else escape(str(value))
