"""What the store keeps, as msgpack behind a schema version: one `encode`, one `decode`, one `DecodeError`.

Fields that a later build adds have defaults and are left out of what it reads of an earlier one; a value of another schema is
refused instead of being half understood.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from pydantic import TypeAdapter, ValidationError

from rollout.task import EvaluatorSpec, PrepareStep, Task, Upload

SCHEMA = 1
T = TypeVar("T")


class DecodeError(Exception):
    """A stored value that this build cannot read. Says of which type, and why."""


def encode(value: Any) -> bytes:
    """`[schema, value]`. Raises OverflowError for an integer that needs more than 64 bits."""
    return msgspec.msgpack.encode((SCHEMA, value))


def decode(blob: bytes, kind: type[T]) -> T:
    """Raises `DecodeError`."""
    try:
        schema, value = msgspec.msgpack.decode(blob, type=tuple[int, Any])
        if schema != SCHEMA:
            raise DecodeError(f"a stored {kind.__name__} has schema {schema}; this build reads {SCHEMA}")
        decoded: T = _reader(cast(Hashable, kind)).validate_python(value)
        return decoded
    except (msgspec.MsgspecError, UnicodeDecodeError, ValidationError) as error:
        raise DecodeError(f"a stored {kind.__name__} cannot be read: {error}") from error


def outline(task: Task) -> Task:
    """The task without what its uploads hold: small enough to be listed."""
    harness = replace(task.harness, skills=tuple(_emptied(skill) for skill in task.harness.skills))
    return replace(task, harness=harness, prepare=_outlined(task.prepare), evaluator=_judged(task.evaluator))


def _judged(evaluator: EvaluatorSpec | None) -> EvaluatorSpec | None:
    return evaluator and replace(evaluator, prepare=_outlined(evaluator.prepare), options={})


def _outlined(steps: tuple[PrepareStep, ...]) -> tuple[PrepareStep, ...]:
    return tuple(_emptied(step) if isinstance(step, Upload) else step for step in steps)


def _emptied(upload: Upload) -> Upload:
    return upload if upload.content is None else replace(upload, content=b"")


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    # Not msgspec's own: it cannot tell the steps of a task, a union of dataclasses, from each other.
    return TypeAdapter(kind)
