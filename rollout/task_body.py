"""A submitted body, read into a checked `Task`.

    {"instruction": "…", "harness": "pi" | {"name": …, "definition": …, "env": …, "mcp_servers": […], "skills": […], "install": …},
     "runtime"? ("local" | {"kind": …, "image": …, "cpus": …, …}), "evaluator"? ("pytest" | {"kind": …, "options": …, …}),
     "prepare"? [{"upload": {"path": …, "text" | "base64" | "source": …}} | {"exec": "make" | {"command": …, "retries": …}}], …}

`contract.tasks` has the fields, their defaults and their rules. Here a task is also checked against the harnesses, runtimes and
evaluators there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import msgspec
from pydantic import ValidationError

from contract.tasks import EvaluatorSpec, HarnessSpec, RuntimeSpec, Task
from rollout.evaluators.base import BadEvaluator
from rollout.harnesses import catalogue as harnesses
from rollout.harnesses.definition import check_accepted, parse
from rollout.harnesses.prepared import BadDefinition, HarnessError, PromptTooLong
from rollout.runtimes.base import BadRuntime
from rollout.task import describe_problems, dump_given, read_json

_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")


class BadTask(Exception):
    """The message begins with the field and says what is wrong with it; `param` is the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ChecksRuntime(Protocol):
    def check(self, spec: RuntimeSpec) -> None:
        """Raises `BadRuntime`."""


class ChecksEvaluator(Protocol):
    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        """Raises `BadEvaluator`."""


@dataclass(frozen=True, slots=True)
class Known:
    """The kinds of runtimes and evaluators that a task may name."""

    runtimes: Callable[[], Sequence[str]]
    runtime: Callable[[str], ChecksRuntime]
    evaluators: Callable[[], Sequence[str]]
    evaluator: Callable[[str], ChecksEvaluator]


def read_task(raw: bytes, known: Known) -> tuple[Task, bytes]:
    """The task, and the digest of its body: equal for bodies that mean the same. Raises `BadTask`."""
    try:
        given = read_json(raw)
        msgspec.msgpack.encode(given)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise BadTask("; ".join([describe_problems(error), *_find_definition_problems(raw)]), place or None) from error
    except (OverflowError, ValueError) as error:
        raise BadTask(f"the task cannot be stored: {error}") from error
    task = settle_group(given)
    problems = list(_find_problems(task, known))
    if problems:
        raise BadTask("; ".join(problem.message for problem in problems), problems[0].param)
    if task.evaluator is not None:
        task = replace(task, evaluator=_settle_runtime(task.evaluator, known))
    # Defaults are left out, so a field that a later build adds changes no digest.
    return task, hashlib.sha256(_CANONICAL.encode(dump_given(given))).digest()


def settle_group(task: Task) -> Task:
    """With an early stop a group is never whole: unless the task says otherwise, the samples it wanted are enough."""
    if task.usable_samples is None or task.group.group_policy is not None or task.group.group_minimum is not None:
        return task
    return replace(task, group=replace(task.group, group_policy="allow_partial", group_minimum=task.usable_samples))


def _find_definition_problems(raw: bytes) -> Iterator[str]:
    """What is wrong with the harness's definition in a body that is no task."""
    try:
        harness = msgspec.json.decode(raw)["harness"]
        definition = harness["definition"]
        parse(definition, str(harness.get("name") or definition.get("name") or "custom"))
    except BadDefinition as error:
        yield f"harness: {error}"
    except (LookupError, TypeError, AttributeError, ValueError, msgspec.DecodeError):
        return


def _find_problems(task: Task, known: Known) -> Iterator[BadTask]:
    """One for each part of the task that names or asks for what there is not."""
    checks = [partial(_check_harness, task.harness, task.instruction), partial(_check_runtime, task.runtime, "runtime", known)]
    if task.evaluator is not None:
        checks.append(partial(_check_evaluator, task.evaluator, task, known))
    for check in checks:
        try:
            check()
        except BadTask as problem:
            yield problem


def _settle_runtime(spec: EvaluatorSpec, known: Known) -> EvaluatorSpec:
    """`spec` with `fresh_runtime` decided. A kind that needs no runtime gets none: making it would be wasted, and so would half the
    rollout's place on a node."""
    kind = known.evaluator(spec.kind)
    fresh = spec.fresh_runtime
    if fresh is None:
        # Preparing it, or giving it another image, asks for a fresh one.
        fresh = bool(spec.prepare or spec.runtime) or getattr(kind, "fresh_runtime", True)
    fresh = fresh and getattr(kind, "needs_runtime", True)
    return replace(spec, fresh_runtime=fresh, runtime=spec.runtime if fresh else None)


def _check_harness(harness: HarnessSpec, instruction: str) -> None:
    try:
        if harness.definition is None and harness.name not in harnesses.names():
            raise _refuse_name("harness", harness.name, harnesses.names(), ", or give a definition")
        definition = harnesses.find_definition(harness)
        check_accepted(definition, harness)
        definition.check_prompt(instruction)
    except PromptTooLong as error:
        raise BadTask(f"instruction: {error}", "instruction") from error
    except HarnessError as error:
        raise BadTask(f"harness: {error}", "harness") from error


def _check_runtime(spec: RuntimeSpec, field: str, known: Known) -> None:
    if spec.kind not in known.runtimes():
        raise _refuse_name(field, spec.kind, known.runtimes(), what="runtime")
    try:
        known.runtime(spec.kind).check(spec)
    except BadRuntime as error:
        raise BadTask(f"{field}: {error}", field) from error


def _check_evaluator(spec: EvaluatorSpec, task: Task, known: Known) -> None:
    if spec.kind not in known.evaluators():
        raise _refuse_name("evaluator", spec.kind, known.evaluators())
    if spec.runtime is not None:
        _check_runtime(spec.runtime, "evaluator.runtime", known)
    try:
        known.evaluator(spec.kind).check(spec, task)
    except BadEvaluator as error:
        raise BadTask(f"evaluator: {error}", "evaluator") from error


def _refuse_name(field: str, name: str, names: Sequence[str], rest: str = "", what: str = "") -> BadTask:
    return BadTask(f"{field}: there is no {what or field} {name!r}: choose one of {', '.join(names)}{rest}", field)
