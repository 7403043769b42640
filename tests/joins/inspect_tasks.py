"""Evaluations, which know nothing of sessions. Inspect loads this file."""

from __future__ import annotations

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, includes, model_graded_qa, scorer
from inspect_ai.solver import generate, solver

HELLO = Sample(id="hello", input="Say hello.", target="hello")


@task
def words() -> Task:
    return Task(dataset=[HELLO, Sample(id="goodbye", input="Say goodbye.", target="hello")], scorer=includes(), epochs=2)


@task
def graded() -> Task:
    """By the policy itself."""
    return Task(dataset=[Sample(id="graded", input="Say hello.", target="hello")], scorer=[model_graded_qa(), includes()])


@scorer(metrics=[accuracy()])
def illegible() -> Any:
    async def score(state: Any, target: Any) -> Score:
        return Score.unscored(reason="the grade could not be read")

    return score


@task
def unreadable() -> Task:
    return Task(dataset=[Sample(id="unreadable", input="Say hello.", target="hello")], scorer=illegible())


@task
def unscored() -> Task:
    return Task(dataset=[Sample(id="unscored", input="Say hello.", target="hello")])


@solver
def breaks_down_once() -> Any:
    broken: list[str] = []

    async def solve(state: Any, generate: Any) -> Any:
        state = await generate(state)
        if not broken:
            broken.append(state.uuid)
            raise RuntimeError("the solver broke down")
        return state

    return solve


@task
def broken() -> Task:
    sample = Sample(id="broken", input="Say hello.", target="hello")
    return Task(dataset=[sample], solver=breaks_down_once(), scorer=includes())


@task
def limited() -> Task:
    """One message too many: the second call never comes."""
    sample = Sample(id="limited", input="Say hello.", target="hello")
    return Task(dataset=[sample], solver=[generate(), generate()], scorer=includes(), message_limit=2)
