"""The progress of a generation on stderr: a live table on a terminal, otherwise one line for each input that is done."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from cli.checks import Check, print_checks
from cli.feedback import remove_controls
from cli.generation.attempts import Progress
from cli.refusal import CommandError

MAX_ROWS = 15
OTHER_LINES = 8
"""Terminal lines that the table's frame and the summary take."""
MAX_FAILURE_CHARACTERS = 300
WIDE = 90
"""Terminal columns from which every column of the table fits."""


class Screen:
    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, sentence: str) -> None:
        self._console.print(remove_controls(sentence), markup=False, highlight=False, soft_wrap=True)

    def report_needs(self, checks: Sequence[Check]) -> None:
        """Raises `CommandError` if one is to be fixed."""
        print_checks(self._console, checks)
        if wrong := [check.about for check in checks if check.state == "fix"]:
            raise CommandError(f"nothing was started: fix {', '.join(dict.fromkeys(wrong))}")

    def show(self, progress: Sequence[Progress]) -> None:
        if self._live is not None:
            rows = max(1, min(MAX_ROWS, self._console.height - OTHER_LINES))
            table = make_table(progress, rows, wide=self._console.width >= WIDE)
            self._live.update(Group(table, Text(summarize(progress))), refresh=True)

    def report(self, done: Progress) -> None:
        if self._live is None:
            self.say(summarize_input(done))


def make_table(progress: Sequence[Progress], rows: int = MAX_ROWS, *, wide: bool = True) -> Table:
    """The first `rows` inputs, unfinished ones first. Unless `wide`, without the columns round and tokens."""
    names = ["task", "round", "in flight", "attempts", "accepted", "rewards", "tokens"]
    names = names if wide else [name for name in names if name not in ("round", "tokens")]
    table = Table(*(Column(name, no_wrap=True) for name in names))
    for each in sorted(progress, key=lambda each: (each.done, not each.attempts))[:rows]:
        in_flight = " ".join(f"{count} {status}" for status, count in each.rollouts.items() if count)
        cells = {
            "task": escape(each.input.id),
            "round": str(each.round),
            "in flight": "" if each.done else in_flight,
            "attempts": str(len(each.attempts)),
            "accepted": str(len(each.accepted)),
            "rewards": _list_rewards(each),
            "tokens": str(_sum_tokens([each])),
        }
        table.add_row(*(cells[name] for name in names))
    return table


def summarize(progress: Sequence[Progress]) -> str:
    """One sentence about all inputs."""
    rewards = [reward for each in progress for reward in _rewards(each)]
    mean = f", mean reward {sum(rewards) / len(rewards):.3g}" if rewards else ""
    return (
        f"{sum(each.done for each in progress)} of {len(progress)} tasks ended, "
        f"{sum(bool(each.accepted) for each in progress)} with an accepted attempt; "
        f"{sum(len(each.attempts) for each in progress)} attempts, {sum(len(each.accepted) for each in progress)} accepted, "
        f"{sum(len(each.kept) for each in progress)} kept{mean}, {_sum_tokens(progress)} tokens"
    )


def summarize_input(progress: Progress) -> str:
    counts = f"{len(progress.accepted)} of {len(progress.attempts)} attempts accepted, {len(progress.kept)} kept"
    rewards = f", rewards {listed}" if (listed := _list_rewards(progress)) else ""
    failed = "".join(f", {len(found)} {name}" for name, found in _group_failures([progress]).items())
    return f"task {progress.input.id}: {counts}, {_sum_tokens([progress])} tokens{rewards}{failed}"


def summarize_failures(progress: Sequence[Progress]) -> list[str]:
    """For each class of failure a line: how many, the last message, and where to look."""
    lines = []
    for name, found in _group_failures(progress).items():
        count = f"{len(found)} {'attempt' if len(found) == 1 else 'attempts'} failed as {name}"
        message = " ".join(found[-1]["message"].split())[:MAX_FAILURE_CHARACTERS]
        lines.append(f"{count}: {message} (see {found[-1]['look']})")
    return lines


def _group_failures(progress: Sequence[Progress]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for failure in (attempt.failure for each in progress for attempt in each.attempts):
        if failure is not None:
            found.setdefault(failure["failure"], []).append(failure)
    return found


def _list_rewards(progress: Progress) -> str:
    rewards = [f"{reward:g}" for reward in _rewards(progress)]
    return " ".join(rewards if len(rewards) <= 8 else [*rewards[:8], "…"])


def _rewards(progress: Progress) -> list[Any]:
    return [attempt.values["reward"] for attempt in progress.attempts if attempt.values["reward"] is not None]


def _sum_tokens(progress: Sequence[Progress]) -> int:
    return sum(attempt.values["tokens"] or 0 for each in progress for attempt in each.attempts)
