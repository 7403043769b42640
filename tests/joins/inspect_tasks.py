"""Evaluations, which know nothing of sessions. Inspect loads this file."""

from __future__ import annotations

import os
from typing import Any

import openai
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, accuracy, includes, model_graded_qa, scorer
from inspect_ai.solver import generate, solver

HELLO = Sample(id="hello", input="Say hello.", target="hello")


@task
def words() -> Task:
    return Task(dataset=[HELLO, Sample(id="goodbye", input="Say goodbye.", target="hello")], scorer=includes(), epochs=2)


@solver
def asks_another_vendor() -> Any:
    """Which is the service under another name: what was sent a session's key would be answered."""

    async def solve(state: Any, generate: Any) -> Any:
        vendor = get_model("openai-api/other/policy", base_url=os.environ["VERBATIM_BASE_URL"], api_key="sk-another")
        try:
            await vendor.generate(state.input_text)
        except openai.AuthenticationError:
            return state
        raise RuntimeError("another vendor was sent a session's key")

    return solve


@task
def graded() -> Task:
    """By the policy itself."""
    sample = Sample(id="graded", input="Say hello.", target="hello")
    return Task(dataset=[sample], solver=[asks_another_vendor(), generate()], scorer=[model_graded_qa(), includes()])


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
