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
    vb:{rollout}:owners            hash    node -> sha256 of the key that its name belongs to; as long as the node is known
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

import json
import re

from contract.tasks import Task
from proxy.store.connection import Script

PACKAGE = "proxy.store.tasks"
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


def read_script(name: str) -> Script:
    """`scripts/<name>.lua` behind the prelude."""
    return Script.read(name, "_rollout", package=PACKAGE)
