"""The course of a generation: every line of the file is attempted round by round until enough of its attempts are accepted.

A round is one task of the service, whose id is made from the line's. All there is to know is in those tasks: a generation that was
broken off submits them again, which changes nothing, and goes on from what they say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import msgpack

from cli.control import complaint
from cli.export import PACKED, ArchiveApi
from cli.generation.attempts import Accept, Attempt, Input, Limits, Way, best, judged
from cli.refusal import Refusal
from cli.tables import ended
from rollout.attempts import ENDED

POLL_SECONDS = 1.0
UNDER_WAY = ("queued", "running")


class Watching(Protocol):
    def show(self, ways: Sequence[Way]) -> None:
        """How it stands now."""

    def told(self, way: Way) -> None:
        """The line's last attempt has ended."""


class Rounds:
    """`run` brings every line to its end. `keep` is given each attempt that is kept, and says whether it could be."""

    def __init__(
        self,
        api: GenerationApi,
        generation: str,
        inputs: Sequence[Input],
        limits: Limits,
        accept: Accept,
        keep: Callable[[Attempt], bool],
    ) -> None:
        self.ways = [Way(given) for given in inputs]
        self._api = api
        self._generation = generation
        self._limits = limits
        self._accept = accept
        self._keep = keep

    def run(self, watching: Watching, stopped: Callable[[float], bool]) -> bool:
        """Whether all came to their end. `stopped` waits so many seconds, or shorter when it is to stop, which it says. Raises
        `Refusal`."""
        for way in self.ways:
            self._begin(way, self._limits.samples)
            if stopped(0):
                return False
        while under_way := [way for way in self.ways if not way.done]:
            began = time.monotonic()
            for way in under_way:
                self._look(way)
                if way.done:
                    watching.told(way)
                if stopped(0):
                    return False
            watching.show(self.ways)
            if any(not way.done for way in under_way) and stopped(max(0.0, POLL_SECONDS - (time.monotonic() - began))):
                return False
        return True

    def _begin(self, way: Way, samples: int) -> None:
        way.round += 1
        body = way.given.task(self._generation, way.round, samples)
        task = self._api.submit(way.given, body)
        way.task_id, way.rollouts = task["task_id"], task["rollouts"]

    def _look(self, way: Way) -> None:
        task = self._api.task(way.task_id)
        way.rollouts = task["rollouts"]
        over = task["status"] not in UNDER_WAY
        if over or ended(task) > self._judged(way):
            way.attempts += self._newly_ended(way, task)
        if not over:
            return
        following = self._limits.following(len(way.attempts), len(way.accepted))
        if task["status"] == "cancelled" or following <= 0:
            way.kept = best(way.accepted, self._limits.want, self._keep)
            way.done = True
        else:
            self._begin(way, following)

    def _newly_ended(self, way: Way, task: dict[str, object]) -> Iterator[Attempt]:
        for rollout in self._api.rollouts(way.task_id):
            if rollout["status"] in ENDED and not way.judged(rollout["index"]):
                session_id = rollout["session_id"]
                tokens = None if session_id is None else self._api.sampled_tokens(session_id)
                yield judged(rollout, task, tokens, self._accept)

    def _judged(self, way: Way) -> int:
        return sum(attempt.task_id == way.task_id for attempt in way.attempts)


# The tasks of a service as a generation uses them: over one connection, which outlives a restart of the service.


class GenerationApi(ArchiveApi):
    """Every request raises `Refusal` when it failed for good."""

    def submit(self, given: Input, body: dict[str, Any]) -> dict[str, Any]:
        """The task, new or as it was submitted before."""
        response = self._send("POST", "/tasks", json=body, passes=(400, 409))
        if response.is_error:
            raise Refusal(f"line {given.number}: {complaint(response)}")
        told: dict[str, Any] = response.json()
        return told

    def task(self, task_id: str) -> dict[str, Any]:
        told: dict[str, Any] = self._send("GET", f"/tasks/{quote(task_id, safe='')}").json()
        return told

    def rollouts(self, task_id: str) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self._send("GET", f"/tasks/{quote(task_id, safe='')}/rollouts").json()["rollouts"]
        return told

    def sampled_tokens(self, session_id: str) -> int | None:
        """None for a session that is gone, or whose records contradict each other."""
        path = f"/sessions/{quote(session_id, safe='')}/trajectories"
        response = self._send("GET", path, headers={"Accept": PACKED}, passes=(404, 500))
        return None if response.is_error else int(msgpack.unpackb(response.content)["accounting"]["sampled_tokens"])
