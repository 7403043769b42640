"""Harbor (tested with 0.25.0): a job plug-in that makes a session of every trial of an unchanged job.

    harbor run --plugin verbatim -p tasks -a mini-swe-agent -m openai/policy -k 8 --skip-credential-checks

The attempts at one task with one agent are a group; the verifier's reward closes the session, and the trial's `rollout_details` get the
exact ids and logprobs, as has `agent/verbatim.trajectory.json` in ATIF. An agent is given base URL and key as Harbor gives it any other
endpoint: every agent works that can be told one, in every sandbox. A trial without a session ends before its agent runs, which would take
the operator's own key to its vendor.

Agents are wrapped where Harbor makes them and not in the job's configuration: that is compared when a job is resumed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.models.job.plugin import BaseJobPlugin
from harbor.trial.hooks import TrialEvent, TrialHookEvent

from contract.errors import ClientError
from reconstruct.trace import is_trained_whole
from reconstruct.trajectory import Trajectory
from trainer_client.integrations.atif import describe_session
from trainer_client.sessions import Session, Sessions

log = logging.getLogger(__name__)

KEY_VARIABLE = "VERBATIM_SESSION_KEY"
"""The variable, in the agent's own environment, by which Harbor is told the key."""
TOKENS = ("VERBATIM_PROJECT_TOKEN", "VERBATIM_ADMIN_TOKEN")
ENDPOINTS = {"anthropic": "anthropic", "gemini": "gemini", "google": "gemini"}
"""By provider, the first part of a model's name; others speak one of OpenAI's dialects."""
TRAJECTORY = "verbatim.trajectory.json"
"""Of a trial, in its `agent` folder: its session in ATIF."""
AGENT_TIMED_OUT = "AgentTimeoutError"
CANCELLED = "CancelledError"


class NoSession(RuntimeError):
    """The trial has no session, so its agent must not run."""


class VerbatimPlugin(BaseJobPlugin):
    """`url` and `token`: default VERBATIM_URL, and VERBATIM_PROJECT_TOKEN or VERBATIM_ADMIN_TOKEN. `reward_key`: which of the verifier's
    rewards counts where there are several. `grouped=false`: each trial is a group of its own. `retry_seconds`: for how long a service that
    is away is asked again. Raises ValueError where something is missing."""

    def __init__(
        self,
        *,
        url: str | None = None,
        token: str | None = None,
        reward_key: str = "reward",
        grouped: bool = True,
        retry_seconds: float = 120.0,
    ) -> None:
        super().__init__()
        url = url or os.environ.get("VERBATIM_URL")
        token = token or next((found for name in TOKENS if (found := os.environ.get(name))), None)
        if not url or not token:
            raise ValueError(f"the plug-in needs VERBATIM_URL and {' or '.join(TOKENS)}, or --plugin-kwarg url=... token=...")
        self._sessions = Sessions(url, token, retry_seconds=retry_seconds)
        self._reward_key, self._grouped = reward_key, grouped
        self._agents: list[Any] = []
        self._open: dict[str, Session] = {}
        self._reported: dict[str, set[str]] = {}
        """Calls that are in the details of a step. Both by the trial's id, which is its agent's `context_id`."""

    async def on_job_start(self, job: Any) -> None:
        self._job, self._size = str(job.id), max(1, job.config.n_attempts)
        self._make_agent = AgentFactory.create_agent_from_config
        AgentFactory.create_agent_from_config = self._make_wrapped
        job.add_hook(TrialEvent.AGENT_START, self._open_session)
        job.add_hook(TrialEvent.END, self._close_session)

    async def on_job_end(self, job_result: Any) -> None:
        AgentFactory.create_agent_from_config = self._make_agent
        for trial, session in self._open.items():
            await self._close(trial, session, "cancelled", None, None)
        self._sessions.close()

    def _make_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        """Harbor's agent, which runs in a session alone and tells what it sampled."""
        agent = self._make_agent(*args, **kwargs)
        agent.run, agent.resume, agent.load = (self._guard(agent, each) for each in (agent.run, agent.resume, agent.load))
        populate = agent.populate_context_post_run

        def populate_context_post_run(context: Any) -> None:
            # First: Harbor's agents fill in only what is empty.
            populate(context)
            self._report(agent, context)

        agent.populate_context_post_run = populate_context_post_run
        self._agents.append(agent)
        return agent

    def _guard(self, agent: Any, run: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def run_in_session(*args: Any, context: Any, **kwargs: Any) -> None:
            if str(agent.context_id) not in self._open:
                raise NoSession("the trial has no session of Verbatim's")
            await run(*args, context=context, **kwargs)
            if not context.is_empty():
                # Such a context is not populated any more.
                await asyncio.to_thread(self._report, agent, context)

        return run_in_session

    async def _open_session(self, event: TrialHookEvent) -> None:
        """Of several steps the first opens it. Whatever is raised here fails the trial alone."""
        trial = str(event.trial_id)
        if trial in self._open:
            return
        agents = [agent for agent in self._agents if str(agent.context_id) == trial]
        if len(agents) != 1:
            raise NoSession(f"the trial has {len(agents)} agents that could be recorded: it takes one, and no simulated user")
        (agent,) = agents
        # Waits while the service holds new groups back: nothing of the agent's time has passed.
        session = await asyncio.to_thread(lambda: self._sessions.open(**self._describe(event)))
        self._open[trial], self._reported[trial] = session, set()
        provider = (agent.model_name or "").partition("/")[0]
        agent._base_url = session.base_urls[ENDPOINTS.get(provider, "openai")]
        agent._model_api_key_name = KEY_VARIABLE
        agent._extra_env[KEY_VARIABLE] = session.api_key

    def _describe(self, event: TrialHookEvent) -> dict[str, Any]:
        """The session's fields. A retry is another trial of the same name, and its session replaces the one that failed."""
        agent = event.config.agent
        name = agent.import_path or agent.name or ""
        which = hashlib.sha256(repr((name, agent.model_name, agent.kwargs)).encode()).hexdigest()[:8]
        group = {"group_id": f"{self._job}/{event.task_name[:180]}/{which}", "group_size": self._size} if self._grouped else {}
        session_id = re.sub(r"[^A-Za-z0-9._-]", "-", event.trial_name)[:90]
        metadata = {"harbor_job": self._job, "harbor_trial": event.trial_name, "agent": name}
        return {
            "session_id": f"{session_id}-{str(event.trial_id)[:8]}",
            "task_id": event.task_name,
            "metadata": metadata,
            **group,
        }

    async def _close_session(self, event: TrialHookEvent) -> None:
        mine = [agent for agent in self._agents if agent.context_id == event.trial_id]
        self._agents = [agent for agent in self._agents if agent not in mine]
        session = self._open.pop(str(event.trial_id), None)
        self._reported.pop(str(event.trial_id), None)
        if session is None:
            return
        status, reward, error = self._judge(event.result)
        await self._close(event.trial_name, session, status, reward, error)
        state = {**self._describe(event), "status": session.status, "reward": reward}
        await asyncio.to_thread(self._write_trajectory, mine[0].logs_dir / TRAJECTORY, state, session)

    async def _close(self, trial: str, session: Session, status: str, reward: float | None, error: str | None) -> None:
        """An error raised here would end the whole job."""
        try:
            await asyncio.to_thread(lambda: session.close(status, reward=reward, error=error))
        except ClientError as failure:
            log.error("%s: session %s could not be closed: %s", trial, session.session_id, failure)

    def _write_trajectory(self, path: Path, state: dict[str, Any], session: Session) -> None:
        """Beside what Harbor makes of the agent's own log, whose steps are not all calls. An error here, too, would end the job."""
        try:
            if document := describe_session(state, session.calls(), session.rows()):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
        except (ClientError, OSError) as failure:
            log.warning("session %s: its trial has no %s: %s", session.session_id, path.name, failure)

    def _judge(self, result: Any) -> tuple[str, float | None, str | None]:
        """How the session ends. What an agent did before its time was up is graded, and trained, as everything else. Of several steps the
        first that failed counts: the trial itself has no error then."""
        failures = [each.exception_info for each in (result, *(result.step_results or ()))]
        failure = next((each for each in failures if each is not None), None)
        error = None if failure is None else f"{failure.exception_type}: {failure.exception_message}"
        reward = self._choose_reward(result.verifier_result.rewards if result.verifier_result else None)
        kind = None if failure is None else failure.exception_type
        if kind == CANCELLED:
            return "cancelled", None, error
        if kind == AGENT_TIMED_OUT:
            return "timeout", reward, error
        if kind is None and reward is None:
            return "failed", None, "the verifier gave no reward"
        return ("completed" if kind is None else "failed"), reward, error

    def _choose_reward(self, rewards: Any) -> float | None:
        if not rewards:
            return None
        chosen = rewards.get(self._reward_key, next(iter(rewards.values())) if len(rewards) == 1 else None)
        return None if chosen is None else float(chosen)

    def _report(self, agent: Any, context: Any) -> None:
        if (session := self._open.get(str(agent.context_id))) is None:
            return
        try:
            reported = self._reported[str(agent.context_id)]
            context.rollout_details = describe_rollout(session.calls(), session.rows(), reported)
            reported.update(call_id for detail in context.rollout_details for call_id in detail["extra"]["call_id"])
        except ClientError as failure:
            log.warning("session %s: its trial has no rollout details: %s", session.session_id, failure)


def describe_rollout(
    calls: Sequence[dict[str, Any]], rows: Sequence[Trajectory], leave_out: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Harbor's `rollout_details`: one entry per row, the main agent's first, with lists over the calls that are trained whole in it. So
    each sampled token is in one place. They have no mask and no images: calls that need one are left out."""
    by_id = {call["call_id"]: call for call in calls if call["call_id"] not in leave_out}
    details = []
    for row in sorted(rows, key=lambda row: row.role != "main"):
        turns = [by_id[call_id] for call_id in row.call_ids if call_id in by_id and is_trained_whole(row, by_id[call_id])]
        if not turns:
            continue
        details.append(
            {
                "prompt_token_ids": [turn["prompt_ids"] for turn in turns],
                "completion_token_ids": [turn["completion_ids"] for turn in turns],
                "logprobs": [turn["logprobs"] for turn in turns],
                "extra": {
                    "call_id": [turn["call_id"] for turn in turns],
                    "role": [row.role for _ in turns],
                    "weight_versions": [turn["weight_versions"] for turn in turns],
                },
            }
        )
    return details
