"""Ui: what the pages of one process share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from proxy.services import Services
from proxy.ui.session_view import SessionViews
from proxy.ui.tokens import TokenTexts


class Ui:
    def __init__(self, services: Services) -> None:
        self.services = services
        self.views = SessionViews(services)
        self.texts = TokenTexts(services.pool)


def _get_ui(request: Request) -> Ui:
    ui: Ui = request.app.state.ui
    return ui


Shown = Annotated[Ui, Depends(_get_ui)]
