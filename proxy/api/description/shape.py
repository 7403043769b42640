"""The JSON of an answer, as the description has it. Nothing is made of these: answers are encoded where they arise."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Span = Annotated[list[int], Field(min_length=3, max_length=3)]
"""[version, start, end]"""


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorText(Shape):
    code: str
    """One word for programs."""
    message: str
    """What was wrong, with the value it is about."""
    param: str | None = None
    """The field it is about."""


class Refused(Shape):
    """Every error of the control side."""

    error: ErrorText
