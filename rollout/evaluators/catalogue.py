"""The kinds of evaluators there are: the built-in ones, and those that installed packages bring by the entry point group `GROUP`,
where a kind's name stands for its class (`module:Class`, made without arguments)."""

from __future__ import annotations

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
    """No kind has that name. The message lists those there are."""


def names() -> list[str]:
    """The names that `kind` knows, sorted."""
    return sorted(_found())


def load(name: str) -> Evaluator:
    """The evaluator of that name, always the same one. Raises `UnknownEvaluator`, and `BadEvaluator` for one that cannot be loaded or
    whose name is taken."""
    found = _found()
    if name not in found:
        raise UnknownEvaluator(f"there is no evaluator {name!r}: choose one of {', '.join(sorted(found))}")
    if len(found[name]) > 1:
        raise BadEvaluator(f"there are several evaluators {name!r}: {', '.join(point.value for point in found[name])}")
    return _made(found[name][0].value)


@cache
def _made(value: str) -> Evaluator:
    """Raises `BadEvaluator` for whatever goes wrong in the code of others."""
    module, _, attribute = value.partition(":")
    try:
        made = getattr(import_module(module), attribute)()
        made.name, made.needs_runtime, made.check, made.evaluate  # noqa: B018
    except Exception as error:
        raise BadEvaluator(f"the evaluator {value} cannot be loaded: {type(error).__name__}: {error}") from error
    return cast(Evaluator, made)


def _found() -> dict[str, list[EntryPoint]]:
    points = [EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()]
    found: dict[str, list[EntryPoint]] = {}
    for point in [*points, *_installed()]:
        if point.value not in [other.value for other in found.setdefault(point.name, [])]:
            found[point.name].append(point)
    return found


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Looked up once: it reads the metadata of every package there is."""
    return tuple(entry_points(group=GROUP))
