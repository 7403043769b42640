"""The interface of evaluators: a case in, a score out; how rewards and options are read.

An evaluator gets a runtime with the collected files in its workdir (fresh, or the one the agent left), and what is known of the run. It
raises `EvaluationFailed` when it cannot score the run: a missing or non-finite reward is an error, never 0.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Any, ClassVar, Protocol, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from contract.tasks import EvaluatorSpec, Task
from rollout.runtimes.base import Logs, Runtime


class BadEvaluator(Exception):
    """The task's options are invalid. Names the option and the rule it broke."""


class EvaluationFailed(Exception):
    """There is no reward. Names what was evaluated and what was wrong with it."""


class EvaluationTimedOut(EvaluationFailed):
    """A command of the evaluator ran out of time."""


class BadReward(EvaluationFailed):
    """The reward is missing, not a number, or not finite."""


@dataclass(frozen=True, slots=True)
class Run:
    """How the agent's run ended. `calls` are as `GET /sessions/{id}/calls` returns them, without the token arrays."""

    session_id: str
    exit_code: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    calls: Sequence[Mapping[str, Any]]


Ask = Callable[[str, Sequence[Mapping[str, Any]], Mapping[str, Any]], Awaitable[str]]
"""(model, chat messages, sampling) -> the text of a frozen model's reply, sampled outside the rollout's session. Raises
`ServiceError`, of which `RequestRefused` and `ResourceNotFound` count as failures of the evaluator."""


@dataclass(frozen=True, slots=True)
class Case:
    """One evaluation. `runtime` is None if the evaluator needs none. After `seconds` the evaluation is cancelled. `logs` take the output
    of the commands it runs."""

    task: Task
    options: Mapping[str, Any]
    run: Run
    runtime: Runtime | None
    logs: Logs
    seconds: float
    ask: Ask


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` is finite. `per_call` maps call ids, and `per_branch` ids of a branch's last call, to the rewards of their rows.
    `feedback` is for people and for agents that learn from text."""

    reward: float
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Evaluator(Protocol):
    """One kind of evaluator. A kind that only reads files may set `fresh_runtime = False`: it then works in the runtime that the agent
    left, unless the task says otherwise. The default is True."""

    name: str
    needs_runtime: bool

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        """Raises `BadEvaluator`. Called when a task is submitted: it may look at the options and nothing else."""

    async def evaluate(self, case: Case) -> Score:
        """Raises `EvaluationFailed`, `RuntimeFailed` if the runtime broke, and `ServiceError` if the service did not answer a call to a
        model."""


# Rewards are taken as given or refused, never coerced.


FEEDBACK_CHARS = 16_384
"""A longer feedback loses its middle."""

_FIELDS = ("reward", "per_call", "per_branch", "feedback", "metadata")


def parse_reward(value: object, where: str) -> float:
    """A finite float. `where` names it in messages. Raises `BadReward`, also for booleans and numbers written as text."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadReward(f"{where} is {_show(value)}, which is no number")
    try:
        reward = float(value)
    except (OverflowError, ValueError) as error:
        raise BadReward(f"{where} is {_show(value)}, which is no number: {error}") from error
    if not math.isfinite(reward):
        raise BadReward(f"{where} is {reward}, which is not finite")
    return reward


def parse_reward_text(text: str, where: str) -> float:
    """`parse_reward` for a number written as text."""
    try:
        return parse_reward(float(text.strip()), where)
    except ValueError as error:
        raise BadReward(f"{where} is {_show(text)}, which is no number") from error


def parse_score(value: object, where: str) -> Score:
    """The score of a number, a `Score`, or an object with `reward` and optionally `per_call`, `per_branch`, `feedback` and `metadata`;
    its other fields become metadata. Raises `BadReward`, and `EvaluationFailed` if another field has the wrong type."""
    if isinstance(value, Score):
        value = {name: getattr(value, name) for name in _FIELDS}
    if not isinstance(value, Mapping):
        return Score(parse_reward(value, where))
    if value.get("reward") is None:
        raise BadReward(f"{where} has no field 'reward': {_show(value)}")
    return Score(
        reward=parse_reward(value["reward"], f"'reward' of {where}"),
        per_call=_parse_rows(value, "per_call", where),
        per_branch=_parse_rows(value, "per_branch", where),
        feedback=_parse_feedback(value, where),
        metadata=_parse_metadata(value, where),
    )


def shorten(text: str, characters: int = FEEDBACK_CHARS) -> str:
    """At most so many characters, plus a note in place of the middle that was cut; always valid UTF-8."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _parse_rows(value: Mapping[Any, Any], name: str, where: str) -> dict[str, float]:
    rows = value.get(name) or {}
    if not isinstance(rows, Mapping):
        raise EvaluationFailed(f"{name!r} of {where} is {_show(rows)}, not an object of call ids and rewards")
    return {str(key): parse_reward(each, f"{name}[{key!r}] of {where}") for key, each in rows.items()}


def _parse_feedback(value: Mapping[Any, Any], where: str) -> str:
    feedback = value.get("feedback") or ""
    if not isinstance(feedback, str):
        raise EvaluationFailed(f"'feedback' of {where} is {_show(feedback)}, not a text")
    return shorten(feedback)


def _parse_metadata(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    given = value.get("metadata") or {}
    if not isinstance(given, Mapping):
        raise EvaluationFailed(f"'metadata' of {where} is {_show(given)}, not an object")
    metadata = {**{key: each for key, each in value.items() if key not in _FIELDS}, **given}
    try:
        written = json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise EvaluationFailed(f"'metadata' of {where} cannot be written as JSON: {error}") from error
    # Through JSON, as the service gets it: the store can neither read keys that are not strings nor write numpy's numbers.
    plain: dict[str, Any] = json.loads(written)
    return plain


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


# Options: one pydantic model per kind is the only list of what it takes.


@dataclass(frozen=True, slots=True)
class File:
    """A file given by an option: its text, or `{"text"|"base64": …, "executable": bool}`."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


def read_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"must be a text, not {value!r}")
    return value


def _read_texts(value: Any) -> tuple[str, ...]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"must be a list of texts, not {value!r}")
    return tuple(value)


def _read_argv(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return ("sh", "-c", read_text(value))
    if not value:
        raise ValueError("is an empty command")
    return _read_texts(value)


def _read_files(value: Any) -> tuple[File, ...]:
    if value == ():
        return ()
    if not isinstance(value, Mapping) or not all(isinstance(path, str) and path for path in value):
        raise ValueError(f"must be an object, not {value!r}")
    return tuple(_read_file(path, given) for path, given in value.items())


def _read_file(path: str, given: Any) -> File:
    given = {"text": given} if isinstance(given, str) else given
    fields = {*given} if isinstance(given, Mapping) else set()
    if not fields <= {"text", "base64", "executable"} or len(fields & {"text", "base64"}) != 1:
        raise ValueError(f"must give {path!r} a text, or an object with 'text' or 'base64' and perhaps 'executable'")
    try:
        content = given["text"].encode() if "text" in given else base64.b64decode(given["base64"], validate=True)
    except (AttributeError, TypeError, UnicodeEncodeError, binascii.Error) as error:
        raise ValueError(f"gives {path!r} something that is no content: {error}") from error
    return File(path, content, 0o755 if given.get("executable") else 0o644)


def whole(most: int) -> BeforeValidator:
    """A whole number from 0 to `most`."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ValueError(f"must be a whole number from 0 to {most}, not {value!r}")
        return value

    return BeforeValidator(read)


Text = Annotated[str, BeforeValidator(read_text)]
"""Not blank."""
Texts = Annotated[tuple[str, ...], BeforeValidator(_read_texts)]
"""A list of texts, or one text."""
TextTable = dict[Annotated[str, Field(min_length=1)], str]
Argv = Annotated[tuple[str, ...], BeforeValidator(_read_argv)]
"""A text is a line for `sh`, a list is run as it is."""
Files = Annotated[tuple[File, ...], BeforeValidator(_read_files)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[Number, Field(gt=0)]

_RULES = {
    "missing": "is missing",
    "bool_type": "must be true or false, not {input!r}",
    "dict_type": "must be an object, not {input!r}",
    "float_type": "must be a finite number, not {input!r}",
    "finite_number": "must be a finite number, not {input!r}",
    "greater_than": "must be greater than {gt:g}, not {input!r}",
    "greater_than_equal": "must be at least {ge}",
}
"""pydantic's type of an error -> the rule, as messages state it."""


class Options(BaseModel):
    """The options of the evaluator `kind`. A null counts as left out.

    Rules over several options are validators of the whole model, whose messages name them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: ClassVar[str]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises `BadEvaluator`, which names the options and the rules they broke."""
        options = {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise BadEvaluator(f"evaluator {cls.kind}: {'; '.join(map(cls._name_problem, error.errors()))}") from error

    @classmethod
    def read_case(cls, case: Case) -> Self:
        """The options of `case`, which were checked when the task was submitted. If they are refused now, this node runs another build
        or has other packages, which is `EvaluationFailed`."""
        try:
            return cls.read(case.options)
        except BadEvaluator as error:
            raise EvaluationFailed(f"this node refuses options that the service accepted: {error}") from error

    @classmethod
    def _name_problem(cls, problem: ErrorDetails) -> str:
        where, kind, context, given = problem["loc"], problem["type"], problem.get("ctx", {}), problem["input"]
        if kind == "extra_forbidden":
            return f"there is no option {where[0]!r} (known: {', '.join(sorted(cls.model_fields))})"
        if kind == "string_type":
            return f"option {where[0]!r} must map names to texts: {where[-1]!r} has {given!r}"
        if kind == "literal_error":
            choices = ", ".join(re.findall(r"'([^']*)'", context["expected"]))
            rule = f"cannot be {given!r}: choose one of {choices}"
        elif kind == "value_error":
            rule = str(context["error"])
        else:
            rule = _RULES[kind].format(**context, input=given) if kind in _RULES else problem["msg"]
        return f"option {where[-1]!r} {rule}" if where else rule
