"""The inputs of a generation, the attempts at each, and the rule that accepts an attempt."""

from __future__ import annotations

import ast
import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpleeval import EvalWithCompoundTypes, InvalidExpression

from cli.refusal import CommandError
from cli.run import load_harness
from contract.tasks import Task
from rollout.evaluators import catalogue as evaluators
from rollout.runtimes import catalogue as runtimes
from rollout.task_body import BadTask, Known, read_task

KNOWN = Known(runtimes.list_names, runtimes.load, evaluators.list_names, evaluators.load)
ID_CHARACTERS = 12
OWN_FIELDS = ("task_id", "num_samples", "early_stop_usable_samples")
"""Task fields that the generation sets itself."""


@dataclass(frozen=True, slots=True)
class Input:
    """One line of the input file. `id` is its task_id or a hash of its text, so it does not change when lines move."""

    id: str
    number: int
    body: dict[str, Any]

    def make_task(self, generation: str, round_number: int, samples: int) -> dict[str, Any]:
        """The body of the task that is this input's round `round_number` (from 1)."""
        return {**self.body, "task_id": f"{generation}.{self.id}.r{round_number}", "num_samples": samples}

    def parse(self) -> Task:
        """The task as a service parses it. Raises `BadTask`."""
        # The longest task_id that a generation makes of this input.
        return read_task(json.dumps(self.make_task("0" * 8, 1000, 1)).encode(), KNOWN)[0]


def input_id_of(task_id: str) -> str:
    """The id of the input that a generation's task belongs to."""
    return task_id.partition(".")[2].rpartition(".r")[0]


@dataclass(frozen=True, slots=True)
class Decision:
    """`why` an attempt could not be evaluated; empty if it was."""

    accepted: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rollout that has ended. `values` has a value for each of `NAMES`."""

    task_id: str
    index: int
    session_id: str | None
    failure: dict[str, str] | None
    logs: str | None
    values: dict[str, Any]
    decision: Decision
    feedback: str = ""
    """The evaluator's: why the reward is what it is."""


@dataclass(slots=True)
class Progress:
    """The state of one input. `rollouts` counts those of the current round by status."""

    input: Input
    round: int = 0
    task_id: str = ""
    rollouts: dict[str, int] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    kept: list[Attempt] = field(default_factory=list)
    done: bool = False

    @property
    def accepted(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.decision.accepted]

    def current_indexes(self) -> set[int]:
        """The rollouts of the current round that have been judged."""
        return {attempt.index for attempt in self.attempts if attempt.task_id == self.task_id}

    def lines(self) -> list[dict[str, Any]]:
        """The attempts as rollouts.jsonl records them; `kept` is null while undecided."""
        return [
            {
                "input": self.input.id,
                "task_id": attempt.task_id,
                "index": attempt.index,
                "session_id": attempt.session_id,
                **{name: attempt.values[name] for name in NAMES},
                "failure": attempt.failure,
                "accepted": attempt.decision.accepted,
                "kept": attempt in self.kept if self.done else None,
                "why_not": attempt.decision.why or None,
                "feedback": attempt.feedback or None,
                "logs": attempt.logs,
            }
            for attempt in self.attempts
        ]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Per input: `samples` attempts a round, at most `most` in all, until `want` are accepted. `want` None: until one is accepted, and
    every accepted attempt is kept."""

    samples: int
    most: int
    want: int | None

    def next_round(self, made: int, accepted: int) -> int:
        """How many attempts the next round makes; 0 if there is none."""
        return 0 if accepted >= (self.want or 1) else min(self.samples, self.most - made)

    def select(self, accepted: Sequence[Attempt], keep: Callable[[Attempt], bool]) -> list[Attempt]:
        """The attempts to keep: the `want` with the highest reward for which `keep` succeeds. Ties go to the earlier round and the
        smaller index, so that a resumed generation keeps the same attempts."""
        if self.want is None:
            return [attempt for attempt in accepted if keep(attempt)]
        kept: list[Attempt] = []
        for attempt in sorted(accepted, key=_rank):
            if len(kept) < self.want and keep(attempt):
                kept.append(attempt)
        return kept


def _rank(attempt: Attempt) -> tuple[float, int, str, int]:
    # The task ids of one input differ only in the round number at their end.
    return -(attempt.values["reward"] or 0.0), len(attempt.task_id), attempt.task_id, attempt.index


def judge(rollout: dict[str, Any], task: dict[str, Any], tokens: int | None, accept: Accept) -> Attempt:
    """The attempt that `rollout` was; `rollout` and `task` are in the API's shape."""
    verdict = rollout["verdict"] or {}
    values = {
        "reward": verdict.get("reward"),
        "status": rollout["status"],
        "calls": rollout["calls"] or 0,
        "tokens": tokens,
        "seconds": measure_seconds(rollout["times"]),
        "attempt": rollout["attempt"],
        "metadata": {**task["metadata"], **verdict.get("metadata", {})},
    }
    session_id = rollout["session_id"]
    decision = accept.decide(values) if session_id is not None else Decision(False, "it never had a session")
    failure, feedback = verdict.get("failure"), verdict.get("feedback") or ""
    return Attempt(task["task_id"], rollout["index"], session_id, failure, rollout["logs"], values, decision, feedback)


def measure_seconds(times: dict[str, float]) -> float | None:
    """How long the harness ran; None if it never started."""
    if "running" not in times:
        return None
    later = [at for at in times.values() if at > times["running"]]
    return round(min(later) - times["running"], 3) if later else None


# Reading the input file


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line sets on every input; None leaves the line's own value."""

    harness: str | None
    model: str | None
    runtime: str | None
    run: str | None


def read_inputs(lines: Iterable[tuple[int, dict[str, Any]]], overrides: Overrides, accept: Accept) -> list[Input]:
    """The inputs, each checked. Raises `CommandError` that names the first invalid line and the reason."""
    harness = None if overrides.harness is None else make_harness(overrides.harness)
    found: dict[str, Input] = {}
    for number, line in lines:
        digest = hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()
        made = Input(str(line.get("task_id") or digest[:ID_CHARACTERS]), number, _override(number, line, overrides, harness))
        if (same := found.get(made.id)) is not None:
            raise CommandError(f"line {number}: task {made.id!r} is already on line {same.number}")
        try:
            made.parse()
        except BadTask as error:
            raise CommandError(f"line {number}: {error.message}") from error
        if "reward" in accept.names and not made.body.get("evaluator"):
            raise CommandError(f"line {number} has no evaluator, so its attempts get no reward, which --accept reads")
        found[made.id] = made
    return list(found.values())


def make_harness(name_or_path: str) -> dict[str, Any]:
    """The `harness` field of a task; it includes the definition if that is a file. Raises `CommandError` (exit code 2)."""
    harness = load_harness(name_or_path)
    if not name_or_path.endswith(".toml"):
        return {"name": harness.name}
    definition = {"name": harness.name, **tomllib.loads(Path(name_or_path).read_text(encoding="utf-8"))}
    return {"name": harness.name, "definition": definition}


def _override(number: int, line: dict[str, Any], overrides: Overrides, harness: dict[str, Any] | None) -> dict[str, Any]:
    body = {name: value for name, value in line.items() if name not in OWN_FIELDS}
    if harness is not None:
        kept = line["harness"] if isinstance(line.get("harness"), dict) else {}
        body["harness"] = {name: value for name, value in kept.items() if name not in ("name", "definition")} | harness
    if "harness" not in body:
        raise CommandError(f"line {number} names no harness, and neither does --harness", exit_code=2)
    if overrides.model is not None:
        body["model"] = overrides.model
    if overrides.runtime is not None:
        kept = line["runtime"] if isinstance(line.get("runtime"), dict) else {}
        body["runtime"] = {**kept, "kind": overrides.runtime}
    if overrides.run is not None:
        body["run"] = overrides.run
    return body


# The rule of --accept, such as `reward > 0 and calls < 30`

NAMES = ("reward", "status", "calls", "tokens", "seconds", "attempt", "metadata")
"""The variables of the rule: docs/tasks.md describes them."""
FUNCTIONS = {"abs": abs, "len": len, "max": max, "min": min, "round": round}
EVALUATION_ERRORS = (
    InvalidExpression,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Accept:
    """Raises `CommandError` (exit code 2) that says what is wrong with the expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._refuse(f"{getattr(error, 'msg', error) or 'it is nested too deeply'}") from error
        nodes = list(ast.walk(self._tree))
        names = {node.id: node for node in nodes if isinstance(node, ast.Name)}
        for name in names:
            if name not in NAMES and name not in FUNCTIONS:
                raise self._refuse(f"there is no {name!r} (known: {', '.join((*NAMES, *FUNCTIONS))})")
        self.names = names.keys() & set(NAMES)
        evaluator = EvalWithCompoundTypes(functions=dict(FUNCTIONS))
        for node in nodes:
            if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
                raise self._refuse(f"only {', '.join(FUNCTIONS)} can be called")
            known = evaluator.nodes if isinstance(node, ast.expr) else evaluator.operators
            if isinstance(node, ast.expr | ast.operator | ast.unaryop | ast.cmpop) and type(node) not in known:
                raise self._refuse(f"{type(node).__name__} is not allowed")

    def decide(self, values: Mapping[str, Any]) -> Decision:
        """`values` has a value for each of `NAMES`. An expression that reads a None accepts nothing."""
        for name in sorted(self.names):
            if values[name] is None:
                return Decision(False, f"there is no {name}")
        evaluator = EvalWithCompoundTypes(functions=dict(FUNCTIONS), names=dict(values))
        try:
            return Decision(bool(evaluator.eval(self.text, previously_parsed=self._tree)))
        except EVALUATION_ERRORS as error:
            return Decision(False, f"{type(error).__name__}: {error}")

    def _refuse(self, why: str) -> CommandError:
        return CommandError(f"--accept {self.text!r} is invalid: {why}", exit_code=2)
