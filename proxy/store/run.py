"""The numbers of runs: what closed sessions add up to, per run, policy and label, over weight versions and over time.

Every session that enters a group is counted by the script that fills the group, in the same atomic step: the sums are exact whatever
crashes, a repeated close counts once, and a corrected reward replaces the earlier one. Groups are counted when they are decided.

The sums stand in *cells*. A curve has a cell per interval of its axis, and keeps the newest:

    version   1 weight version      500 cells         minute    60 s     360 cells: 6 hours
    versions  20 weight versions    500 cells         quarter   900 s    672 cells: a week
    all       everything            1 cell            hours     6 h      730 cells: half a year

A session costs one update of a cell per axis, about 0.06 ms of Redis, and a group as much again; what it added, about 270 bytes, is
kept until its group is acknowledged. A cell takes 250 to 400 bytes, so a policy and label with all its cells full takes about 1.2 MB.
There are at most 200 runs, of 32 policies and labels each and of 320 together: further runs and labels share `(other)`. Nothing expires:
retention of sessions leaves these sums. Groups of each run are counted by state and cause, by the script that moves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from contract.sessions import DEFAULT_RUN
from proxy.store.keys import pack
from reconstruct.reasons import REASONS, name_reason

Axis = Literal["version", "versions", "minute", "quarter", "hours", "all"]
WIDTHS: Mapping[str, int] = {"version": 1, "versions": 20, "minute": 60, "quarter": 900, "hours": 21600, "all": 0}
"""Of a cell: weight versions, or seconds. `scripts/_run.lua` says how many cells are kept."""
OVER_VERSIONS: tuple[Axis, ...] = ("version", "versions")
OVER_TIME: tuple[Axis, ...] = ("minute", "quarter", "hours")

MOST_LABEL_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What one policy did in a closed session. `version`: the oldest of its tokens', None if it sampled none; `behind`: how many versions
    the policy's weights had moved on since when the session was counted. `truncated`: the reply that ends a trained row was cut short."""

    closed_at: float
    status: str
    reward: float | None
    solved: bool
    seconds: float
    policy: str = ""
    label: str = ""
    version: int | None = None
    behind: int = 0
    calls: int = 0
    invalid_tool_calls: int = 0
    sampled_tokens: int = 0
    truncated: bool = False
    run: str = DEFAULT_RUN
    exported_tokens: int = 0
    quarantined: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By reason: calls and tokens."""
    incomplete: bool = False

    @property
    def cells(self) -> dict[str, int]:
        """The start of its cell on each axis."""
        starts = {"all": 0} | {axis: int(self.closed_at) // WIDTHS[axis] * WIDTHS[axis] for axis in OVER_TIME}
        if self.version is not None:
            starts |= {axis: self.version // WIDTHS[axis] * WIDTHS[axis] for axis in OVER_VERSIONS}
        return starts

    @property
    def numbers(self) -> dict[str, float]:
        """What it adds to a cell; zeros are left out."""
        given: dict[str, float] = {
            "rollouts": 1,
            self.status: 1,
            "truncated": self.truncated,
            "calls": self.calls,
            "invalid_tool_calls": self.invalid_tool_calls,
            "sampled_tokens": self.sampled_tokens,
            "seconds": self.seconds,
            "exported_tokens": self.exported_tokens,
            "incomplete": self.incomplete,
        }
        for reason, (calls, tokens) in self.quarantined.items():
            name = name_reason(reason)
            given[CALLS + name] = given.get(CALLS + name, 0) + calls
            given[TOKENS + name] = given.get(TOKENS + name, 0) + tokens
        if self.version is not None:
            given |= {"versioned": 1, "behind": self.behind}
        if self.reward is not None:
            given |= {"rewarded": 1, "reward": self.reward, "solved": self.solved, f"{REWARD}{round_reward(self.reward)}": 1}
        return {name: float(number) if isinstance(number, float) else int(number) for name, number in given.items() if number}

    def encode(self) -> dict[str, Any]:
        """As `scripts/_run.lua` takes it."""
        return {"run": self.run, "policy": self.policy, "label": self.label, "cells": self.cells, "numbers": self.numbers}


def encode_outcomes(outcomes: Iterable[PolicyOutcome]) -> bytes:
    return pack([outcome.encode() for outcome in outcomes])


REWARD = "r:"
"""Before a rounded reward, the name of the number of sessions that had it."""
CALLS, TOKENS = "c:", "t:"
"""Before a reason of quarantine, the names of the numbers of its calls and tokens."""


def round_reward(reward: float) -> str:
    """To two significant digits, which bounds the number of different rewards in a cell: quantiles are exact to within 5 %."""
    return f"{reward:.2g}" if 1e-6 <= abs(reward) < 1e12 else "0" if abs(reward) < 1 else f"{math.copysign(1e12, reward):.2g}"


def choose_label(metadata: Mapping[str, Any], key: str) -> str:
    """The label of a session: the text under `key` of its metadata, "" where there is none."""
    given = metadata.get(key)
    text = str(given) if isinstance(given, str | int) else ""
    return "".join(sign if sign.isprintable() else " " for sign in text[:MOST_LABEL_CHARACTERS])


@dataclass(frozen=True, slots=True)
class Point:
    """The sums of a cell that begins at `start`, a weight version or epoch seconds. Means and shares are None where nothing is counted."""

    start: int
    sums: Mapping[str, float] = field(default_factory=dict)

    def count(self, name: str) -> float:
        return self.sums.get(name, 0)

    def _divide(self, name: str, by: str) -> float | None:
        return self.count(name) / self.count(by) if self.count(by) > 0 else None

    @property
    def rollouts(self) -> int:
        return int(self.count("rollouts"))

    @property
    def reward(self) -> float | None:
        """The mean."""
        return self._divide("reward", "rewarded")

    @property
    def spread(self) -> float:
        """The standard deviation of the rewards, as rounded."""
        counted = [(reward, number) for reward, number in self.rewards if number > 0]
        many = sum(number for _, number in counted)
        mean = sum(reward * number for reward, number in counted) / many if many else 0.0
        return math.sqrt(sum(number * (reward - mean) ** 2 for reward, number in counted) / many) if many else 0.0

    @property
    def solved(self) -> float | None:
        """The share of those with a reward."""
        return self._divide("solved", "rewarded")

    @property
    def truncated(self) -> float | None:
        return self._divide("truncated", "rollouts")

    @property
    def timed_out(self) -> float | None:
        return self._divide("timeout", "rollouts")

    @property
    def failed(self) -> float | None:
        """The share of failed and cancelled ones."""
        ended = self.count("failed") + self.count("cancelled")
        return ended / self.rollouts if self.rollouts > 0 else None

    @property
    def zero_rewards(self) -> float | None:
        """The share of rewards that are 0."""
        return self.count(f"{REWARD}0") / self.count("rewarded") if self.count("rewarded") > 0 else None

    @property
    def incomplete(self) -> float | None:
        """The share of rollouts with a dangling or damaged call, or whose outcome depends on a quarantined one."""
        return self._divide("incomplete", "rollouts")

    @property
    def lost(self) -> float | None:
        """The share of sampled tokens that are in quarantine, but not by choice."""
        lost = sum(self.count(TOKENS + name) for name, reason in REASONS.items() if not reason.chosen)
        return lost / self.count("sampled_tokens") if self.count("sampled_tokens") > 0 else None

    @property
    def quarantined(self) -> dict[str, tuple[int, int]]:
        """By reason, the most tokens first: calls and tokens."""
        found = {reason: (int(self.count(CALLS + reason)), int(self.count(TOKENS + reason))) for reason in REASONS}
        return dict(sorted(((reason, each) for reason, each in found.items() if each[0] > 0), key=lambda item: -item[1][1]))

    @property
    def invalid_tool_calls(self) -> float | None:
        """The share of calls whose reply has a tool call that cannot be parsed."""
        return self._divide("invalid_tool_calls", "calls")

    @property
    def equal_groups(self) -> float | None:
        """The share of decided groups of two or more whose rewards are all equal."""
        return self._divide("equal_groups", "groups")

    @property
    def tokens(self) -> float | None:
        """Sampled, per rollout."""
        return self._divide("sampled_tokens", "rollouts")

    @property
    def exported_tokens(self) -> float | None:
        """Per rollout."""
        return self._divide("exported_tokens", "rollouts")

    @property
    def calls(self) -> float | None:
        """Per rollout."""
        return self._divide("calls", "rollouts")

    @property
    def seconds(self) -> float | None:
        """From open to close, per rollout."""
        return self._divide("seconds", "rollouts")

    @property
    def staleness(self) -> float | None:
        """Versions behind when they were closed, on average."""
        return self._divide("behind", "versioned")

    @property
    def rewards(self) -> list[tuple[float, float]]:
        """Each rounded reward and how many had it, ascending."""
        return sorted((float(name[len(REWARD) :]), number) for name, number in self.sums.items() if name.startswith(REWARD))

    def quantile(self, share: float) -> float | None:
        """The reward that this share of the rollouts does not exceed, to two digits."""
        left = share * sum(number for _, number in self.rewards)
        for reward, number in self.rewards:
            left -= number
            if left <= 1e-9 and number:
                return reward
        return None


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one run, policy and label on an axis, ascending."""

    policy: str
    label: str
    points: Sequence[Point]
    run: str = DEFAULT_RUN


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run. `since` and `at`: when a session of it was first and last counted, in epoch seconds. `ended_at`: when it was declared over.
    `groups`: how many are in each state now, by state and cause; the cause says why a group was dropped or died, "" of the others."""

    run: str
    since: float
    at: float
    ended_at: float | None = None
    hidden: bool = False
    groups: Mapping[tuple[str, str], int] = field(default_factory=dict)


CAUSES: Mapping[str, str] = {
    "incomplete": "Members failed or never closed, and no others came.",
    "never_acknowledged": "It was leased as often as allowed, and never acknowledged.",
    "undeliverable": "Its rows could not be built when it was leased.",
    "equal_rewards": "All its rewards are equal, and its rule drops such groups.",
    "too_few_usable": "Too few of its members are usable for its rule.",
    "stale": "Its tokens were older than the lease allowed, and the service drops such groups.",
    "discarded": "Somebody dropped its dead letter.",
    "deleted": "Sessions of it were deleted.",
}
"""Why a group is dropped or dead."""


def merge(curves: Iterable[Curve]) -> list[Point]:
    """The points of several curves of one axis as one."""
    merged: dict[int, dict[str, float]] = {}
    for curve in curves:
        for point in curve.points:
            sums = merged.get(point.start)
            if sums is None:
                merged[point.start] = dict(point.sums)
                continue
            for name, number in point.sums.items():
                sums[name] = sums.get(name, 0) + number
    return [Point(start, merged[start]) for start in sorted(merged)]
