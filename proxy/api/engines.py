"""Engines over HTTP: the admin lists them, adds and removes them while the service runs. And the health probes.

Engines added here are stored: every process serves through them a few seconds later, and they survive a restart. Engines named in the
settings cannot be removed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Response
from pydantic import Field

from proxy.api.admission import estimate_versions_ahead
from proxy.api.requests import Body, JsonBody, Served, json_response, require_admin
from proxy.api.run import load_last_hour
from proxy.engine.pool.membership import EngineSpec, parse_engine
from proxy.engine.replica import Replica
from proxy.errors import Conflict, NotFound, RequestError, StoreUnavailable
from proxy.services import Services
from proxy.store.service import StoredEngine

router = APIRouter(prefix="/engines", tags=["engines"], dependencies=[Depends(require_admin)], default_response_class=Response)


class NewEngine(Body, json_schema_extra={"example": {"url": "http://gpu3:8000"}}):
    url: str = Field(min_length=1, max_length=2048)
    """http://host:port, or dns://name:port for every address of a name."""
    policy: str = Field("", max_length=200)
    """The policy it serves; empty: the default one."""
    models: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default_factory=list, max_length=256)
    """The model names it serves, so that calls for them wait for it."""


class EngineShape(
    Body,
    json_schema_extra={"example": {"name": "gpu3:8000", "url": "http://gpu3:8000", "policy": "", "source": "api"}},
):
    name: str
    url: str
    policy: str
    source: Literal["settings", "api"]
    models: list[str] | None = None


class ReplicaShape(Body):
    name: str
    url: str
    policy: str
    source: str
    """settings, api, or the DNS name it was resolved from."""
    status: Literal["serving", "down", "draining", "stalled"]
    """stalled: it has calls and samples nothing, and gets no more until it does."""
    reason: str | None
    api: str | None
    version: str
    """The engine's own; empty if it does not say."""
    plugin: bool
    """Verbatim's plugin runs inside it, so that a call is one request."""
    trainable: bool
    """It returns token ids and logprobs, so that what it samples can be trained; a note says why not."""
    takes_weights: bool
    """New weights can be pushed into it; a note says why not."""
    router: bool
    """Several engines answer at its URL; a note says how that is known."""
    models: list[str]
    max_model_len: int | None
    weight_version: int | None
    in_flight: int
    max_calls: int
    description: str
    """Version, path, and what can be done with it, for people."""
    notes: list[str]
    """What to know about it though it may serve, each a sentence that begins after its name."""


class Engines(
    Body,
    json_schema_extra={
        "example": {
            "engines": [{"name": "127.0.0.1:8000", "url": "http://127.0.0.1:8000", "policy": "", "source": "settings"}],
            "replicas": [],
            "waiting": {"": 0},
        }
    },
):
    engines: list[EngineShape]
    replicas: list[ReplicaShape]
    waiting: dict[str, int]
    """Calls waiting for a replica, by policy."""


class RemovedEngine(Body, json_schema_extra={"example": {"name": "gpu3:8000", "removed": True}}):
    name: str
    removed: Literal[True]


@router.get("", responses={200: {"model": Engines, "description": "the engines"}})
async def list_engines(services: Served) -> Response:
    """The configured engines, and their replicas as the answering process sees them."""
    stored = await services.engines.engines()
    fixed = services.pool.membership.fixed
    engines = [_engine_as_wire(spec, "settings") for spec in fixed]
    engines += [
        _engine_as_wire(spec, "api", each.models) for each in stored if (spec := EngineSpec(each.url, each.policy)) not in fixed
    ]
    replicas = [_replica_as_wire(replica) for replica in (*services.pool.replicas, *services.pool.draining)]
    return json_response({"engines": engines, "replicas": replicas, "waiting": dict(services.pool.seats.depths())})


@router.post(
    "",
    status_code=201,
    responses={
        201: {"model": EngineShape, "description": "added"},
        409: {"description": "the settings name it, or calls for one of its models go elsewhere (`conflict`)"},
    },
)
async def add_engine(services: Served, body: Annotated[NewEngine, Depends(JsonBody(NewEngine).read)]) -> Response:
    """It receives calls once it answers and has the current weights, and survives a restart. Adding it again is not an error."""
    try:
        spec = parse_engine(body.url, body.policy)
    except ValueError as error:
        raise RequestError(f"{body.url!r} cannot be an engine: {error}", param="url") from error
    if any(spec.name == fixed.name for fixed in services.pool.membership.fixed):
        raise Conflict(f"engine {spec.name} is in the settings", param="url")
    # Named with all its models, an engine's adapters are still policies of their own.
    adapters = {replica.adapter for replica in services.pool.replicas if replica.url == spec.url}
    for name in (spec.policy, *(model for model in body.models if model not in adapters)):
        _check_name_is_free(services, name, spec.policy)
    await services.engines.add(StoredEngine(spec.name, spec.url, spec.policy, time.time(), tuple(body.models)))
    await services.pool.look()
    return json_response(_engine_as_wire(spec, "api", body.models), 201)


@router.delete(
    "/{name:path}",
    responses={
        200: {"model": RemovedEngine, "description": "removed"},
        409: {"description": "it is in the settings, or an address of a DNS name (`conflict`)"},
    },
)
async def remove_engine(
    services: Served, name: Annotated[str, Path(description="Its `name` in the list of engines, or the URL it was added with.")]
) -> Response:
    """It gets no more calls; those in flight finish there."""
    with contextlib.suppress(ValueError):
        name = parse_engine(name).name
    if not await services.engines.remove(name):
        _raise_not_removable(services, name)
    await services.pool.look()
    return json_response({"name": name, "removed": True})


def _check_name_is_free(services: Services, name: str, policy: str) -> None:
    """Raises `Conflict` if calls for that name currently go to another policy: sessions would continue under other weights."""
    pool = services.pool
    declared = pool.membership.declared.get(name, policy)
    if name and (declared != policy or (name != policy and name in pool.policy_names)):
        raise Conflict(f"calls for the model {name!r} go to the policy {declared or name!r}", param="policy")
    for replica in pool.replicas:
        if name and name in replica.names and replica.policy != policy:
            raise Conflict(f"calls for the model {name!r} go to engine {replica.name}, which serves it", param="policy")


def _raise_not_removable(services: Services, name: str) -> None:
    if any(name == spec.name for spec in services.pool.membership.fixed):
        raise Conflict(f"engine {name} is in the settings of the service: remove it there")
    for replica in services.pool.replicas:
        if replica.name == name:
            raise Conflict(f"engine {name} is an address of {replica.source}: remove that name, or the address from it")
    raise NotFound(f"there is no engine {name!r}")


def _engine_as_wire(spec: EngineSpec, source: str, models: Sequence[str] = ()) -> dict[str, Any]:
    wire = {"name": spec.name, "url": spec.url, "policy": spec.policy, "source": source}
    return wire | ({"models": list(models)} if models else {})


def _status_of(replica: Replica) -> str:
    if replica.draining:
        return "draining"
    return "stalled" if replica.stalled else "serving" if replica.healthy else "down"


def _replica_as_wire(replica: Replica) -> dict[str, Any]:
    return {
        "name": replica.name,
        "url": replica.url,
        "policy": replica.policy,
        "source": replica.source,
        "status": _status_of(replica),
        "reason": replica.reason or None,
        "api": replica.api,
        "version": replica.version,
        "plugin": replica.plugin,
        "trainable": replica.trainable,
        "takes_weights": replica.updatable,
        "router": replica.router,
        "models": list(replica.models),
        "max_model_len": replica.max_model_len,
        "weight_version": replica.weight_version,
        "in_flight": replica.in_flight,
        "max_calls": replica.max_calls,
        "description": replica.description,
        "notes": list(replica.notes.values()),
    }


# Health. Unauthenticated: probes carry no token.


health_router = APIRouter(tags=["health"], default_response_class=Response)


class Alive(Body, json_schema_extra={"example": {"status": "ok", "service": "verbatim"}}):
    """`service` tells this service from other programs with such a path."""

    status: Literal["ok"]
    service: Literal["verbatim"]


class Ready(Body, json_schema_extra={"example": {"status": "ready"}}):
    """`notes`: what is wrong with the store though it serves, and what to know about engines; left out where nothing is."""

    status: Literal["ready"]
    notes: list[str] | None = None


class NotReady(
    Body,
    json_schema_extra={
        "example": {"status": "unavailable", "reason": "no engine serves: 127.0.0.1:8000: it was not reached yet"}
    },
):
    status: Literal["unavailable"]
    reason: str


@health_router.get("/healthz", responses={200: {"model": Alive, "description": "alive"}})
async def check_health() -> Response:
    """Whether the process is alive. Contacts neither the store nor an engine."""
    return json_response({"status": "ok", "service": "verbatim"})


@health_router.get(
    "/metrics", responses={200: {"content": {"text/plain; version=0.0.4; charset=utf-8": {}}, "description": "text"}}
)
async def get_metrics(services: Served) -> Response:
    """Prometheus metrics of the answering process; the documentation lists them."""
    # Numbers of the store are as old as its last answer.
    with contextlib.suppress(StoreUnavailable):
        counts, totals = await asyncio.gather(services.delivery.count_groups(), services.delivery.load_totals())
        services.metrics.show_groups(counts, totals, await estimate_versions_ahead(services))
        services.metrics.show_free_bytes(await services.sessions.measure_free())
        runs = services.metrics.choose_runs(await services.delivery.load_runs())
        names = [run.run for run in runs]
        sums = await services.delivery.load_curves("all", runs=names)
        services.metrics.show_runs(runs, sums, await load_last_hour(services, names))
    return Response(services.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


@health_router.get(
    "/readyz", responses={200: {"model": Ready, "description": "ready"}, 503: {"model": NotReady, "description": "not ready"}}
)
async def check_readiness(services: Served) -> Response:
    """The service is ready if the store, or a part of it, takes records and an engine serves."""
    reasons, notes = [], []
    try:
        notes = await services.sessions.ping()
    except StoreUnavailable as error:
        reasons.append(error.message)
    engine_ready, reason = services.pool.ready()
    if not engine_ready:
        reasons.append(f"no engine serves: {reason}")
    for replica in services.pool.replicas:
        notes += [f"engine {replica.name} ({replica.description}) {note}" for note in replica.notes.values()]
    if reasons:
        return json_response({"status": "unavailable", "reason": "; ".join(reasons)}, 503)
    return json_response({"status": "ready", **({"notes": notes} if notes else {})})
