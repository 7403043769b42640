"""Many rollouts of the example tasks by real command-line agents, over nodes that are killed while they run them.

    RolloutTrial(folder, exercises(200, 4, seed=1, hang_seconds=30), seed=1, nodes=3).run(pause_seconds=10)

Real are the agents, their sandboxes, the nodes, the service and Redis, each in processes of their own; the engine is scripted
(rollout_plays.py). Which node is killed follows from the seed, when it is killed from the pauses.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from contract.attempts import ENDED
from examples.learn.agents import with_agents
from tests.harnesses.node_victims import NodeVictim
from tests.harnesses.rollout_accounts import Accounted, account
from tests.harnesses.rollout_plays import Exercise, Plays
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import running_redis
from tests.support.service.verbatim_process import Serving

WINDOW = 131_072
POLL_SECONDS = 0.5
LEASE_SECONDS = 10
ROLLOUTS_PER_KILL = 4
"""So many have to end for each: on a slow machine nothing would ever end between one kill and the next."""
SLOTS = ("--prepare", "1", "--ready", "1", "--run", "2", "--evaluate", "1")


@dataclass(frozen=True)
class Tried:
    """`kills` by node, `drawn` by play: what conversations were given, those of lost attempts included."""

    seconds: float
    kills: Counter[str]
    drawn: Counter[str]
    accounted: Accounted


class RolloutTrial:
    """`most_seconds`: by then every task has ended, or something is wrong. `variables`: of the nodes, by which runtimes see the agents."""

    def __init__(
        self,
        folder: Path,
        given: Sequence[Exercise],
        *,
        seed: int,
        nodes: int,
        most_seconds: float = 7200.0,
        note: Callable[[str], None] = lambda line: None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._given = given
        self._dice = random.Random(seed)
        self._note = note
        self._most_seconds = most_seconds
        self._variables = with_agents() if variables is None else variables
        self._kills: Counter[str] = Counter()
        self._nodes = nodes
        self._engine = ScriptedEngine("qwen3", updatable=False, max_model_len=WINDOW)
        self._plays = Plays(self._engine.family, given, seed)
        self._engine.script = self._plays

    def run(self, *, pause_seconds: float, most_kills: int | None = None) -> Tried:
        """After every pause a node that is running something is killed, unless too little was done since the last kills. Raises
        AssertionError, with the ends of the logs as its note, when something is lost, doubled or not as it was sampled."""
        victims: list[NodeVictim] = []
        try:
            with ExitStack() as stack:
                redis = stack.enter_context(running_redis())
                engine = stack.enter_context(self._engine)
                flags = ("--engine", engine.url, "--engine-api", "token", "--redis", redis.url, "--log-level", "warning")
                service = stack.enter_context(Serving(*flags, data_dir=self._folder / "service"))
                for number in range(self._nodes):
                    lease = ("--lease-seconds", str(LEASE_SECONDS))
                    # Runtimes are told apart by their node's name on the whole machine, on which another trial may be running.
                    name = f"n{number}-{os.getpid()}"
                    victim = NodeVictim(name, self._folder, service.url, *SLOTS, *lease, **self._variables)
                    stack.callback(victim.stop)
                    victims.append(victim)
                return self._tried(service, victims, pause_seconds, most_kills)
        except BaseException as error:
            error.add_note("\n\n".join(f"{victim.name}: {victim.written[-3000:]}" for victim in victims))
            raise

    def _tried(self, service: Serving, victims: Sequence[NodeVictim], pause: float, most: int | None) -> Tried:
        for exercise in self._given:
            answer = service.request("POST", "/tasks", json=exercise.submitted())
            assert answer.status_code == 201, answer.text
        begun = time.monotonic()
        for victim in victims:
            victim.start()
        killed_at = time.monotonic()
        rollouts = sum(exercise.samples for exercise in self._given)
        while left := self._left(service):
            spent = time.monotonic() - begun
            assert spent < self._most_seconds, f"{left} rollouts have not ended after {spent:.0f} s"
            due = time.monotonic() - killed_at >= pause and self._may_kill(rollouts - left, most)
            if due and self._killed(service, victims):
                killed_at = time.monotonic()
                self._note(f"{spent:.0f} s: {self._kills.total()} kills, {left} rollouts left")
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - begun
        accounted = account(service.url, self._given, self._engine.generations)
        return Tried(seconds, self._kills, self._plays.drawn, accounted)

    def _left(self, service: Serving) -> int:
        """Rollouts that have not ended."""
        counts = [task["rollouts"] for task in _answer(service, "/tasks?limit=1000")["tasks"]]
        return sum(count for statuses in counts for status, count in statuses.items() if status not in ENDED)

    def _may_kill(self, ended: int, most: int | None) -> bool:
        kills = self._kills.total()
        return ended >= kills * ROLLOUTS_PER_KILL and (most is None or kills < most)

    def _killed(self, service: Serving, victims: Sequence[NodeVictim]) -> bool:
        """Whether there was a node that runs something, by a sign of life of its present process."""
        alive = {node["name"]: node for node in _answer(service, "/nodes")["nodes"]}
        busy = [each for each in victims if each.name in alive and _is_busy(alive[each.name], each)]
        if not busy:
            return False
        victim = self._dice.choice(busy)
        victim.kill()
        victim.start()
        self._kills[victim.name.partition("-")[0]] += 1
        return True


def _is_busy(node: dict[str, Any], victim: NodeVictim) -> bool:
    return bool(node["started_at"] >= victim.started_at and node["busy"]["run"])


def _answer(service: Serving, path: str) -> Any:
    """Asked again where no answer comes in time: the whole trial may have been stopped in between, as a machine that sleeps is."""
    for last in (False, False, True):
        try:
            answer = service.request("GET", path)
            break
        except httpx.TimeoutException:
            if last:
                raise
    assert answer.status_code == 200, answer.text
    return answer.json()
