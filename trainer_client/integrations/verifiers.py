"""verifiers (tested with 0.4.0): each attempt at a task is a session, closed with what its trace was scored.

    trace = await run(config, task, sessions, group_id="task-7", group_size=8)

Its own command, with a project's key, needs nothing of this while it runs; `close_rollouts` closes its sessions afterwards.

A trace that nothing scored has the reward 0.0 in verifiers. Its session gets none: its group waits for a reward.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ResourceNotFound
from trainer_client.sessions import AsyncSessions, Session, Sessions

if TYPE_CHECKING:
    from verifiers.v1 import AgentConfig, Task, Trace

log = logging.getLogger(__name__)

JUDGED_BY = {"ok", "is_timeout", "rewards", "errors"}
"""Fields of a trace."""
ABSENT = "absent"


async def run(config: AgentConfig, task: Task, sessions: AsyncSessions, **fields: Any) -> Trace:
    """The trace of one rollout. Each attempt that `config.retries` allows is a session of its own, which replaces the failed one in its
    group. `fields`: of `POST /sessions`; `task_id` is the task's key unless given. Raises ServiceError, and what `Agent.run` does."""
    from verifiers.v1.utils.retries import RetryState, backoff

    once = config.model_copy(update={"retries": type(config.retries)()})
    state = RetryState(config.retries)
    errors: list[Any] = []
    while True:
        trace = await _attempt(once, task, sessions, {"task_id": task.key, **fields})
        if trace.ok or state.next_error(trace.errors) is None:
            trace.errors = errors + trace.errors
            return trace
        await asyncio.sleep(backoff(len(errors)))
        errors += trace.errors


async def _attempt(config: AgentConfig, task: Task, sessions: AsyncSessions, fields: Mapping[str, Any]) -> Trace:
    from verifiers.v1 import Agent, EvalClientConfig

    async with await sessions.open(**fields) as session:
        # verifiers takes a key by the name of its variable alone, and keeps those called so from agents: a sibling's must not get there.
        variable = f"VERBATIM_API_KEY_{session.session_id}"
        os.environ[variable] = session.api_key
        try:
            client = EvalClientConfig(base_url=session.base_urls["openai"], api_key_var=variable)
            trace = await Agent(config.model_copy(update={"client": client})).run(task)
        finally:
            del os.environ[variable]
        status, reward, error = judge(trace.model_dump(include=JUDGED_BY))
        await session.close(status, reward=reward, error=error)
    return trace


def judge(trace: Mapping[str, Any]) -> tuple[str, float | None, str | None]:
    """Status, reward and error of the session of a trace. What an agent did before its time was up counts if it was scored."""
    if not trace["ok"]:
        last = (trace.get("errors") or [{"type": "error", "message": "the trace is not ok"}])[-1]
        return "failed", None, f"{last['type']}: {last['message']}"
    status = "timeout" if trace.get("is_timeout") else "completed"
    rewards = (trace.get("rewards") or {}).values()
    if not rewards or any(each is None for each in rewards):
        return status, None, None
    # In JSON a score that is no number is null.
    return status, math.fsum(each.get("weight", 1.0) * _number(each.get("score")) for each in rewards), None


def _number(score: float | None) -> float:
    return math.nan if score is None else score


def close_rollouts(traces: Path | str, sessions: Sessions, project: str) -> dict[str, str]:
    """Close the sessions of a finished run with what its `traces.jsonl` says; the traces of a task that are ok are a group. Returns each
    session's status, `absent` for one that never called the model. Sessions of agents that are not trained are cancelled. May be repeated.
    Raises OSError, ValueError for a file that is none of verifiers', ServiceError."""
    closed: dict[str, str] = {}
    read = read_traces(traces)
    sizes = Counter(trace["group"]["group_id"] for trace in read if _is_member(trace))
    for trace in read:
        session = Session({"session_id": f"{project}.{trace['id']}", "api_key": "", "base_urls": {}}, sessions)
        group = {**trace["group"], "group_size": sizes[trace["group"]["group_id"]]} if _is_member(trace) else {}
        try:
            if trace["trainable"]:
                status, reward, error = judge(trace)
                session.close(status, reward=reward, error=error, **group)
            else:
                session.close("cancelled", error="its agent is not trained")
        except ResourceNotFound:
            log.warning("there is no session %s", session.session_id)
            session.status = ABSENT
        closed[session.session_id] = session.status
    return closed


def read_traces(path: Path | str) -> list[dict[str, Any]]:
    """What decides on each trace of a `traces.jsonl`, and its group. Raises OSError, ValueError."""
    traces: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            episode = json.loads(line)
            run = (episode.get("run") or {}).get("id") or ""
            for trace in episode["traces"]:
                agent, task = trace["agent"], trace["task"]["key"]
                group = {"group_id": f"{run}/{task}/{agent.get('name', '')}", "task_id": task}
                judged = {name: trace.get(name) for name in JUDGED_BY} | {"ok": trace["ok"]}
                traces.append({"id": trace["id"], "trainable": agent.get("trainable", True), "group": group, **judged})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: no episode of verifiers' ({type(error).__name__}: {error})") from error
    return traces


def _is_member(trace: Mapping[str, Any]) -> bool:
    return bool(trace["trainable"] and trace["ok"])
