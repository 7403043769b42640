"""Kind `python`: a function of an installed package returns the reward.

It may be a coroutine function, which must not block, or a plain one, which runs in a thread and is not stopped there when its time is up.
It runs in the node's process, with the node's rights.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from contract.errors import ServiceError
from contract.tasks import EvaluatorSpec, Task
from rollout.evaluators.base import Case, EvaluationFailed, Options, Score, Text, parse_score
from rollout.runtimes.base import RuntimeFailed

_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _check_entry(entry: str) -> str:
    if not _ENTRY.fullmatch(entry):
        raise ValueError(f"must be module:function, not {entry!r}")
    return entry


class PythonOptions(Options):
    kind = "python"

    entry: Annotated[Text, AfterValidator(_check_entry)]
    """module:function, called with the `Case`; it returns a number, an object as `parse_score` takes it, or a `Score`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """The function finds them in `case.options["arguments"]`."""


class PythonEvaluator:
    name = "python"
    needs_runtime = True
    fresh_runtime = False

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        PythonOptions.read(spec.options)

    async def evaluate(self, case: Case) -> Score:
        entry = PythonOptions.read_case(case).entry
        function = await asyncio.to_thread(_load_function, entry)
        try:
            value = await _call(function, case)
        except (EvaluationFailed, RuntimeFailed, ServiceError):
            raise
        except (Exception, SystemExit) as error:
            raise EvaluationFailed(f"{entry} raised {type(error).__name__}: {error}") from error
        return parse_score(value, f"what {entry} gave")


def _load_function(entry: str) -> Callable[[Case], Any]:
    module, _, path = entry.partition(":")
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (Exception, SystemExit) as error:
        raise EvaluationFailed(f"{entry} cannot be loaded on this node: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise EvaluationFailed(f"{entry} is {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


async def _call(function: Callable[[Case], Any], case: Case) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(case)
    value, error = await asyncio.to_thread(_catch, function, case)
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value


def _catch(function: Callable[[Case], Any], case: Case) -> tuple[Any, BaseException | None]:
    """What it returned or raised, as values: a StopIteration raised from a thread would leave the awaiting coroutine waiting forever."""
    try:
        return function(case), None
    except StopIteration as error:
        return None, RuntimeError(f"StopIteration: {error}")
    except (Exception, SystemExit) as error:
        return None, error
