"""Inspect (tested with 0.3.285): hooks that make a session of every attempt at a sample, in an unchanged evaluation.

    export VERBATIM_URL=http://127.0.0.1:8700 VERBATIM_BASE_URL=http://127.0.0.1:8700/v1 VERBATIM_API_KEY=none
    inspect eval task.py --model openai-api/verbatim/policy --epochs 8

Inspect finds them by their entry point; they do nothing without VERBATIM_URL. The epochs of a sample are its group, the first of its scores
is the reward. The calls of a scorer are in a session of their own that is not trained.

Inspect only warns of what hooks raise. So a call without a session gets a key that opens nothing: it is refused, and its sample fails.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from inspect_ai.hooks import Hooks, hooks
from inspect_ai.solver._task_state import sample_state

from trainer_client.sessions import Session, Sessions

TOKENS = ("VERBATIM_PROJECT_TOKEN", "VERBATIM_ADMIN_TOKEN")
SERVICE = "openai-api/verbatim/"
"""With which the names of models begin whose calls are recorded. No other call may be given a session's key."""
NO_KEY = "none"
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""What Inspect's letters are worth: correct, partially, incorrect, no answer."""
TIME_LIMITS = ("time", "working")


@dataclass
class RunningTask:
    """A task that runs: the group size, and the names of its scorers in order."""

    task: str
    epochs: int
    scorers: list[str]


@dataclass
class SampleAttempt:
    """An attempt at a sample. `grading`: of the calls of its scorers, once there is one."""

    session: Session
    eval_id: str
    scored: bool = False
    grading: Session | None = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)


@hooks(name="verbatim", description="Records every sample in a session of Verbatim's")
class VerbatimHooks(Hooks):
    def __init__(self) -> None:
        self._sessions: Sessions | None = None
        self._evaluations: dict[str, RunningTask] = {}
        self._attempts: dict[str, SampleAttempt] = {}
        """By the sample's uuid."""

    def enabled(self) -> bool:
        return "VERBATIM_URL" in os.environ

    async def on_task_start(self, data: Any) -> None:
        spec = data.spec
        roles = (spec.model_roles or {}).values()
        models = [spec.model, *(each.model for role in roles for each in (role if isinstance(role, list) else [role]))]
        if any(model.startswith(SERVICE) for model in models):
            token = next((found for name in TOKENS if (found := os.environ.get(name))), None)
            if token is None:
                raise ValueError(f"VERBATIM_URL is set, so {' or '.join(TOKENS)} is needed")
            self._sessions = self._sessions or Sessions(os.environ["VERBATIM_URL"], token)
            scorers = [each.name for each in spec.scorers or ()]
            self._evaluations[data.eval_id] = RunningTask(spec.task_id, spec.config.epochs or 1, scorers)

    async def on_sample_attempt_start(self, data: Any) -> None:
        """Waits while the service holds new groups back."""
        if (evaluation := self._evaluations.get(data.eval_id)) is None:
            return
        sample = str(data.summary.id)
        session = await self._open(
            session_id=_clean(f"{data.sample_id}-{data.attempt}"),
            task_id=sample,
            group_id=f"{evaluation.task}/{sample[:180]}",
            group_size=evaluation.epochs,
            metadata={"inspect_eval": data.eval_id, "epoch": data.summary.epoch},
        )
        self._attempts[data.sample_id] = SampleAttempt(session, data.eval_id)

    async def on_before_model_generate(self, data: Any) -> None:
        if data.model_name.startswith(SERVICE):
            headers = dict(data.config.extra_headers or {})
            data.config.extra_headers = headers | {"Authorization": f"Bearer {NO_KEY}"}
            key = await self._find_key()
            data.config.extra_headers = headers | {"Authorization": f"Bearer {key}"}

    async def _find_key(self) -> str:
        # `data.sample_id` is another id here than in the samples' own hooks.
        state = sample_state()
        if state is None or (attempt := self._attempts.get(state.uuid)) is None:
            return NO_KEY
        if not attempt.scored:
            return attempt.session.api_key
        async with attempt.lock:
            if attempt.grading is None:
                of = {"grades": attempt.session.session_id, "inspect_eval": attempt.eval_id}
                attempt.grading = await self._open(trained=False, task_id=str(state.sample_id), metadata=of)
        return attempt.grading.api_key

    async def on_sample_scoring(self, data: Any) -> None:
        if (attempt := self._attempts.get(data.sample_id)) is not None:
            attempt.scored = True

    async def on_sample_attempt_end(self, data: Any) -> None:
        if data.will_retry and (attempt := self._attempts.pop(data.sample_id, None)):
            await self._close(attempt, "failed", error=data.error.message if data.error else "the sample is tried again")

    async def on_sample_end(self, data: Any) -> None:
        if (attempt := self._attempts.pop(data.sample_id, None)) is not None:
            status, reward, error = judge(data.sample, self._evaluations[attempt.eval_id].scorers)
            await self._close(attempt, status, reward=reward, error=error)

    async def on_task_end(self, data: Any) -> None:
        for sample_id in [each for each, attempt in self._attempts.items() if attempt.eval_id == data.eval_id]:
            await self._close(self._attempts.pop(sample_id), "cancelled")
        self._evaluations.pop(data.eval_id, None)

    async def _open(self, **fields: Any) -> Session:
        assert self._sessions is not None
        return await anyio.to_thread.run_sync(partial(self._sessions.open, **fields))

    async def _close(self, attempt: SampleAttempt, status: str, **how: Any) -> None:
        """The grading first: if it fails, the reward is there all the same."""
        try:
            if attempt.grading is not None:
                await anyio.to_thread.run_sync(attempt.grading.close)
        finally:
            await anyio.to_thread.run_sync(partial(attempt.session.close, status, **how))


def judge(sample: Any, scorers: list[str]) -> tuple[str, float | None, str | None]:
    """Status, reward and error of the session of a sample. What it did until a limit ended it is scored, and trained."""
    if sample.error is not None:
        return "failed", None, sample.error.message
    status = "timeout" if sample.limit is not None and sample.limit.type in TIME_LIMITS else "completed"
    scores: Mapping[str, Any] = sample.scores or {}
    name = next((each for each in (*scorers, *scores) if each in scores), None)
    if name is None:
        return status, None, None
    value = scores[name].value
    reward = GRADES.get(value) if isinstance(value, str) else value
    if isinstance(reward, int | float) and math.isfinite(reward):
        return status, float(reward), None
    return "failed", None, f"score {name} is {value!r}, which is no reward"


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)
