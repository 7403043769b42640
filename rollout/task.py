"""A task's JSON: read, checked, and written without what is at its default. `contract.tasks` has the fields."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from contract.tasks import Task

PROBLEMS_SHOWN = 5


_TASK = TypeAdapter(Task)


def read_json(raw: bytes) -> Task:
    """Raises `pydantic.ValidationError`."""
    return _TASK.validate_json(raw, by_alias=True, by_name=False)


def describe_problems(error: ValidationError) -> str:
    """Each problem with its place, the first `PROBLEMS_SHOWN` of them."""
    problems = error.errors()
    told = []
    for each in problems[:PROBLEMS_SHOWN]:
        unknown = each["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        message = "there is no such field" if unknown else each["msg"].removeprefix("Value error, ")
        told.append(": ".join([*filter(None, [".".join(map(str, each["loc"]))]), message]))
    if len(problems) > PROBLEMS_SHOWN:
        told.append(f"and {len(problems) - PROBLEMS_SHOWN} more")
    return "; ".join(told)


def dump_given(task: Task) -> dict[str, Any]:
    """The task's JSON body without fields at their default."""
    body: dict[str, Any] = _TASK.dump_python(task, by_alias=True, exclude_defaults=True)
    return body
