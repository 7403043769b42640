"""An evaluator: from what the agent left behind to a reward.

It is given a runtime in which the collected files lie in the workdir (fresh or the agent's own, as the task says), and what is known
of the run. It raises `EvaluationFailed` when it cannot tell; a missing or non-finite reward is an error, never 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.runtimes.base import Logs, Runtime
from rollout.task import EvaluatorSpec, Task


class BadEvaluator(Exception):
    """Options that no evaluation could work with; for the one who submits them. Names the option and the rule it broke."""


class EvaluationFailed(Exception):
    """There is no reward. Names what was looked at and what was wrong with it."""


class EvaluationTimedOut(EvaluationFailed):
    """A command of the evaluator was still at work when its time was up."""


class BadReward(EvaluationFailed):
    """Something was given as a reward that is none: nothing, no number, or not finite."""


@dataclass(frozen=True, slots=True)
class Run:
    """How the agent's run ended. `calls` is what `GET /sessions/{id}/calls` told, without the arrays of tokens."""

    session_id: str
    exit_code: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    calls: Sequence[Mapping[str, Any]]


Ask = Callable[[str, Sequence[Mapping[str, Any]], Mapping[str, Any]], Awaitable[str]]
"""(model, chat messages, sampling) -> the text of a frozen model's reply; for judges. Not part of the rollout's session. Raises
`SessionFailed`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One evaluation. `runtime` is None for an evaluator that needs none. `seconds` is what it may take in all; it is stopped from
    outside then. `logs` are for the commands it runs."""

    task: Task
    options: Mapping[str, Any]
    run: Run
    runtime: Runtime | None
    logs: Logs
    seconds: float
    ask: Ask


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` is finite. `per_call` maps call ids, `per_branch` ids of a branch's last call, to rewards of their rows; both may
    stay empty. `feedback` is for people and for agents that learn from words."""

    reward: float
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Evaluator(Protocol):
    """One kind of evaluator. A kind may also have `fresh_runtime`, False where it only looks at files and by itself works in the runtime
    that the agent left; where it has none, that is True."""

    name: str
    needs_runtime: bool

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        """Raises `BadEvaluator`. Asked where tasks are submitted: looks at the options and at nothing else."""

    async def evaluate(self, case: Case) -> Score:
        """Raises `EvaluationFailed`, `RuntimeFailed` where the runtime itself broke, and `SessionFailed` where a model was asked and the
        service did not answer."""
