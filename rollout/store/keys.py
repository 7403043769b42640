"""Every key in Redis: its name, type and lifetime. All share the slot of `{rollout}`, so that each step is one script.

    vb:{rollout}:t:<task>          hash    the task: body and outline (packed), digest, status, counts by state, its callback
    vb:{rollout}:t:<task>:<index>  hash    a rollout: status, attempt, node, its place in a queue, verdict, failures, times
    vb:{rollout}:t:<task>:events   stream  the task's events, about the newest `EVENTS_KEPT`
                                           (these three until retention deletes the task)

    vb:{rollout}:listing           zset    task, in order of submission
    vb:{rollout}:over              zset    ended task, by when it ended
    vb:{rollout}:queues            set     name of every queue that holds a rollout
    vb:{rollout}:q:<queue>         stream  one entry (task, index) per rollout that has not ended, read by the consumer group `nodes`;
                                           deleted when empty. Rollouts that had a node before, and those to which others gave way,
                                           wait in queues whose priority is greater by a fraction
    vb:{rollout}:hold              string  while it exists, nodes take no rollout that would begin a group
    vb:{rollout}:arrivals          stream  one entry, replaced whenever a rollout begins to wait: idle nodes read it
    vb:{rollout}:nodes             hash    node -> NodeState (packed); until an hour after its last beat
    vb:{rollout}:seen              zset    node, by its last beat
    vb:{rollout}:takes             hash    node -> its last request for a rollout and the rollout it got; as long as the node is known
    vb:{rollout}:closing           zset    <task>:<index> of a rollout ended from outside whose session is still to be closed, by when
                                           that is tried (again)
    vb:{rollout}:abandoned         zset    <task>:<index>:<attempt> of a lost attempt, or of one cancelled before its group had begun,
                                           whose session is still to be deleted, by when that is tried (again)
    vb:{rollout}:callbacks         zset    ended task whose callback is not delivered yet, by when it is tried (again)
    vb:{rollout}:stranded          set     name of every queue that requires more than any node has
    vb:{rollout}:totals            hash    event -> how often, since the store began; `tasks` and `places` number tasks and
                                           queue entries

A script learns only while it runs which keys of rollouts and queues it needs. The keys that scripts declare (`DECLARED`) never exist:
while the slot moves to another server of a cluster, Redis then refuses the script (TRYAGAIN) instead of running it on half the data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from rollout.task import Task

BASE = "vb:{rollout}"
DECLARED = (BASE, f"{BASE}:absent")
"""The keys that every script declares; `scripts/_rollout.lua` makes the other names from the first."""

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
    """The queue in which the task's rollouts wait, named by what a node must have to take them, as JSON:

    `[priority, [runtime kinds], cpus, memory_mb, {labels}]`"""
    kinds = {task.runtime.kind}
    if task.evaluator is not None and task.evaluator.runtime is not None:
        kinds.add(task.evaluator.runtime.kind)
    cpus, memory_mb = task.demand
    wanted = [task.priority, sorted(kinds), float(cpus), memory_mb, dict(task.labels)]
    return json.dumps(wanted, sort_keys=True, separators=(",", ":"))


def merge_queue(name: str) -> str:
    """The name of the queue in which the rollouts of `name` waited for their first node."""
    return re.sub(r"^\[(\d+)\.\d,", r"[\1,", name)


Argument = bytes | str | int | float
PRELUDE = "_rollout"


@cache
def load_scripts() -> Mapping[str, bytes]:
    """The files of `scripts` by name. All at once: another install may take this one's place while the process runs."""
    return {file.name: file.read_bytes() for file in (files("rollout.store") / "scripts").iterdir()}


@dataclass(frozen=True, slots=True)
class Script:
    source: bytes
    sha: str

    @classmethod
    @cache
    def read(cls, name: str) -> Script:
        """`scripts/<name>.lua` with the prelude, which only defines functions, before it."""
        source = b"\n".join(load_scripts()[f"{part}.lua"] for part in (PRELUDE, name))
        return cls(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


class Connection(Protocol):
    """The way to Redis, implemented by the service that mounts the rollout API. Both methods raise `rollout.store.base.StoreUnavailable`
    for every failure of Redis. Commands may be sent more than once."""

    timeout_seconds: float
    """How long Redis may take to answer."""

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, durable: bool) -> Any:
        """The script's answer. `durable`: only once as many replicas and disks as the service's settings ask for hold its writes."""

    async def execute(self, *command: Argument, key: str | None = None) -> Any:
        """The command's answer. `key` selects the server of a cluster; None: the first argument."""


async def read_time(connection: Connection) -> float:
    """Redis's time in epoch seconds, the only clock of leases and deadlines: those of nodes and servers differ."""
    seconds, microseconds = await connection.execute("TIME", key=ARRIVALS)
    return int(seconds) + int(microseconds) / 1e6
