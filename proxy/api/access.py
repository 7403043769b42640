"""What every control route needs first: the process's services, and a caller who may be there.

The routers read `request.app.state.services`, so `create_app` sets that and includes them.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from proxy.auth import check_once, credential
from proxy.errors import RequestError
from proxy.loopback import check_local
from proxy.services import Services
from proxy.tokens import Role


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def admin_only(request: Request) -> None:
    _check(request, Role.ADMIN)


def trainer_only(request: Request) -> None:
    """The trainer, or the admin, who may do all that a trainer may."""
    _check(request, Role.TRAINER)


def node_only(request: Request) -> None:
    """A node, or the admin."""
    _check(request, Role.NODE)


def _check(request: Request, role: Role) -> None:
    """Raises `Unauthorized` or `Forbidden`."""
    services = services_of(request)
    check_once(request.headers.raw)
    try:
        # No ?key= here: URLs end up in logs.
        services.tokens.check(credential(request.headers, {}), role)
    except RequestError as error:
        if services.settings.open:
            return check_local(request.headers)
        services.metrics.refused("control", error.code)
        raise


Served = Annotated[Services, Depends(services_of)]
