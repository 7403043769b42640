"""The kinds of evaluators: built-in ones, and those that installed packages register in the entry point group `GROUP`, from a name to a
class (`module:Class`) that takes no arguments."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from rollout.evaluators.base import BadEvaluator, Evaluator

GROUP = "verbatim.evaluators"

_BUILT_IN = {
    "command": "rollout.evaluators.command:CommandEvaluator",
    "diff": "rollout.evaluators.diff:DiffEvaluator",
    "harbor": "rollout.evaluators.harbor:HarborEvaluator",
    "http": "rollout.evaluators.http:HttpEvaluator",
    "llm_judge": "rollout.evaluators.llm_judge:LlmJudge",
    "pytest": "rollout.evaluators.pytest:PytestEvaluator",
    "python": "rollout.evaluators.python:PythonEvaluator",
    "swebench": "rollout.evaluators.swebench:SwebenchEvaluator",
}


class UnknownEvaluator(BadEvaluator):
    """No kind has that name. The message lists the names."""


def names() -> list[str]:
    """The names that `load` accepts, sorted."""
    return sorted(_find_kinds())


def load(name: str) -> Evaluator:
    """The evaluator of that name, always the same instance. Raises `UnknownEvaluator`, and `BadEvaluator` if it cannot be loaded or
    several have that name."""
    found = _find_kinds()
    if name not in found:
        raise UnknownEvaluator(f"there is no evaluator {name!r}: choose one of {', '.join(sorted(found))}")
    if len(found[name]) > 1:
        raise BadEvaluator(f"there are several evaluators {name!r}: {', '.join(point.value for point in found[name])}")
    return _make(found[name][0].value)


def load_all() -> None:
    """Import every kind now: another install may take this one's place while the process runs. What cannot be loaded fails where it is
    named."""
    for name in names():
        with suppress(BadEvaluator):
            load(name)


@cache
def _make(value: str) -> Evaluator:
    """Raises `BadEvaluator` for any error of a package's code."""
    module, _, attribute = value.partition(":")
    try:
        made = getattr(import_module(module), attribute)()
        made.name, made.needs_runtime, made.check, made.evaluate  # noqa: B018
    except Exception as error:
        raise BadEvaluator(f"the evaluator {value} cannot be loaded: {type(error).__name__}: {error}") from error
    return cast(Evaluator, made)


def _find_kinds() -> dict[str, list[EntryPoint]]:
    points = [EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()]
    found: dict[str, list[EntryPoint]] = {}
    for point in [*points, *_installed()]:
        if point.value not in [other.value for other in found.setdefault(point.name, [])]:
            found[point.name].append(point)
    return found


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Cached: this reads the metadata of every installed package."""
    return tuple(entry_points(group=GROUP))
