"""The JSON body of `POST /tasks`, and the `Task` it makes. Here a task is checked whole; whatever is wrong names its field.

    {"instruction": "…", "harness": "pi" | {"name": …, "definition": …, "env": …, "mcp_servers": […], "skills": […], "install": …},
     "task_id"?, "num_samples"?, "model"?, "sampling"?, "runtime"? ("local" | {"kind": …, "image": …, "cpus": …, …}),
     "prepare"? [{"upload": {"path": …, "text" | "base64" | "source": …}} | {"exec": "make" | {"command": …, "retries": …}}],
     "environment"?, "evaluator"? ("pytest" | {"kind": …, "options": …, …}), "budgets"? {"agent_seconds": …, "max_calls": …, …},
     "priority"?, "labels"?, "early_stop_usable_samples"?, "max_attempts"?, "on_lost_node"?, "on_agent_timeout"?, "agent_timeout_reward"?,
     "group"? {"policy": …, "minimum": …, "zero_variance": …, "max_quarantined_share": …}, "echo_policy"?, "callback_url"?,
     "metadata"?}

What a field means, and what it is when left out, is said at the types of `rollout.task`.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
from pydantic import BaseModel, ValidationError

from rollout.codec import encode
from rollout.evaluators.base import BadEvaluator
from rollout.harnesses import catalogue as harnesses
from rollout.harnesses.definition import parsed
from rollout.harnesses.errors import HarnessError, PromptTooLong
from rollout.harnesses.passed_on import check_taken
from rollout.runtimes.base import BadRuntime
from rollout.task import EvaluatorSpec, HarnessSpec, RuntimeSpec, Task
from rollout.task_body import TaskBody

SHOWN = 5
"""Problems of one body that its message lists."""

_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")


class BadTask(Exception):
    """What is wrong, with the field it is about first; `param` is that field."""

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


def submitted(raw: bytes, known: Known) -> tuple[Task, bytes]:
    """The task and the digest of its body, which is the same for bodies that mean the same. Raises `BadTask`."""
    try:
        body = TaskBody.model_validate_json(raw)
        task = body.task(body.task_id or uuid.uuid4().hex)
        encode(task)
    except ValidationError as error:
        raise _bad(error) from error
    except (OverflowError, ValueError) as error:
        raise BadTask(f"the task cannot be stored: {error}") from error
    _check_harness(task.harness, task.instruction)
    _check_runtime(task.runtime, "runtime", known)
    if task.evaluator is not None:
        _check_evaluator(task.evaluator, task, known)
        task = replace(task, evaluator=_placed(task.evaluator, body, known))
    return task, digest(body)


def _placed(spec: EvaluatorSpec, body: TaskBody, known: Known) -> EvaluatorSpec:
    """With no runtime of its own where none is of use to its kind: it would be made for nothing, and half of a node be kept free for
    it."""
    kind = known.evaluator(spec.kind)
    said = body.evaluator.fresh_runtime if body.evaluator else None
    # What is to be prepared, or another image, was asked for to be worked in.
    asked_for = said or (said is None and bool(spec.prepare or spec.runtime))
    by_itself = said is None and getattr(kind, "fresh_runtime", True)
    fresh = getattr(kind, "needs_runtime", True) and (asked_for or by_itself)
    return replace(spec, fresh_runtime=fresh, runtime=spec.runtime if fresh else None)


def digest(body: BaseModel) -> bytes:
    """Of what differs from the defaults: a field that a later build adds changes no digest."""
    return hashlib.sha256(_CANONICAL.encode(body.model_dump(exclude_defaults=True))).digest()


def _check_harness(harness: HarnessSpec, instruction: str) -> None:
    try:
        if harness.definition is None and harness.name not in harnesses.names():
            raise _unknown("harness", harness.name, harnesses.names(), ", or give a definition")
        given = harnesses.load(harness.name) if harness.definition is None else parsed(harness.definition, harness.name)
        check_taken(given, harness)
        given.check_prompt(instruction)
    except PromptTooLong as error:
        raise BadTask(f"instruction: {error}", "instruction") from error
    except HarnessError as error:
        raise BadTask(f"harness: {error}", "harness") from error


def _check_runtime(spec: RuntimeSpec, field: str, known: Known) -> None:
    if spec.kind not in known.runtimes():
        raise _unknown(field, spec.kind, known.runtimes(), what="runtime")
    try:
        known.runtime(spec.kind).check(spec)
    except BadRuntime as error:
        raise BadTask(f"{field}: {error}", field) from error


def _check_evaluator(spec: EvaluatorSpec, task: Task, known: Known) -> None:
    if spec.kind not in known.evaluators():
        raise _unknown("evaluator", spec.kind, known.evaluators())
    if spec.runtime is not None:
        _check_runtime(spec.runtime, "evaluator.runtime", known)
    try:
        known.evaluator(spec.kind).check(spec, task)
    except BadEvaluator as error:
        raise BadTask(f"evaluator: {error}", "evaluator") from error


def _unknown(field: str, name: str, names: Sequence[str], rest: str = "", what: str = "") -> BadTask:
    return BadTask(f"{field}: there is no {what or field} {name!r}: choose one of {', '.join(names)}{rest}", field)


def _bad(error: ValidationError) -> BadTask:
    problems = [(".".join(map(str, each["loc"])), _said(each["type"], each["msg"])) for each in error.errors()]
    said = "; ".join(f"{where}: {message}" if where else message for where, message in problems[:SHOWN])
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return BadTask(said + more, problems[0][0] or None)


def _said(kind: str, message: str) -> str:
    return "there is no such field" if kind == "extra_forbidden" else message.removeprefix("Value error, ")
