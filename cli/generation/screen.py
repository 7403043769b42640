"""How a generation stands, on stderr: a table that moves on a terminal, a line for each task that ended elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from cli.generation.attempts import Way

SHOWN = 15
"""Tasks in the table, those under way first; what all of them came to stands below."""
BESIDE = 8
"""Lines of the terminal that are not for tasks: the table's head and frame, the sentence below it."""
MOST_CHARACTERS = 300
"""Of the message of a failure."""
WIDE = 90
"""Characters of a line from which on there is room for every column."""
SPARED = ("round", "tokens")
"""Columns that narrower lines do without."""


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
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def show(self, ways: Sequence[Way]) -> None:
        if self._live is not None:
            rows = max(1, min(SHOWN, self._console.height - BESIDE))
            shown = table(ways, rows, wide=self._console.width >= WIDE)
            self._live.update(Group(shown, Text(Totals(ways).sentence())), refresh=True)

    def told(self, way: Way) -> None:
        if self._live is None:
            self.say(sentence_of(way))


class Totals:
    """Over all tasks of the file."""

    def __init__(self, ways: Sequence[Way]) -> None:
        attempts = [attempt for way in ways for attempt in way.attempts]
        self.tasks = len(ways)
        self.done = sum(way.done for way in ways)
        self.satisfied = sum(bool(way.accepted) for way in ways)
        self.attempts = len(attempts)
        self.accepted = sum(attempt.decision.accepted for attempt in attempts)
        self.kept = sum(len(way.kept) for way in ways)
        self.tokens = sum(attempt.values["tokens"] or 0 for attempt in attempts)
        self.rewards = [attempt.values["reward"] for attempt in attempts if attempt.values["reward"] is not None]

    def sentence(self) -> str:
        mean = f", mean reward {sum(self.rewards) / len(self.rewards):.3g}" if self.rewards else ""
        return (
            f"{self.done} of {self.tasks} tasks ended, {self.satisfied} with an accepted attempt; {self.attempts} attempts, "
            f"{self.accepted} accepted, {self.kept} kept{mean}, {self.tokens} tokens"
        )


def table(ways: Sequence[Way], rows: int = SHOWN, *, wide: bool = True) -> Table:
    """A line each for the first `rows` tasks. Where it is not `wide`, without the columns that can be done without."""
    names = ["task", "round", "under way", "attempts", "accepted", "rewards", "tokens"]
    if not wide:
        names = [name for name in names if name not in SPARED]
    made = Table(*(Column(name, no_wrap=True) for name in names))
    for way in sorted(ways, key=lambda way: (way.done, not way.attempts))[:rows]:
        under_way = " ".join(f"{count} {status}" for status, count in way.rollouts.items() if count)
        totals = Totals([way])
        cells = {
            "task": escape(way.given.id),
            "round": str(way.round),
            "under way": "" if way.done else under_way,
            "attempts": str(totals.attempts),
            "accepted": str(totals.accepted),
            "rewards": rewards_of(way),
            "tokens": str(totals.tokens),
        }
        made.add_row(*(cells[name] for name in names))
    return made


def sentence_of(way: Way) -> str:
    totals = Totals([way])
    rewards = rewards_of(way)
    said = f"task {way.given.id}: {totals.accepted} of {totals.attempts} attempts accepted, {totals.kept} kept, {totals.tokens} tokens"
    failed = ", ".join(f"{len(found)} {name}" for name, found in failures([way]).items())
    return said + (f", rewards {rewards}" if rewards else "") + (f", {failed}" if failed else "")


def failures(ways: Sequence[Way]) -> dict[str, list[dict[str, str]]]:
    """What failed, by its class."""
    found: dict[str, list[dict[str, str]]] = {}
    for failure in (attempt.failure for way in ways for attempt in way.attempts):
        if failure is not None:
            found.setdefault(failure["failure"], []).append(failure)
    return found


def failure_lines(ways: Sequence[Way]) -> list[str]:
    """One for each class: how many, and of the last of them what it was and where to look."""
    lines = []
    for name, found in failures(ways).items():
        count = f"{len(found)} {'attempt' if len(found) == 1 else 'attempts'} failed as {name}"
        message = " ".join(found[-1]["message"].split())
        lines.append(f"{count}: {message[:MOST_CHARACTERS]} (see {found[-1]['look']})")
    return lines


def rewards_of(way: Way) -> str:
    rewards = [f"{attempt.values['reward']:g}" for attempt in way.attempts if attempt.values["reward"] is not None]
    return " ".join(rewards if len(rewards) <= 8 else [*rewards[:8], "…"])
