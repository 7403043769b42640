"""Options as they were submitted, read one by one by name, so that whatever is wrong with one can be said of it."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout.evaluators.base import BadEvaluator, Case, EvaluationFailed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class File:
    """A file as an option gives it: its text, or `{"text"|"base64": …, "executable": bool}`."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


class Options:
    """What one kind of evaluator was given. Every reader raises `BadEvaluator`; `done`, called last, does for what nobody read."""

    def __init__(self, kind: str, given: Mapping[str, Any]) -> None:
        self.kind = kind
        self._given = given
        self._read: list[str] = []

    def done(self) -> None:
        for name in self._given:
            if name not in self._read:
                known = ", ".join(sorted(self._read))
                raise BadEvaluator(f"evaluator {self.kind}: there is no option {name!r} (known: {known})")

    def refused(self, name: str, rule: str) -> BadEvaluator:
        return BadEvaluator(f"evaluator {self.kind}: option {name!r} {rule}")

    def has(self, name: str) -> bool:
        return self._value(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        """A text that is not blank; required where there is no `default`."""
        value = self._value(name)
        if value is None:
            value = default
        if value is None:
            raise self.refused(name, "is missing")
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise self.refused(name, f"must be a text, not {value!r}")
        return value

    def some_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, of which the first is the default."""
        value = self.text(name, choices[0])
        if value not in choices:
            raise self.refused(name, f"cannot be {value!r}: choose one of {', '.join(choices)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(name, f"must be true or false, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """Finite and greater than `above`."""
        value = self._value(name)
        if value is None:
            value = default
        if value is None:
            raise self.refused(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refused(name, f"must be a finite number, not {value!r}")
        if value <= above:
            raise self.refused(name, f"must be greater than {above:g}, not {value!r}")
        return float(value)

    def some_number(self, name: str, *, above: float = -math.inf) -> float | None:
        return self.number(name, above=above) if self.has(name) else None

    def count(self, name: str, default: int, *, greatest: int) -> int:
        """A whole number from 0 to `greatest`."""
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= greatest:
            raise self.refused(name, f"must be a whole number from 0 to {greatest}, not {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts, or a single one."""
        value = self._value(name)
        value = () if value is None else [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) and each for each in value):
            raise self.refused(name, f"must be a list of texts, not {value!r}")
        return tuple(value)

    def table(self, name: str) -> dict[str, Any]:
        value = self._value(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
            raise self.refused(name, f"must be an object, not {value!r}")
        return dict(value)

    def text_table(self, name: str) -> dict[str, str]:
        """Texts by name; those may be empty."""
        table = self.table(name)
        for key, value in table.items():
            if not isinstance(value, str):
                raise self.refused(name, f"must map names to texts: {key!r} has {value!r}")
        return table

    def argv(self, name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """A command: a text is a line for `sh`, a list is run as it is."""
        value = self._value(name)
        if value is None and default:
            return default
        if isinstance(value, list | tuple):
            words = self.texts(name)
            if not words:
                raise self.refused(name, "is an empty command")
            return words
        return ("sh", "-c", self.text(name))

    def files(self, name: str) -> tuple[File, ...]:
        return tuple(self._file(name, path, value) for path, value in self.table(name).items())

    def _value(self, name: str) -> Any:
        if name not in self._read:
            self._read.append(name)
        return self._given.get(name)

    def _file(self, name: str, path: str, value: Any) -> File:
        if isinstance(value, str):
            value = {"text": value}
        if (
            not isinstance(value, Mapping)
            or not {*value} <= {"text", "base64", "executable"}
            or len({*value} & {"text", "base64"}) != 1
        ):
            raise self.refused(
                name, f"must give {path!r} a text, or an object with 'text' or 'base64' and perhaps 'executable'"
            )
        mode = 0o755 if value.get("executable") else 0o644
        try:
            if "text" in value:
                return File(path, value["text"].encode(), mode)
            return File(path, base64.b64decode(value["base64"], validate=True), mode)
        except (AttributeError, TypeError, UnicodeEncodeError, binascii.Error) as error:
            raise self.refused(name, f"gives {path!r} something that is no content: {error}") from error


def of_case(kind: str, case: Case, read: Callable[[Options], T]) -> T:
    """What `read` makes of a case's options. They were checked where the task was submitted; that a node finds fault with them all
    the same is `EvaluationFailed`: another build, or other packages, are at work there."""
    try:
        return read(Options(kind, case.options))
    except BadEvaluator as error:
        raise EvaluationFailed(f"this node does not take what was accepted: {error}") from error
