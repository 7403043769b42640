"""Whether any node could ever take what waits, and what is lacking where none could."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollout.store.base import NodeState

LIVING_SECONDS = 120.0
"""A node that gave a sign of life so recently counts: one that is being replaced is not missed at once."""


def lacking(queue: str, nodes: Sequence[NodeState], now: float) -> str | None:
    """What the rollouts of the queue (`rollout.store.keys.queue_of`) ask for and no node has, however much of it is taken up; None
    where one has all, or where there are no nodes to speak of."""
    _, kinds, cpus, memory_mb, labels = json.loads(queue)
    living = [node for node in nodes if node.seen_at > now - LIVING_SECONDS and not node.draining]
    if not living:
        return None
    able = [node for node in living if set(kinds) <= set(node.runtimes)]
    if not able:
        return f"no node has the {_listed('runtime', kinds)}"
    meant = [node for node in able if all(node.labels.get(name) == value for name, value in labels.items())]
    if not meant:
        said = [f"{name}={value}" for name, value in sorted(labels.items())]
        return f"no node with the {_listed('runtime', kinds)} has the {_listed('label', said)}"
    if any(cpus <= node.cpus and memory_mb <= node.memory_mb for node in meant):
        return None
    largest = max(meant, key=lambda node: (min(node.cpus / cpus, node.memory_mb / memory_mb), node.name))
    return (
        f"a rollout takes {cpus:g} CPUs and {memory_mb} MB, its evaluation included; the largest node for it, {largest.name}, has "
        f"{largest.cpus:g} and {largest.memory_mb}"
    )


def _listed(what: str, names: Sequence[str]) -> str:
    return f"{what}{'s' if len(names) > 1 else ''} {' and '.join(names)}"
