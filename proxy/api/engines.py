"""Engines: the replicas there are, and those that are added and removed while the service runs. For the admin.

What is added here is in the store: every process serves through it a few seconds later, and a restart keeps it. What the settings
name is theirs, and cannot be removed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from pydantic import Field

from proxy.api.requests import Body, Served, admin_only, body_of, json_response
from proxy.api.sessions import versions_ahead
from proxy.engine.pool.membership import EngineSpec, engine_spec
from proxy.engine.replica import Replica
from proxy.errors import Conflict, NotFound, RequestError, StoreUnavailable
from proxy.services import Services
from proxy.store.service import StoredEngine

router = APIRouter(prefix="/engines", dependencies=[Depends(admin_only)])


class Addition(Body):
    url: str = Field(min_length=1, max_length=2048)
    """http://host:port, or dns://name:port for every address of a name."""
    policy: str = Field("", max_length=200)
    """Whose replica it is; empty: the default one's."""
    models: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default_factory=list, max_length=256)
    """Names under which it serves, so that calls for them wait for it."""


@router.get("")
async def listing(services: Served) -> Response:
    """What was given (`engines`) and the replicas that came of it, as this process sees them."""
    stored = await services.engines.engines()
    fixed = services.pool.membership.fixed
    given = [_given(spec, "settings") for spec in fixed]
    given += [_given(spec, "api", each.models) for each in stored if (spec := EngineSpec(each.url, each.policy)) not in fixed]
    replicas = [*services.pool.replicas, *services.pool.draining]
    return json_response(
        {
            "engines": given,
            "replicas": [_replica(replica) for replica in replicas],
            "waiting": dict(services.pool.seats.depths()),
        }
    )


@router.post("")
async def add(services: Served, body: Annotated[Addition, Depends(body_of(Addition))]) -> Response:
    """201 with what was added, also when it was there already. It takes calls once it answers and has the current weights."""
    try:
        spec = engine_spec(body.url, body.policy)
    except ValueError as error:
        raise RequestError(f"{body.url!r} cannot be an engine: {error}", param="url") from error
    if any(spec.name == fixed.name for fixed in services.pool.membership.fixed):
        raise Conflict(f"engine {spec.name} is in the settings", param="url")
    for name in (spec.policy, *body.models):
        _check_name_is_free(services, name, spec.policy)
    await services.engines.add(StoredEngine(spec.name, spec.url, spec.policy, time.time(), tuple(body.models)))
    await services.pool.look()
    return json_response(_given(spec, "api", body.models), 201)


@router.delete("/{name:path}")
async def remove(services: Served, name: str) -> Response:
    """It gets no more calls; those in flight end. 404 when there is no such engine, 409 when it is in the settings."""
    found = await services.engines.remove(name)
    if not found:
        _refuse(services, name)
    await services.pool.look()
    return json_response({"name": name, "removed": True})


def _check_name_is_free(services: Services, name: str, policy: str) -> None:
    """Raises Conflict when calls for that name go to another policy now: sessions would go on under other weights."""
    pool = services.pool
    declared = pool.membership.declared.get(name, policy)
    if name and (declared != policy or (name != policy and name in pool.policy_names)):
        raise Conflict(f"calls for the model {name!r} go to the policy {declared or name!r}", param="policy")
    for replica in pool.replicas:
        if name and name in replica.names and replica.policy != policy:
            raise Conflict(f"calls for the model {name!r} go to engine {replica.name}, which serves it", param="policy")


def _refuse(services: Services, name: str) -> None:
    if any(name == spec.name for spec in services.pool.membership.fixed):
        raise Conflict(f"engine {name} is in the settings of the service: take it out there")
    for replica in services.pool.replicas:
        if replica.name == name:
            raise Conflict(f"engine {name} is an address of {replica.source}: remove that name, or the address from it")
    raise NotFound(f"there is no engine {name!r}")


def _given(spec: EngineSpec, source: str, models: Sequence[str] = ()) -> dict[str, Any]:
    given = {"name": spec.name, "url": spec.url, "policy": spec.policy, "source": source}
    return given | ({"models": list(models)} if models else {})


def _replica(replica: Replica) -> dict[str, Any]:
    return {
        "name": replica.name,
        "url": replica.url,
        "policy": replica.policy,
        "source": replica.source,
        "status": "draining" if replica.draining else "serving" if replica.healthy else "down",
        "reason": replica.reason or None,
        "api": replica.api,
        "models": list(replica.models),
        "max_model_len": replica.max_model_len,
        "weight_version": replica.weight_version,
        "in_flight": replica.in_flight,
        "max_calls": replica.max_calls,
    }


# Whether the process lives, and whether it can serve a call. Open to everyone: probes carry no token.


health_router = APIRouter()


@health_router.get("/healthz")
async def healthz() -> Response:
    return json_response({"status": "ok"})


@health_router.get("/metrics")
async def metrics(services: Served) -> Response:
    """Prometheus text; see proxy/metrics.py for what is measured. What the store counts is as old as the store's last answer."""
    with contextlib.suppress(StoreUnavailable):
        counts, totals = await asyncio.gather(services.delivery.counts(), services.delivery.totals())
        services.metrics.stored_groups(counts, totals, await versions_ahead(services))
    return Response(services.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


@health_router.get("/readyz")
async def readyz(services: Served) -> Response:
    reasons = [reason for reason in (await _store(services), _engines(services)) if reason]
    if reasons:
        return json_response({"status": "unavailable", "reason": "; ".join(reasons)}, 503)
    return json_response({"status": "ready"})


async def _store(services: Served) -> str | None:
    try:
        await services.sessions.ping()
    except StoreUnavailable as error:
        return error.message
    return None


def _engines(services: Served) -> str | None:
    ready, reason = services.pool.ready()
    return None if ready else f"no engine serves: {reason}"
