"""Ui: what the pages of one process hold, and how a request gets at it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from proxy.services import Services
from proxy.ui.look import Looks
from proxy.ui.tokens import TokenTexts


class Ui:
    def __init__(self, services: Services) -> None:
        self.services = services
        self.looks = Looks(services)
        self.texts = TokenTexts(services.pool)


def ui_of(request: Request) -> Ui:
    ui: Ui = request.app.state.ui
    return ui


Shown = Annotated[Ui, Depends(ui_of)]
