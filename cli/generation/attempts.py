"""Attempts of one task of the file: what is known of each that has ended, whether it is accepted, and which are kept."""

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

from cli.refusal import Refusal
from rollout.evaluators import catalogue as evaluators
from rollout.runtimes import catalogue as runtimes
from rollout.task import Task
from rollout.task_body import BadTask, Known, read_task


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
class Decision:
    """`why` an attempt cannot be judged; empty where it was."""

    accepted: bool
    why: str = ""


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


@dataclass(frozen=True, slots=True)
class Input:
    """One line of the file. `id` is its task_id, or made from its text, so that it stays the same when lines move."""

    id: str
    number: int
    body: dict[str, Any]

    def task_id(self, generation: str, number: int) -> str:
        return f"{generation}.{self.id}.r{number}"

    def task(self, generation: str, number: int, samples: int) -> dict[str, Any]:
        """The body of its task of that round (from 1)."""
        return {**self.body, "task_id": self.task_id(generation, number), "num_samples": samples}

    def parsed(self) -> Task:
        """As a service takes it. Raises `BadTask`."""
        # Ids of its tasks are this much longer than its own.
        return read_task(json.dumps(self.task("0" * 8, 1000, 1)).encode(), KNOWN)[0]


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


# The tasks to generate for: the lines of a file with what the command line says over them, each checked before anything starts.


KNOWN = Known(runtimes.list_names, runtimes.load, evaluators.names, evaluators.load)
ID_CHARACTERS = 12
OWN = ("task_id", "num_samples", "early_stop_usable_samples")
"""Fields of a line that the generation sets itself."""


@dataclass(frozen=True, slots=True)
class Over:
    """What the command line says over the lines; None: the line's own."""

    harness: str | None
    model: str | None
    runtime: str | None


def input_of(task_id: str) -> str:
    """The id of the input that a task of a generation is for."""
    return task_id.partition(".")[2].rpartition(".r")[0]


def read(lines: Iterable[tuple[int, dict[str, Any]]], over: Over, accept: Accept) -> list[Input]:
    """Raises `Refusal` that names the first line that cannot be used, and why."""
    harness = None if over.harness is None else harness_body(over.harness)
    found: dict[str, Input] = {}
    for number, line in lines:
        given = Input(str(line.get("task_id") or _made_id(line)), number, _body(number, line, over, harness))
        if (same := found.get(given.id)) is not None:
            raise Refusal(f"line {number}: task {given.id!r} is in line {same.number} already")
        _check(given, accept)
        found[given.id] = given
    return list(found.values())


def harness_body(name_or_path: str) -> dict[str, Any]:
    """The harness as a task names it; with its whole definition where it is a file. Raises `Refusal` (exit code 2)."""
    from cli.run import chosen

    harness = chosen(name_or_path)
    if not name_or_path.endswith(".toml"):
        return {"name": harness.name}
    definition = {"name": harness.name, **tomllib.loads(Path(name_or_path).read_text(encoding="utf-8"))}
    return {"name": harness.name, "definition": definition}


def _body(number: int, line: dict[str, Any], over: Over, harness: dict[str, Any] | None) -> dict[str, Any]:
    body = {name: value for name, value in line.items() if name not in OWN}
    if harness is not None:
        kept = line["harness"] if isinstance(line.get("harness"), dict) else {}
        body["harness"] = {name: value for name, value in kept.items() if name not in ("name", "definition")} | harness
    if "harness" not in body:
        raise Refusal(f"line {number} names no harness, and neither does --harness", exit_code=2)
    if over.model is not None:
        body["model"] = over.model
    if over.runtime is not None:
        kept = line["runtime"] if isinstance(line.get("runtime"), dict) else {}
        body["runtime"] = {**kept, "kind": over.runtime}
    return body


def _check(given: Input, accept: Accept) -> None:
    try:
        given.parsed()
    except BadTask as error:
        raise Refusal(f"line {given.number}: {error.message}") from error
    if "reward" in accept.names and not given.body.get("evaluator"):
        raise Refusal(f"line {given.number} has no evaluator: its attempts would get no reward, which --accept asks for")


def _made_id(line: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:ID_CHARACTERS]


# The rule by which an attempt is accepted: an expression over what is known of it, such as `reward > 0 and calls < 30`.


NAMES = {
    "reward": "what its evaluator gave",
    "status": "completed, timeout, failed or cancelled",
    "calls": "of the model",
    "tokens": "that the model sampled",
    "seconds": "that the harness worked",
    "attempt": "1, more where the service had to begin again",
    "metadata": "the task's, and what its evaluator added: metadata.level or metadata['level']",
}
FUNCTIONS = {"abs": abs, "len": len, "max": max, "min": min, "round": round}


class Accept:
    """Raises `Refusal` (exit code 2) that names what is wrong with the expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._refused(f"{getattr(error, 'msg', error) or 'it is nested too deeply'}") from error
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name) and node.id not in NAMES and node.id not in FUNCTIONS:
                raise self._refused(f"there is no {node.id!r} (known: {', '.join((*NAMES, *FUNCTIONS))})")
        evaluator = EvalWithCompoundTypes(functions=dict(FUNCTIONS))
        for node in ast.walk(self._tree):
            self._check(node, evaluator)
        self.names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and node.id in NAMES}

    def decide(self, values: Mapping[str, Any]) -> Decision:
        """`values` has all of `NAMES`. What is asked for and is None accepts nothing."""
        for name in sorted(self.names):
            if values[name] is None:
                return Decision(False, f"there is no {name}")
        evaluator = EvalWithCompoundTypes(functions=dict(FUNCTIONS), names=dict(values))
        try:
            return Decision(bool(evaluator.eval(self.text, previously_parsed=self._tree)))
        except (
            InvalidExpression,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            return Decision(False, f"{type(error).__name__}: {error}")

    def _check(self, node: ast.AST, evaluator: EvalWithCompoundTypes) -> None:
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            raise self._refused(f"only {', '.join(FUNCTIONS)} can be called")
        if isinstance(node, ast.expr) and type(node) not in evaluator.nodes:
            raise self._refused(f"{type(node).__name__} is nothing that it may have")
        if isinstance(node, ast.operator | ast.unaryop | ast.cmpop) and type(node) not in evaluator.operators:
            raise self._refused(f"{type(node).__name__} is no operator that it may have")

    def _refused(self, why: str) -> Refusal:
        return Refusal(f"--accept {self.text!r} cannot be used: {why}", exit_code=2)
