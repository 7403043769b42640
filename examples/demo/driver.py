"""The session driver: opens sessions, gives each to the agent as a URL and a key, and closes it with the outcome's reward."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from examples.demo.processes import Child


class Service:
    """The control side of the service, as its admin. Close it with `aclose()`."""

    def __init__(self, url: str, admin_token: str) -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {admin_token}"}, timeout=60, trust_env=False
        )

    async def wait_until_ready(self) -> None:
        """Returns when the store and the engine answer. Raises RuntimeError with the service's reason after ten minutes."""
        deadline = time.monotonic() + 600
        reason = ""
        while time.monotonic() < deadline:
            try:
                response = await self._http.get("/readyz")
                if response.status_code == 200:
                    return
                reason = response.text
            except httpx.TransportError as error:
                reason = repr(error)
            await asyncio.sleep(0.5)
        raise RuntimeError(f"the service was not ready after ten minutes: {reason}")

    async def open_session(self, **body: Any) -> Mapping[str, Any]:
        return await self._json("POST", "/sessions", body)

    async def close_session(self, session_id: str, reward: float) -> None:
        await self._json("POST", f"/sessions/{session_id}/close", {"status": "completed", "reward": reward})

    async def session(self, session_id: str) -> Mapping[str, Any]:
        return await self._json("GET", f"/sessions/{session_id}")

    async def trajectories(self, session_id: str) -> Mapping[str, Any]:
        return await self._json("GET", f"/sessions/{session_id}/trajectories")

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        response = await self._http.request(method, path, json=body)
        if response.is_error:
            raise RuntimeError(f"{method} {path} answered {response.status_code}: {response.text[:500]}")
        return response.json()


class Agent:
    """The agent process: jobs go in as lines, outcomes come back as lines in any order."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._waiting: dict[str, asyncio.Future[Mapping[str, Any]]] = {}

    async def attempt(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """The outcome of `job`. Raises RuntimeError when the agent could not go on."""
        assert self._child.process is not None and self._child.process.stdin is not None
        future = asyncio.get_running_loop().create_future()
        self._waiting[job["job_id"]] = future
        self._child.process.stdin.write(json.dumps(job).encode() + b"\n")
        await self._child.process.stdin.drain()
        outcome = await future
        if outcome["error"]:
            raise RuntimeError(f"the agent gave up on session {job['job_id']}: {outcome['error']}")
        return outcome

    async def read_outcomes(self) -> None:
        """Hands outcomes to those who wait, until the agent ends."""
        assert self._child.process is not None and self._child.process.stdout is not None
        async for line in self._child.process.stdout:
            outcome = json.loads(line)
            future = self._waiting.pop(outcome["job_id"])
            # Cancelled while the demo is being stopped.
            if not future.done():
                future.set_result(outcome)


@dataclass(frozen=True, slots=True)
class Round:
    """The rollouts of one training step."""

    rewards: Sequence[float]
    completion_tokens: int
    session_ids: Sequence[str] = field(repr=False)

    @property
    def reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True, slots=True)
class Driver:
    """`job` holds what is the same in every job: model, max_tokens, extra_body."""

    service: Service
    agent: Agent
    tasks: Iterator[tuple[str, ...]]
    job: Mapping[str, Any]
    groups: int
    rollouts: int

    async def round(self, step: int) -> Round:
        """All rollouts of `step`, each in a closed session: `groups` tasks, `rollouts` attempts at each."""
        tasks = [next(self.tasks) for _ in range(self.groups)]
        attempts = [
            self._rollout(f"step-{step}-group-{number}", doors)
            for number, doors in enumerate(tasks)
            for _ in range(self.rollouts)
        ]
        outcomes = await asyncio.gather(*attempts)
        return Round(
            rewards=[outcome["reward"] for outcome in outcomes],
            completion_tokens=sum(outcome["completion_tokens"] for outcome in outcomes),
            session_ids=[outcome["job_id"] for outcome in outcomes],
        )

    async def _rollout(self, group_id: str, doors: Sequence[str]) -> Mapping[str, Any]:
        session = await self.service.open_session(
            task_id="-".join(doors),
            group_id=group_id,
            group_size=self.rollouts,
            # The stored logprobs are then exactly those of the policy that sampled.
            sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        )
        access = {"base_url": session["base_urls"]["openai"], "api_key": session["api_key"]}
        outcome = await self.agent.attempt({"job_id": session["session_id"], "doors": doors, **access, **self.job})
        await self.service.close_session(session["session_id"], outcome["reward"])
        return outcome
