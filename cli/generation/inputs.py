"""The tasks to generate for: the lines of a file with what the command line says over them, each checked before anything starts."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.generation.accept import Accept
from cli.refusal import Refusal
from rollout.evaluators import catalogue as evaluators
from rollout.runtimes import catalogue as runtimes
from rollout.task import Task
from rollout.task_wire import BadTask, Known, submitted

KNOWN = Known(runtimes.names, runtimes.load, evaluators.names, evaluators.kind)
ID_CHARACTERS = 12
OWN = ("task_id", "num_samples", "early_stop_usable_samples")
"""Fields of a line that the generation sets itself."""


@dataclass(frozen=True, slots=True)
class Over:
    """What the command line says over the lines; None: the line's own."""

    harness: str | None
    model: str | None
    runtime: str | None


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
        return submitted(json.dumps(self.task("0" * 8, 1000, 1)).encode(), KNOWN)[0]


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
    from cli.opened_session import chosen

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
