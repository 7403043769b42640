"""Rollouts over nodes, services and a Redis that are killed, and a ledger of them that none of these processes keeps.

A harness notes every attempt that begins, the engine what it sampled, and a trainer what it was given. Node `n` asks service `n`.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from reconstruct.trajectory import Trajectory
from tests.harnesses.node_victims import NodeVictim
from tests.support.crashes.victims import RedisVictim, ServiceVictim, Victim
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.runtimes.rollout_nodes import ASK
from tests.support.service import plain_http
from tests.support.service.faulty_wire import FaultyWire
from tests.support.service.verbatim_process import ADMIN, TRAINER, wait_until
from trainer_client.client import TrainerClient

SECONDS = 120.0
LEASE_SECONDS = 2.0
SESSION = re.compile(r"t\d+\.\d+\.\d+")
ASK_UNTIL_ANSWERED = f"until {ASK}do sleep 0.2; done"
_REQUEST = "generate-tokens-"


class NodeCrashes:
    """Use it in a `with` block: it starts all but the nodes. `wire` is between the services and Redis."""

    def __init__(self, folder: Path, *, services: int = 1, nodes: int = 1, slots: int = 2) -> None:
        self._stack = ExitStack()
        self._begun, self.gate = folder / "begun", folder / "gate"
        self._begun.touch()
        self.engine = ScriptedEngine("qwen3", updatable=False)
        self.engine.script = lambda generation, index: Say("hello world")
        self.engine.start()
        self.redis = RedisVictim(folder / "redis")
        self.wire = FaultyWire(self.redis.port)
        flags = ("--engine", self.engine.url, "--redis", self.wire.redis_url)
        self.services = [ServiceVictim(f"service-{number}", folder / f"service-{number}", *flags) for number in range(services)]
        place = ("--run", str(slots), "--ready", "0", "--evaluate", "1", "--lease-seconds", str(LEASE_SECONDS))
        self.nodes = [
            NodeVictim(
                f"node-{number}-{os.getpid()}",
                folder,
                self.services[number % services].url,
                *place,
                VERBATIM_LOCAL_SANDBOX="none",
            )
            for number in range(nodes)
        ]
        self.kills: Counter[str] = Counter()
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> Self:
        with self._stack as starting:
            starting.callback(self.engine.stop)
            starting.callback(self.redis.kill)
            self.redis.start()
            self.redis.await_ready()
            starting.enter_context(self.wire)
            for service in self.services:
                starting.callback(service.kill)
                service.start()
            for service in self.services:
                service.await_ready()
            for node in self.nodes:
                starting.callback(node.stop)
            self._stack = starting.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            victims: list[ServiceVictim | NodeVictim] = [*self.services, *self.nodes]
            written = {each.name: each.written[-4000:] for each in victims}
            error.add_note("\n\n".join(f"{name}:\n{lines}" for name, lines in written.items()))
        self._stack.close()

    def submit(self, *, samples: int = 1, max_attempts: int = 1, gated: bool = False) -> str:
        """The new task's id. Its harnesses ask the model until they have one answer, `gated` ones when the gate is there."""
        waits = f"until test -e {self.gate}; do sleep 0.05; done\n" if gated else ""
        task_id = f"t{len(self._tasks)}"
        body = {
            "task_id": task_id,
            "instruction": f"echo $OPENAI_BASE_URL >> {self._begun}\n{waits}{ASK_UNTIL_ANSWERED}",
            "harness": "shell",
            "num_samples": samples,
            "max_attempts": max_attempts,
            "evaluator": {"kind": "command", "options": {"command": "test -s said.txt"}, "fresh_runtime": False},
            "runtime": {"network": "full", "options": {"sandbox": "none"}, "memory_mb": 256, "cpus": 0.1},
        }
        answer = self.request("POST", "/tasks", json=body)
        assert answer.status_code == 201, answer.text
        self._tasks[task_id] = samples
        return task_id

    def kill(self, victim: Victim | NodeVictim) -> None:
        victim.kill()
        self.kills[victim.name.removesuffix(f"-{os.getpid()}")] += 1

    def begun(self) -> list[str]:
        """The session of every attempt whose harness began, in that order."""
        return [found[0] for line in self._begun.read_text().splitlines() if (found := SESSION.search(line))]

    def rollouts(self, task_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.request("GET", f"/tasks/{task_id}/rollouts").json()["rollouts"]
        return found

    def await_status(self, task_id: str, status: str) -> None:
        """Of all its rollouts."""
        wait_until(lambda: {each["status"] for each in self.rollouts(task_id)} == {status}, SECONDS, f"{task_id} is {status}")

    def await_end(self) -> None:
        for task_id in self._tasks:
            self.await_status(task_id, "completed")

    def request(self, method: str, path: str, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        return plain_http.request(method, self.services[0].url + path, headers=headers, **more)

    def check(self) -> list[dict[str, Any]]:
        """All rollouts, each of which was finished once, has one session, and was given to a trainer once, as the engine sampled it. No
        attempt began twice."""
        found = [each for task_id in self._tasks for each in self.rollouts(task_id)]
        assert len(found) == sum(self._tasks.values())
        for each in found:
            assert (each["status"], each["verdict"]["reward"]) == ("completed", 1.0), each
        finals = [each["session_id"] for each in found]
        begun = Counter(self.begun())
        assert set(begun.values()) == {1} and begun.keys() >= set(finals), (begun, finals)
        ends = Counter(end for task_id in self._tasks for end in self._list_ends(task_id))
        assert ends == Counter((each["task_id"], each["index"]) for each in found), ends
        assert sorted(self._list_sessions()) == sorted(finals)
        self._check_batches(finals)
        for service in self.services:
            assert "Traceback" not in service.written, service.written[-6000:]
        return found

    def _list_ends(self, task_id: str) -> list[tuple[str, int]]:
        """By the stream of its events, which ends with the task."""
        lines = self.request("GET", f"/tasks/{task_id}/events").text.splitlines()
        kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        return [(task_id, each["index"]) for kind, each in zip(kinds, told, strict=True) if kind == "rollout.completed"]

    def _list_sessions(self) -> list[str]:
        return [each["session_id"] for each in self.request("GET", "/sessions?limit=1000").json()["sessions"]]

    def _check_batches(self, finals: Sequence[str]) -> None:
        made = {each.request_id.removeprefix(_REQUEST): each for each in self.engine.generations}
        groups: list[str] = []
        rows: list[Trajectory] = []
        with TrainerClient(self.services[0].url, TRAINER) as client:
            while len(groups) < len(self._tasks):
                batch = client.lease(max_groups=len(self._tasks), wait_seconds=SECONDS)
                assert batch is not None, f"a trainer got {groups} of {sorted(self._tasks)}"
                with batch:
                    groups += [group.group_id for group in batch.groups]
                    rows += batch.rows
            assert client.lease(wait_seconds=0.0) is None
        assert sorted(groups) == sorted(self._tasks)
        assert sorted(row.session_id for row in rows) == sorted(finals)
        for row in rows:
            (call_id,) = row.call_ids
            assert row.token_ids.tolist() == [*made[call_id].prompt_ids, *made[call_id].sampled[0]], row.session_id


class NodeRounds:
    """Rounds of a kill each: what is killed follows from the seed, and each process is killed once before any is killed again."""

    def __init__(self, seed: int, crashes: NodeCrashes) -> None:
        self._dice = random.Random(seed)
        self._crashes = crashes
        self._left: list[Victim | NodeVictim] = []

    def run(self, rounds: int, *, samples: int = 2) -> None:
        """Returns when all rollouts have ended."""
        crashes = self._crashes
        for node in crashes.nodes:
            node.start()
        for _ in range(rounds):
            # What a kill of its node costs is an attempt.
            task_id = crashes.submit(samples=samples, max_attempts=rounds)
            self._await_beginning(task_id)
            victim = self._choose()
            crashes.kill(victim)
            victim.start()
            if not isinstance(victim, NodeVictim):
                victim.await_ready()
        crashes.await_end()

    def _await_beginning(self, task_id: str) -> None:
        count = len(self._crashes.begun())
        wait_until(lambda: len(self._crashes.begun()) > count, SECONDS, f"a rollout begins; {task_id} is the newest")

    def _choose(self) -> Victim | NodeVictim:
        if not self._left:
            self._left = [self._crashes.redis, *self._crashes.services, *self._crashes.nodes]
            self._dice.shuffle(self._left)
        return self._left.pop()
