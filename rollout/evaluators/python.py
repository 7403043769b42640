"""Kind `python`: a function of an installed package gives the reward.

Options:

    entry      module:function. It is called with the `Case` and gives a number, an object as `rewards.as_score` takes it, or a `Score`
    arguments  an object that the function finds in `case.options["arguments"]`

The function may be a coroutine function, which must not block, or a plain one, which runs in a thread: its time being up does not
end it there. It runs in the node's own process and with the node's rights.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rollout.evaluators.base import Case, EvaluationFailed, Options, Score, of_case, parse_score
from rollout.runtimes.base import RuntimeFailed
from rollout.sessions import SessionFailed
from rollout.task import EvaluatorSpec, Task

_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class PythonEvaluator:
    name = "python"
    needs_runtime = True
    fresh_runtime = False

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        _read(Options(self.name, spec.options))

    async def evaluate(self, case: Case) -> Score:
        entry = of_case(self.name, case, _read)
        function = await asyncio.to_thread(_function, entry)
        try:
            value = await _called(function, case)
        except (EvaluationFailed, RuntimeFailed, SessionFailed):
            raise
        except (Exception, SystemExit) as error:
            raise EvaluationFailed(f"{entry} raised {type(error).__name__}: {error}") from error
        return parse_score(value, f"what {entry} gave")


def _read(options: Options) -> str:
    entry = options.text("entry")
    options.table("arguments")
    options.done()
    if not _ENTRY.fullmatch(entry):
        raise options.refused("entry", f"must be module:function, not {entry!r}")
    return entry


def _function(entry: str) -> Callable[[Case], Any]:
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


async def _called(function: Callable[[Case], Any], case: Case) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(case)
    value, error = await asyncio.to_thread(_outcome, function, case)
    if error is not None:
        raise error
    return await value if inspect.isawaitable(value) else value


def _outcome(function: Callable[[Case], Any], case: Case) -> tuple[Any, BaseException | None]:
    """What it gave or raised. Handed over as a value: a StopIteration cannot be raised out of a thread into a coroutine, which would
    wait for ever."""
    try:
        return function(case), None
    except StopIteration as error:
        return None, RuntimeError(f"StopIteration: {error}")
    except (Exception, SystemExit) as error:
        return None, error
