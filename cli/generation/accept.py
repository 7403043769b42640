"""The rule by which an attempt is accepted: an expression over what is known of it, such as `reward > 0 and calls < 30`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpleeval import EvalWithCompoundTypes, InvalidExpression

from cli.refusal import Refusal

NAMES = {
    "reward": "what its evaluator gave",
    "status": "completed, timeout, failed or cancelled",
    "calls": "of the model",
    "tokens": "that the model sampled",
    "seconds": "that the harness worked",
    "attempt": "1, more where the service had to begin again",
    "metadata": "the task's, and what its evaluator added: metadata.level or metadata['level']",
}
FUNCTIONS = {"abs": abs, "len": len, "max": max, "min": min, "round": round}


@dataclass(frozen=True, slots=True)
class Decision:
    """`why` an attempt cannot be judged; empty where it was."""

    accepted: bool
    why: str = ""


class Accept:
    """Raises `Refusal` (exit code 2) that names what is wrong with the expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._refused(f"{getattr(error, 'msg', error) or 'it is nested too deeply'}") from error
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name) and node.id not in NAMES and node.id not in FUNCTIONS:
                raise self._refused(f"there is no {node.id!r} (known: {', '.join((*NAMES, *FUNCTIONS))})")
        evaluator = EvalWithCompoundTypes(functions=dict(FUNCTIONS))
        for node in ast.walk(self._tree):
            self._check(node, evaluator)
        self.names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and node.id in NAMES}

    def decide(self, values: Mapping[str, Any]) -> Decision:
        """`values` has all of `NAMES`. What is asked for and is None accepts nothing."""
        for name in sorted(self.names):
            if values[name] is None:
                return Decision(False, f"there is no {name}")
        evaluator = EvalWithCompoundTypes(functions=dict(FUNCTIONS), names=dict(values))
        try:
            return Decision(bool(evaluator.eval(self.text, previously_parsed=self._tree)))
        except (
            InvalidExpression,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            return Decision(False, f"{type(error).__name__}: {error}")

    def _check(self, node: ast.AST, evaluator: EvalWithCompoundTypes) -> None:
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            raise self._refused(f"only {', '.join(FUNCTIONS)} can be called")
        if isinstance(node, ast.expr) and type(node) not in evaluator.nodes:
            raise self._refused(f"{type(node).__name__} is nothing that it may have")
        if isinstance(node, ast.operator | ast.unaryop | ast.cmpop) and type(node) not in evaluator.operators:
            raise self._refused(f"{type(node).__name__} is no operator that it may have")

    def _refused(self, why: str) -> Refusal:
        return Refusal(f"--accept {self.text!r} cannot be used: {why}", exit_code=2)
