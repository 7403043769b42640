"""Engines listed, added and taken out, for the description."""

from __future__ import annotations

from typing import Literal

from proxy.api.description.operation import Answer, Operation
from proxy.api.description.shape import Shape
from proxy.api.engines import Addition


class EngineShape(Shape):
    name: str
    url: str
    policy: str
    source: Literal["settings", "api"]
    models: list[str] | None = None


class ReplicaShape(Shape):
    name: str
    url: str
    policy: str
    source: str
    """settings, api, or the watched name."""
    status: Literal["serving", "down", "draining"]
    reason: str | None
    api: str | None
    models: list[str]
    max_model_len: int | None
    weight_version: int | None
    in_flight: int
    max_calls: int


class Engines(Shape):
    engines: list[EngineShape]
    replicas: list[ReplicaShape]
    waiting: dict[str, int]
    """Calls that wait, by policy."""


class RemovedEngine(Shape):
    name: str
    removed: Literal[True]


ENGINES = (
    Operation(
        "get",
        "/engines",
        "engines",
        "admin",
        "List engines",
        "What was given, and the replicas that came of it as the answering process sees them.",
        {
            200: Answer(
                "the engines",
                Engines,
                {
                    "engines": [
                        {
                            "name": "127.0.0.1:8000",
                            "url": "http://127.0.0.1:8000",
                            "policy": "",
                            "source": "settings",
                        }
                    ],
                    "replicas": [],
                    "waiting": {"": 0},
                },
            )
        },
    ),
    Operation(
        "post",
        "/engines",
        "engines",
        "admin",
        "Add an engine",
        "It takes calls once it answers and has the current weights; a restart keeps it. Repeating it is no error.",
        {
            201: Answer(
                "added",
                EngineShape,
                {"name": "gpu3:8000", "url": "http://gpu3:8000", "policy": "", "source": "api"},
            )
        },
        Addition,
        {"url": "http://gpu3:8000"},
        (408, 409, 413),
    ),
    Operation(
        "delete",
        "/engines/{name}",
        "engines",
        "admin",
        "Remove an engine",
        "It gets no more calls; those in flight end there. 409 for one of the settings or an address of a watched name.",
        {200: Answer("removed", RemovedEngine, {"name": "gpu3:8000", "removed": True})},
        refusals=(404, 409),
        parameters={"name": "Its name in the list."},
    ),
)
