"""Attempts of one task of the file: what is known of each that has ended, whether it is accepted, and which are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.generation.accept import NAMES, Accept, Decision
from cli.generation.inputs import Input


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one line of the file. `samples` are attempted at once, up to `most` in all, until `want` are accepted; None: until one is,
    and all that are accepted are kept."""

    samples: int
    most: int
    want: int | None

    def following(self, made: int, accepted: int) -> int:
        """How many more to attempt, once `made` attempts have ended; 0: none."""
        return 0 if accepted >= (self.want or 1) else min(self.samples, self.most - made)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rollout that has ended. `values` are those of `accept.NAMES`."""

    task_id: str
    index: int
    session_id: str | None
    failure: dict[str, str] | None
    logs: str | None
    values: dict[str, Any]
    decision: Decision

    def line(self, given: Input, kept: bool | None) -> dict[str, Any]:
        """As it stands in rollouts.jsonl; `kept` None: that is not decided yet."""
        return {
            "input": given.id,
            "task_id": self.task_id,
            "index": self.index,
            "session_id": self.session_id,
            **{name: self.values[name] for name in NAMES},
            "failure": self.failure,
            "accepted": self.decision.accepted,
            "kept": kept,
            "why_not": self.decision.why or None,
            "logs": self.logs,
        }


@dataclass(slots=True)
class Way:
    """How far it is with one line of the file."""

    given: Input
    round: int = 0
    task_id: str = ""
    rollouts: dict[str, int] = field(default_factory=dict)
    """Of the current round, by status."""
    attempts: list[Attempt] = field(default_factory=list)
    kept: list[Attempt] = field(default_factory=list)
    done: bool = False

    @property
    def accepted(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.decision.accepted]

    def judged(self, index: int) -> bool:
        return any(attempt.index == index and attempt.task_id == self.task_id for attempt in self.attempts)

    def lines(self) -> list[dict[str, Any]]:
        return [attempt.line(self.given, attempt in self.kept if self.done else None) for attempt in self.attempts]


def judged(rollout: dict[str, Any], task: dict[str, Any], tokens: int | None, accept: Accept) -> Attempt:
    """`rollout` and `task` as the service shows them."""
    verdict = rollout["verdict"] or {}
    values = {
        "reward": verdict.get("reward"),
        "status": rollout["status"],
        "calls": rollout["calls"] or 0,
        "tokens": tokens,
        "seconds": worked_seconds(rollout["times"]),
        "attempt": rollout["attempt"],
        "metadata": {**task["metadata"], **verdict.get("metadata", {})},
    }
    failure, session_id = verdict.get("failure"), rollout["session_id"]
    decision = accept.decide(values) if session_id is not None else Decision(False, "it never had a session")
    return Attempt(task["task_id"], rollout["index"], session_id, failure, rollout["logs"], values, decision)


def best(accepted: Sequence[Attempt], want: int | None, keep: Callable[[Attempt], bool]) -> list[Attempt]:
    """Those that are kept: the `want` of the greatest reward that `keep` could keep; None: all of them.

    Of equal ones those of the earlier round, then of the smaller index, in whatever order they ended: a generation that is taken up
    again keeps the same."""
    kept: list[Attempt] = []
    for attempt in sorted(accepted, key=_rank) if want is not None else accepted:
        if len(kept) == want:
            break
        if keep(attempt):
            kept.append(attempt)
    return kept


def _rank(attempt: Attempt) -> tuple[float, int, str, int]:
    # Ids of a line's tasks differ in the number of the round at their end.
    return -(attempt.values["reward"] or 0.0), len(attempt.task_id), attempt.task_id, attempt.index


def worked_seconds(times: dict[str, float]) -> float | None:
    """From the harness's start to the next state; None when it was not started."""
    if "running" not in times:
        return None
    later = [at for at in times.values() if at > times["running"]]
    return round(min(later) - times["running"], 3) if later else None
