"""Pushes of weights and the groups they are sent over, for the description."""

from __future__ import annotations

from typing import Any

from proxy.api.description.operation import Answer, Operation
from proxy.api.description.shape import Shape
from proxy.api.weights import Group, Push


class VersionShape(Shape):
    version: int
    path: str | None
    kind: str | None
    updated_at: float | None


class ReplicaWeights(Shape):
    url: str
    api: str | None
    healthy: bool
    reason: str | None
    weight_version: int | None
    """Null: not known."""
    takes_weights: bool


class WeightLine(Shape):
    current: VersionShape
    history: list[VersionShape]
    """Newest first."""
    updating: bool
    frozen: bool
    replicas: dict[str, ReplicaWeights]


class WeightStatus(WeightLine):
    models: dict[str, WeightLine]
    """The other policies."""


class PushedReplica(Shape):
    ok: bool
    seconds: float
    paused_seconds: float
    """How long it sampled nothing."""
    error: str | None = None


class Pushed(Shape):
    applied: bool
    """Whether it is the current version: at least one replica runs on it."""
    version: int
    kind: str
    mode: str
    seconds: float
    replicas: dict[str, PushedReplica]
    error: str | None = None
    """Why it was not applied."""


class Place(Shape):
    rank_offset: int
    workers: int


class GroupPlan(Shape):
    world_size: int
    """With the trainer, which is rank 0."""
    replicas: dict[str, Place]


class GroupJoined(GroupPlan):
    group: str
    """To be named in the pushes."""


VERSION = {"version": 12, "path": "/shared/weights/version-12", "kind": "full", "updated_at": 1767225600.0}
LINE: dict[str, Any] = {
    "current": VERSION,
    "history": [VERSION],
    "updating": False,
    "frozen": False,
    "replicas": {
        "127.0.0.1:8000": {
            "url": "http://127.0.0.1:8000",
            "api": "token",
            "healthy": True,
            "reason": None,
            "weight_version": 12,
            "takes_weights": True,
        }
    },
}
WEIGHTS = (
    Operation(
        "post",
        "/weights",
        "weights",
        "trainer",
        "Push weights",
        "Into every replica of the model: checked, paused, loaded, labelled, resumed. 409 for a version that is not greater than the "
        "current one, or a frozen model. With `Accept: application/x-ndjson` one line of JSON for each step, then `{result}` or `{error}`.",
        {
            200: Answer(
                "what came of it, by replica",
                Pushed,
                {
                    "applied": True,
                    "version": 12,
                    "kind": "full",
                    "mode": "keep",
                    "seconds": 1.9,
                    "replicas": {"127.0.0.1:8000": {"ok": True, "seconds": 1.9, "paused_seconds": 0.12}},
                },
            )
        },
        Push,
        {"version": 12, "path": "/shared/weights/version-12", "mode": "keep"},
        (404, 408, 409, 413, 502),
    ),
    Operation(
        "get",
        "/weights",
        "weights",
        "trainer",
        "Which weights serve",
        "The current version, what each replica holds and what was pushed before; of other models under `models`.",
        {200: Answer("the versions", WeightStatus, {**LINE, "models": {}})},
    ),
    Operation(
        "get",
        "/weights/group",
        "weights",
        "trainer",
        "Plan an NCCL group",
        "Of the trainer, as rank 0, and the workers of all engines of the model.",
        {
            200: Answer(
                "the plan",
                GroupPlan,
                {"world_size": 3, "replicas": {"127.0.0.1:8000": {"rank_offset": 1, "workers": 2}}},
            )
        },
        refusals=(404, 502),
        parameters={"model": "The policy; empty: the default one."},
    ),
    Operation(
        "post",
        "/weights/group",
        "weights",
        "trainer",
        "Join an NCCL group",
        "Answered when every engine has joined; the trainer has to be joining meanwhile. 409 when the engines are not those planned for.",
        {
            200: Answer(
                "joined",
                GroupJoined,
                {"group": "9f", "world_size": 3, "replicas": {"127.0.0.1:8000": {"rank_offset": 1, "workers": 2}}},
            )
        },
        Group,
        {"world_size": 3, "master_address": "10.0.0.5", "master_port": 29600},
        (404, 408, 409, 413, 502),
    ),
)
