"""The kinds of evaluators: built-in ones, and those that installed packages register in the entry point group `verbatim.evaluators`, from
a name to a class (`module:Class`) that takes no arguments."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from contract.plugins import PluginError, Plugins, load_plugins
from rollout.evaluators.base import BadEvaluator, Evaluator

_BUILT_IN = {
    "command": "rollout.evaluators.command:CommandEvaluator",
    "harbor": "rollout.evaluators.harbor:HarborEvaluator",
    "http": "rollout.evaluators.http:HttpEvaluator",
    "llm_judge": "rollout.evaluators.llm_judge:LlmJudge",
    "pytest": "rollout.evaluators.pytest:PytestEvaluator",
    "python": "rollout.evaluators.python:PythonEvaluator",
    "swebench": "rollout.evaluators.swebench:SwebenchEvaluator",
}


@cache
def plugins() -> Plugins[Evaluator]:
    """Raises `PluginConflict`."""
    return load_plugins("verbatim.evaluators", _BUILT_IN, _make)


def list_names() -> list[str]:
    return plugins().names()


def load(name: str) -> Evaluator:
    """The evaluator of that name, always the same instance. Raises `BadEvaluator`."""
    try:
        return plugins().load(name)
    except PluginError as error:
        raise BadEvaluator(str(error)) from error


def _make(_: str, made_by: Any) -> Evaluator:
    made = made_by()
    made.name, made.needs_runtime, made.check, made.evaluate  # noqa: B018
    return cast(Evaluator, made)
