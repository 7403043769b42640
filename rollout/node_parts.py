"""What a node is made of, as its rollouts see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.models import Judge
from rollout.runtimes.base import Route, RuntimeKind
from rollout.sessions import Sessions
from rollout.stages import Stages
from rollout.store.base import WorkStore


@dataclass(frozen=True, slots=True)
class NodeParts:
    """`url` is the service as harnesses on this node call it, `route` its host and port: all of it that a rollout reaches. `kinds` are the
    runtimes that this machine has, by name; `logs` is the folder of all attempts' logs."""

    name: str
    url: str
    route: Route
    work: WorkStore
    sessions: Sessions
    judge: Judge
    stages: Stages
    kinds: Mapping[str, RuntimeKind]
    logs: Path
