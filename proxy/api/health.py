"""Whether the process lives, and whether it can serve a call. Open to everyone: probes carry no token."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import APIRouter, Response

from proxy.api.access import Served
from proxy.api.admission import versions_ahead
from proxy.api.answers import json_response
from proxy.errors import StoreUnavailable

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    return json_response({"status": "ok"})


@router.get("/metrics")
async def metrics(services: Served) -> Response:
    """Prometheus text; see proxy/metrics.py for what is measured. What the store counts is as old as the store's last answer."""
    with contextlib.suppress(StoreUnavailable):
        counts, totals = await asyncio.gather(services.delivery.counts(), services.delivery.totals())
        services.metrics.stored_groups(counts, totals, await versions_ahead(services))
    return Response(services.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/readyz")
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
