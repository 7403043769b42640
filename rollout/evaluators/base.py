"""An evaluator: from what the agent left behind to a reward.

It is given a runtime in which the collected files lie in the workdir (fresh or the agent's own, as the task says), and what is known
of the run. It raises `EvaluationFailed` when it cannot tell; a missing or non-finite reward is an error, never 0.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeVar

from rollout.runtimes.base import Logs, Runtime
from rollout.task import EvaluatorSpec, Task


class BadEvaluator(Exception):
    """Options that no evaluation could work with; for the one who submits them. Names the option and the rule it broke."""


class EvaluationFailed(Exception):
    """There is no reward. Names what was looked at and what was wrong with it."""


class EvaluationTimedOut(EvaluationFailed):
    """A command of the evaluator was still at work when its time was up."""


class BadReward(EvaluationFailed):
    """Something was given as a reward that is none: nothing, no number, or not finite."""


@dataclass(frozen=True, slots=True)
class Run:
    """How the agent's run ended. `calls` is what `GET /sessions/{id}/calls` told, without the arrays of tokens."""

    session_id: str
    exit_code: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    calls: Sequence[Mapping[str, Any]]


Ask = Callable[[str, Sequence[Mapping[str, Any]], Mapping[str, Any]], Awaitable[str]]
"""(model, chat messages, sampling) -> the text of a frozen model's reply; for judges. Not part of the rollout's session. Raises
`SessionFailed`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One evaluation. `runtime` is None for an evaluator that needs none. `seconds` is what it may take in all; it is stopped from
    outside then. `logs` are for the commands it runs."""

    task: Task
    options: Mapping[str, Any]
    run: Run
    runtime: Runtime | None
    logs: Logs
    seconds: float
    ask: Ask


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` is finite. `per_call` maps call ids, `per_branch` ids of a branch's last call, to rewards of their rows; both may
    stay empty. `feedback` is for people and for agents that learn from words."""

    reward: float
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Evaluator(Protocol):
    """One kind of evaluator. A kind may also have `fresh_runtime`, False where it only looks at files and by itself works in the runtime
    that the agent left; where it has none, that is True."""

    name: str
    needs_runtime: bool

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        """Raises `BadEvaluator`. Asked where tasks are submitted: looks at the options and at nothing else."""

    async def evaluate(self, case: Case) -> Score:
        """Raises `EvaluationFailed`, `RuntimeFailed` where the runtime itself broke, and `SessionFailed` where a model was asked and the
        service did not answer."""


# What was given as a reward, taken at its word or refused. Nothing is ever made a reward that is none.


FEEDBACK_CHARS = 16_384
"""Of a feedback text; what is longer loses its middle."""

_FIELDS = ("reward", "per_call", "per_branch", "feedback", "metadata")


def parse_reward(value: object, where: str) -> float:
    """A finite float. `where` says whose it is. Raises `BadReward`, also for true, false and numbers written as text."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadReward(f"{where} is {_shown(value)}, which is no number")
    try:
        reward = float(value)
    except (OverflowError, ValueError) as error:
        raise BadReward(f"{where} is {_shown(value)}, which is no number: {error}") from error
    if not math.isfinite(reward):
        raise BadReward(f"{where} is {reward}, which is not finite")
    return reward


def parse_reward_text(text: str, where: str) -> float:
    """`as_reward` of a number written as text."""
    try:
        return parse_reward(float(text.strip()), where)
    except ValueError as error:
        raise BadReward(f"{where} is {_shown(text)}, which is no number") from error


def parse_score(value: object, where: str) -> Score:
    """Of a number, a `Score`, or an object with `reward` and perhaps `per_call`, `per_branch`, `feedback` and `metadata`; other
    fields of it go into the metadata. Raises `BadReward`, and `EvaluationFailed` for fields that are not what they should be."""
    if isinstance(value, Score):
        value = {name: getattr(value, name) for name in _FIELDS}
    if not isinstance(value, Mapping):
        return Score(parse_reward(value, where))
    if value.get("reward") is None:
        raise BadReward(f"{where} has no field 'reward': {_shown(value)}")
    return Score(
        reward=parse_reward(value["reward"], f"'reward' of {where}"),
        per_call=_rows(value, "per_call", where),
        per_branch=_rows(value, "per_branch", where),
        feedback=_feedback(value, where),
        metadata=_metadata(value, where),
    )


def shorten(text: str, characters: int = FEEDBACK_CHARS) -> str:
    """At most so many characters (and a few that say what is missing), all of which can be written as UTF-8."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _rows(value: Mapping[Any, Any], name: str, where: str) -> dict[str, float]:
    rows = value.get(name) or {}
    if not isinstance(rows, Mapping):
        raise EvaluationFailed(f"{name!r} of {where} is {_shown(rows)}, not an object of call ids and rewards")
    return {str(key): parse_reward(each, f"{name}[{key!r}] of {where}") for key, each in rows.items()}


def _feedback(value: Mapping[Any, Any], where: str) -> str:
    feedback = value.get("feedback") or ""
    if not isinstance(feedback, str):
        raise EvaluationFailed(f"'feedback' of {where} is {_shown(feedback)}, not a text")
    return shorten(feedback)


def _metadata(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    given = value.get("metadata") or {}
    if not isinstance(given, Mapping):
        raise EvaluationFailed(f"'metadata' of {where} is {_shown(given)}, not an object")
    metadata = {**{key: each for key, each in value.items() if key not in _FIELDS}, **given}
    try:
        written = json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise EvaluationFailed(f"'metadata' of {where} cannot be written as JSON: {error}") from error
    # As the service gets it. The store does not read keys that are no texts, nor write numbers of a class of their own, as numpy has.
    taken: dict[str, Any] = json.loads(written)
    return taken


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


# Options as they were submitted, read one by one by name, so that whatever is wrong with one can be said of it.


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
