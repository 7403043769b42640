"""Every key in Redis: its name, type and lifetime. All lie in the slot of `{rollout}`, so that each step is one script.

    vb:{rollout}:t:<task>          hash    the task: body and outline (packed), digest, status, counts by state, its callback
    vb:{rollout}:t:<task>:<index>  hash    a rollout: status, attempt, node, its place in a queue, verdict, failures, times
    vb:{rollout}:t:<task>:events   stream  what happened to the task, the newest `EVENTS_KEPT` or so
                                           (these three until retention deletes the task)

    vb:{rollout}:listing           zset    task, by the order in which tasks were submitted
    vb:{rollout}:over              zset    ended task, by its end
    vb:{rollout}:queues            set     name of every queue that holds a rollout
    vb:{rollout}:q:<queue>         stream  one entry (task, index) per rollout that has not ended, read by the consumer group `nodes`;
                                           gone when it is empty
    vb:{rollout}:arrivals          stream  one entry, new whenever a rollout began to wait: idle nodes read it
    vb:{rollout}:nodes             hash    node -> NodeState (packed); an hour after its last sign of life
    vb:{rollout}:seen              zset    node, by its last sign of life
    vb:{rollout}:takes             hash    node -> its last request for a rollout and which it got; as long as the node is known
    vb:{rollout}:closing           zset    <task>:<index> of a rollout that was ended from outside and whose session is still to be
                                           closed, by when that is tried (again)
    vb:{rollout}:abandoned         zset    <task>:<index>:<attempt> of an attempt that is no more and whose session is still to be
                                           deleted, by when that is tried (again)
    vb:{rollout}:callbacks         zset    ended task whose callback was not delivered yet, by when it is tried (again)
    vb:{rollout}:stranded          set     name of every queue that asks for more than any node has
    vb:{rollout}:totals            hash    event -> how often, since the store began; `tasks` and `places` number tasks and
                                           entries of queues

A task is in the hash slot of its rollouts and queues by name, but a script learns only while it runs which ones it needs. So the keys
that scripts declare (`DECLARED`) never exist: as long as the slot is being moved to another server of a cluster, Redis refuses
scripts whose keys it does not find (TRYAGAIN) instead of running them over half of the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from rollout.task import Task

BASE = "vb:{rollout}"
DECLARED = (BASE, f"{BASE}:absent")
"""Of every script; `scripts/_rollout.lua` makes the other names from the first."""

LISTING = f"{BASE}:listing"
ARRIVALS = f"{BASE}:arrivals"
NODES = f"{BASE}:nodes"
STRANDED = f"{BASE}:stranded"
TOTALS = f"{BASE}:totals"


def task(task_id: str) -> str:
    return f"{BASE}:t:{task_id}"


def rollout(task_id: str, index: int) -> str:
    return f"{BASE}:t:{task_id}:{index}"


def events(task_id: str) -> str:
    return f"{BASE}:t:{task_id}:events"


def queue_of(task: Task) -> str:
    """The name of the queue in which the task's rollouts wait: JSON of what a node must have to take them.

    `[priority, [kinds of runtimes], cpus, memory_mb, {labels}]`"""
    kinds = {task.runtime.kind}
    if task.evaluator is not None and task.evaluator.runtime is not None:
        kinds.add(task.evaluator.runtime.kind)
    cpus, memory_mb = task.demand
    wanted = [task.priority, sorted(kinds), float(cpus), memory_mb, dict(task.labels)]
    return json.dumps(wanted, sort_keys=True, separators=(",", ":"))


# The connection to Redis as this store needs it, and the scripts it runs. Whoever makes the store hands the connection in.


Argument = bytes | str | int | float
PRELUDE = "_rollout"


@dataclass(frozen=True, slots=True)
class Script:
    source: bytes
    sha: str

    @classmethod
    def read(cls, name: str) -> Script:
        """The script `scripts/<name>.lua`, after the prelude, which only defines functions."""
        folder = files("rollout.store") / "scripts"
        source = b"\n".join((folder / f"{part}.lua").read_bytes() for part in (PRELUDE, name))
        return cls(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


async def now(connection: Connection) -> float:
    """Redis's time in epoch seconds, on the server that holds the rollouts."""
    seconds, microseconds = await connection.execute("TIME", key=ARRIVALS)
    return int(seconds) + int(microseconds) / 1e6


class Connection(Protocol):
    """Both methods raise `rollout.store.base.StoreUnavailable` for all that is Redis's doing. What is sent may be sent again."""

    timeout_seconds: float
    """Longest time that Redis may take to answer."""

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, durable: bool) -> Any:
        """The script's answer. `durable`: once as many replicas and disks hold what it wrote as the service is set to want."""

    async def execute(self, *command: Argument, key: str) -> Any:
        """The answer to a command about `key`."""
