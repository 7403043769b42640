"""Ui: what the pages of one process share."""

from __future__ import annotations

from typing import Annotated, Any, Protocol
from urllib.parse import parse_qsl

from fastapi import Depends, Request

from proxy.api.requests import get_services, read_body
from proxy.auth import check_same_site
from proxy.services import Services
from proxy.ui.catalogue import SessionCatalogue
from proxy.ui.session_view import ShownSessions
from proxy.ui.tokens import TokenTexts


class Tasks(Protocol):
    """Reads the tasks of a service that has them, as `GET /tasks` and the routes below it give them; their package is another one. Every
    method may raise `StoreUnavailable`."""

    async def list_tasks(
        self, *, status: str | None, limit: int, cursor: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """A page, newest first, and the cursor of the next one or None. Each task says its run, too."""

    async def load_task(self, task_id: str) -> dict[str, Any]:
        """Raises `NotFound`."""

    async def load_rollouts(self, task_id: str) -> list[dict[str, Any]]:
        """In the order of their indexes. Raises `NotFound`."""


class Ui:
    def __init__(self, services: Services, tasks: Tasks | None = None) -> None:
        self.services = services
        self.views = ShownSessions(services)
        self.catalogue = SessionCatalogue(services)
        self.tasks = tasks
        self.texts = TokenTexts(services.pool)


def _get_ui(request: Request) -> Ui:
    ui: Ui = request.app.state.ui
    return ui


Shown = Annotated[Ui, Depends(_get_ui)]

LARGEST_FORM = 16_384


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form that one of these pages sent. Raises `Forbidden` for one that a page of another site sent."""
    check_same_site(request.headers, get_services(request).settings.public_url)
    return dict(parse_qsl((await read_body(request, LARGEST_FORM)).decode("utf-8", "replace")))
