"""OpenEnv (tested with 0.10.0) and TRL (1.16.0): sessions for TRL's `HarnessRolloutWorker`, whose agents call the service.

    worker = HarnessRolloutWorker(
        harness_session_factory=partial(VerbatimSessionFactory, run=run_agent, judge=grade), model_name="policy", ...
    )
    AsyncGRPOTrainer(..., rollout_worker=worker)

`run(task, session)` runs the agent with `session.environment` until it is done; `judge(task, session)` gives the reward. Both are functions
of a module: TRL calls them in a process of its own. The trace that TRL trains has each trained call once, with the mask of the row that
trains it: of sub-agents, edited histories, streams and every dialect. It is read once the session is closed, so that it changes no more.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, VerifyResult

from contract.sessions import SamplingOverrides
from reconstruct.trace import trace_entries
from trainer_client.sessions import TIMEOUTS, Session, Sessions, describe_end

TOKENS = ("VERBATIM_PROJECT_TOKEN", "VERBATIM_ADMIN_TOKEN")
SAMPLING = frozenset(each.name for each in fields(SamplingOverrides))
NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0}
"""What TRL's sampling says besides, and the service does not override."""
SCORED = ("completed", "timeout")

Run = Callable[[Any, Session], int | None]
"""Of a task and its session. Returns the agent's exit code."""
Judge = Callable[[Any, Session], float | None]
"""The reward; None: there is none, which is not 0."""


class Stopped(RuntimeError):
    """The rollout was closed before its agent was done."""


class AgentSession(ResourceSession):
    """One rollout, whose agent runs in a thread from the beginning. `session` is the service's."""

    def __init__(self, task: Any, session: Session, run: Run, judge: Judge, timeout_seconds: float) -> None:
        self.task, self.session = task, session
        self._judge, self._timeout_seconds = judge, timeout_seconds
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._code = 0
        self._reward: float | None = None
        self._error: BaseException | None = None
        self._unscored: Exception | None = None
        threading.Thread(target=self._run, args=(run,), daemon=True, name=f"agent-{session.session_id}").start()

    def _run(self, run: Run) -> None:
        try:
            self._code = run(self.task, self.session) or 0
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """The agent's exit code. Raises TimeoutError when its time ran out, and what `run` raises."""
        seconds = self._timeout_seconds if timeout_s is None else timeout_s
        if not self._ended.wait(seconds):
            self._error = TimeoutError(f"the agent was not done after {seconds:g} seconds")
        if isinstance(self._error, TIMEOUTS):
            raise TimeoutError(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        return self._code

    def fetch_training_trace(self) -> TrainingTrace:
        """What the rollout trains. Judges it and closes its session first. Raises ValueError where a call shows images, which TRL cannot
        train."""
        self._finish()
        entries = list(trace_entries(self.session.calls(), self.session.rows()))
        if any(entry["metadata"]["media"] for entry in entries):
            raise ValueError(f"session {self.session.session_id} has images, which a trace of token ids does not carry")
        return TrainingTrace.from_entries(entries)

    def fetch_proxy_trace(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.fetch_training_trace().to_trace_entries()
        return entries

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """The reward that the session was closed with; None for one that failed. Raises what the judge raised."""
        self._finish()
        if self._unscored is not None:
            raise self._unscored
        return VerifyResult(env_reward=self._reward if self.session.status in SCORED else None, done=True)

    def _finish(self) -> None:
        with self._lock:
            if self.session.status != "open":
                return
            try:
                self._reward = self._judge(self.task, self.session)
            except Exception as failure:
                # Here TRL would take some of them for a broken trace, and stop: `verify` raises it.
                self._unscored = failure
            if self._reward is None:
                self.session.close("failed", error=describe_end(self._unscored)[1] or "the judge gave no reward")
            else:
                status, error = describe_end(self._error)
                self.session.close(status, reward=float(self._reward), error=error)

    def close(self) -> None:
        """End it. An agent that still runs gets no more answers."""
        with self._lock:
            if self.session.status == "open":
                stopped = self._error is None
                self._error = self._error or Stopped("the rollout was closed before it was judged")
                status, error = describe_end(self._error)
                self.session.close("cancelled" if stopped else status, error=error)
        self._ended.set()

    def initial_messages(self) -> list[dict[str, Any]]:
        return self.task if isinstance(self.task, list) else [{"role": "user", "content": str(self.task)}]

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error="the agent has its own tools")


class VerbatimSessionFactory(ResourceSessionFactory[AgentSession]):
    """`url` and `token`: default VERBATIM_URL, and VERBATIM_PROJECT_TOKEN or VERBATIM_ADMIN_TOKEN. `sampling` is TRL's, and overrides what
    agents send. `opened`: further fields of `POST /sessions`.

    TRL trains what it is given, so its sessions are left out of training by leases. With a `group_size` they are groups that can be leased
    as well, one for each of TRL's. Raises ValueError where something is missing."""

    def __init__(
        self,
        *,
        run: Run,
        judge: Judge,
        url: str | None = None,
        token: str | None = None,
        group_size: int | None = None,
        timeout_seconds: float = 600.0,
        sampling: Mapping[str, Any] | None = None,
        **opened: Any,
    ) -> None:
        url = url or os.environ.get("VERBATIM_URL")
        token = token or next((found for name in TOKENS if (found := os.environ.get(name))), None)
        if not url or not token:
            raise ValueError(f"the factory needs VERBATIM_URL and {' or '.join(TOKENS)}, or url= and token=")
        self._sessions = Sessions(url, token)
        self._run, self._judge, self._timeout_seconds = run, judge, timeout_seconds
        self._group_size, self._opened, self._name = group_size, opened, f"trl-{uuid.uuid4().hex[:12]}"
        given = dict(sampling or {})
        # What is left, the service refuses by its name.
        self._sampling = {name: value for name, value in given.items() if name in SAMPLING or value != NEUTRAL.get(name)}

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> AgentSession:
        """A rollout whose agent has begun; `seed` names its group. Raises ServiceError: then no agent runs."""
        group: dict[str, Any] = {"trained": False}
        if self._group_size is not None:
            group = {"group_id": f"{self._name}-{episode_id if seed is None else seed}", "group_size": self._group_size}
        metadata = {**self._opened.get("metadata", {}), "episode_id": episode_id}
        session = self._sessions.open(**{**self._opened, **group, "sampling": self._sampling, "metadata": metadata})
        return AgentSession(task, session, self._run, self._judge, self._timeout_seconds)
