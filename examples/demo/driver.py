"""The session driver: opens sessions, gives each to the agent as a URL and a key, and closes it with the outcome's reward."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from examples.demo.processes import Child

Outcome = Mapping[str, Any]
"""What the agent says of one attempt; its `job_id` is the session's id."""


class Service:
    """The control side of the service, as its admin. Close it with `aclose()`."""

    def __init__(self, url: str, admin_token: str) -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {admin_token}"}, timeout=60, trust_env=False
        )

    async def wait_until_ready(self, replicas: int) -> None:
        """Returns when the store and all `replicas` answer. Raises RuntimeError with the service's reason after ten minutes."""
        deadline = time.monotonic() + 600
        reason = ""
        while time.monotonic() < deadline:
            try:
                response = await self._http.get("/readyz")
                reason = response.text
                if response.status_code == 200 and await self._serving() == replicas:
                    return
            except httpx.TransportError as error:
                reason = repr(error)
            await asyncio.sleep(0.5)
        raise RuntimeError(f"the service was not ready after ten minutes: {reason}")

    async def open_session(self, **body: Any) -> Mapping[str, Any] | None:
        """None when the service lets no new group begin now; it has held the request for a while before it said so."""
        response = await self._http.post("/sessions", json=body)
        return None if response.status_code == 429 else _answer(response)

    async def close_session(self, session_id: str, reward: float) -> None:
        await self._json("POST", f"/sessions/{session_id}/close", {"status": "completed", "reward": reward})

    async def calls(self, session_id: str) -> list[Mapping[str, Any]]:
        return await self.listed(f"/sessions/{session_id}/calls", "calls")

    async def trajectories(self, session_id: str) -> Mapping[str, Any]:
        return await self.get(f"/sessions/{session_id}/trajectories")

    async def get(self, path: str) -> Any:
        """Raises RuntimeError with what the service says against it."""
        return await self._json("GET", path)

    async def listed(self, path: str, name: str) -> list[Mapping[str, Any]]:
        """What is under `name` on all pages of GET `path`."""
        found: list[Mapping[str, Any]] = []
        cursor: str | None = ""
        while cursor is not None:
            page = await self.get(path + (f"?cursor={cursor}" if cursor else ""))
            found, cursor = found + page[name], page["cursor"]
        return found

    async def download(self, path: str) -> bytes:
        """The bytes of GET `path`. Raises RuntimeError as `get` does."""
        response = await self._http.get(path)
        return response.content if response.is_success else bytes(_answer(response))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _serving(self) -> int:
        """How many replicas serve."""
        replicas = (await self.get("/weights"))["replicas"].values()
        return sum(replica["healthy"] for replica in replicas)

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        return _answer(await self._http.request(method, path, json=body))


def _answer(response: httpx.Response) -> Any:
    if response.is_error:
        asked = f"{response.request.method} {response.request.url.path}"
        raise RuntimeError(f"{asked} answered {response.status_code}: {response.text[:500]}")
    return response.json()


class Agent:
    """The agent process: jobs go in as lines, outcomes come back as lines in any order."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}

    async def attempt(self, job: Mapping[str, Any]) -> Outcome:
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
class Driver:
    """`job` holds what is the same in every job: model, max_tokens, extra_body. `groups` are rolled out at once."""

    service: Service
    agent: Agent
    tasks: Iterator[tuple[str, ...]]
    job: Mapping[str, Any]
    groups: int
    rollouts: int

    async def round(self, step: int) -> list[Outcome]:
        """All rollouts of `step`, each in a closed session: `groups` tasks, `rollouts` attempts at each."""
        tasks = [(f"step-{step}-group-{number}", next(self.tasks)) for number in range(self.groups)]
        rolled_out = await asyncio.gather(
            *(self._rollout(group_id, doors) for group_id, doors in tasks for _ in range(self.rollouts))
        )
        return list(rolled_out)

    async def stream(self, stopping: asyncio.Event) -> list[Outcome]:
        """All rollouts until `stopping`: where a group has ended the next is begun, as soon as the service lets it in. Those that
        are under way at the end are finished."""
        numbers = itertools.count(1)
        lines = await asyncio.gather(*(self._groups(numbers, stopping) for _ in range(self.groups)))
        return [outcome for line in lines for outcome in line]

    async def _groups(self, numbers: Iterator[int], stopping: asyncio.Event) -> list[Outcome]:
        """One group after the other."""
        outcomes: list[Outcome] = []
        while not stopping.is_set():
            group_id, doors = f"group-{next(numbers)}", next(self.tasks)
            while not stopping.is_set():
                if first := await self.service.open_session(**self._member(group_id, doors)):
                    others = [self._rollout(group_id, doors) for _ in range(self.rollouts - 1)]
                    outcomes += await asyncio.gather(self._attempt(first, doors), *others)
                    break
        return outcomes

    async def _rollout(self, group_id: str, doors: Sequence[str]) -> Outcome:
        session = await self.service.open_session(**self._member(group_id, doors))
        if session is None:
            raise RuntimeError(f"the service refused a session of {group_id}, which it is not told to hold back")
        return await self._attempt(session, doors)

    async def _attempt(self, session: Mapping[str, Any], doors: Sequence[str]) -> Outcome:
        """The outcome of one attempt, and its session closed with it."""
        access = {"base_url": session["base_urls"]["openai"], "api_key": session["api_key"]}
        outcome = await self.agent.attempt({"job_id": session["session_id"], "doors": doors, **access, **self.job})
        await self.service.close_session(session["session_id"], outcome["reward"])
        return outcome

    def _member(self, group_id: str, doors: Sequence[str]) -> dict[str, Any]:
        """A session of the group, as it is opened."""
        # The stored logprobs are then exactly those of the policy that sampled.
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        return {"task_id": "-".join(doors), "group_id": group_id, "group_size": self.rollouts, "sampling": sampling}
