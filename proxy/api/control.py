"""The control side as one router: `app.include_router(control_router())` after `app.state.services = services`."""

from __future__ import annotations

from fastapi import APIRouter

from proxy.api import archive, batches, dead_letters, engines, health, sessions, weights


def control_router() -> APIRouter:
    """Sessions, batches, weights, engines and health. Its errors need `proxy.api.errors.install_error_handlers(app)`."""
    router = APIRouter()
    for part in (sessions, archive, dead_letters, batches, weights, engines, health):
        # As they are. To include a router builds each of its routes again, which takes milliseconds per route.
        router.routes.extend(part.router.routes)
    return router
