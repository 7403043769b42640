"""What was given as a reward, taken at its word or refused. Nothing is ever made a reward that is none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from rollout.evaluators.base import BadReward, EvaluationFailed, Score

FEEDBACK_CHARS = 16_384
"""Of a feedback text; what is longer loses its middle."""

_FIELDS = ("reward", "per_call", "per_branch", "feedback", "metadata")


def as_reward(value: object, where: str) -> float:
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


def read_reward(text: str, where: str) -> float:
    """`as_reward` of a number written as text."""
    try:
        return as_reward(float(text.strip()), where)
    except ValueError as error:
        raise BadReward(f"{where} is {_shown(text)}, which is no number") from error


def as_score(value: object, where: str) -> Score:
    """Of a number, a `Score`, or an object with `reward` and perhaps `per_call`, `per_branch`, `feedback` and `metadata`; other
    fields of it go into the metadata. Raises `BadReward`, and `EvaluationFailed` for fields that are not what they should be."""
    if isinstance(value, Score):
        value = {name: getattr(value, name) for name in _FIELDS}
    if not isinstance(value, Mapping):
        return Score(as_reward(value, where))
    if value.get("reward") is None:
        raise BadReward(f"{where} has no field 'reward': {_shown(value)}")
    return Score(
        reward=as_reward(value["reward"], f"'reward' of {where}"),
        per_call=_rows(value, "per_call", where),
        per_branch=_rows(value, "per_branch", where),
        feedback=_feedback(value, where),
        metadata=_metadata(value, where),
    )


def shortened(text: str, characters: int = FEEDBACK_CHARS) -> str:
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
    return {str(key): as_reward(each, f"{name}[{key!r}] of {where}") for key, each in rows.items()}


def _feedback(value: Mapping[Any, Any], where: str) -> str:
    feedback = value.get("feedback") or ""
    if not isinstance(feedback, str):
        raise EvaluationFailed(f"'feedback' of {where} is {_shown(feedback)}, not a text")
    return shortened(feedback)


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
