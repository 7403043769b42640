"""What every control route needs first: the process's services, and a caller who may be there.

The routers read `request.app.state.services`, so `create_app` sets that and includes them.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from proxy.auth import Role, check_role, credential
from proxy.services import Services


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def admin_only(request: Request) -> None:
    _check(request, Role.ADMIN)


def trainer_only(request: Request) -> None:
    """The trainer, or the admin, who may do all that a trainer may."""
    _check(request, Role.TRAINER)


def _check(request: Request, role: Role) -> None:
    # No ?key= here: URLs end up in logs.
    check_role(credential(request.headers, {}), role, services_of(request).settings)


Served = Annotated[Services, Depends(services_of)]
