"""What a field of a submitted task may hold, as types for pydantic."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rollout.harnesses.definition import MOST_BYTES

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


def _passable(text: str) -> str:
    if len(text.encode()) > MOST_BYTES - 256:
        raise ValueError(f"the system passes no argument or variable of more than {MOST_BYTES} bytes: upload it as a file")
    return text


Passed = Annotated[str, AfterValidator(_passable)]
"""What becomes an argument or, behind its name, a variable of a command."""


def _settable(given: dict[str, str]) -> dict[str, str]:
    for name, value in given.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be a variable")
    return given


Variables = Annotated[dict[str, Passed], AfterValidator(_settable)]


def _writable(given: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(given, allow_nan=False)
    except ValueError as error:
        raise ValueError("numbers must be finite: the service takes no others, and answers could not be read") from error
    return given


Json = Annotated[dict[str, Any], AfterValidator(_writable)]
"""An object of which only its reader knows the fields."""
