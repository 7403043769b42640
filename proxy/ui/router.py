"""The pages as one router: `app.include_router(ui_router())` after `app.state.ui = Ui(services)`.

GET  /ui                                          sessions, searched and filtered
GET  /ui/groups, /ui/group?id=                    groups and their rewards; one of them
GET  /ui/compare?left=&right=                     two sessions beside each other
GET  /ui/sessions/{id}                            its tree, calls, rows and accounting
GET  /ui/sessions/{id}/calls/{call}               a call: its messages, its tokens
GET  /ui/sessions/{id}/rows/{trajectory}          a training row
GET  /ui/sessions/{id}/…/tokens, …/next           the same tokens in pages, as JSON
GET  /ui/sessions/{id}/calls/{call}/messages/{n}  a whole message, as text
GET  /ui/sessions/{id}/download/{file}            calls.json, trajectories.json, record.msgpack, page.html
POST /ui/login, /ui/logout                        the cookie; GET /ui/login asks for the token
GET  /ui/static/{file}                            what the pages are made of
GET  /                                            leads a browser here; for programs there is nothing
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from proxy.api.errors import describe
from proxy.errors import Forbidden, RequestError, Unauthorized, VerbatimError
from proxy.ui import data, downloads, pages, signing
from proxy.ui.access import admitted, refused_for
from proxy.ui.rendering import HEADERS, home_of, page

log = logging.getLogger(__name__)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PageRoute(APIRoute):
    """Answers errors as pages; who is not let in gets the log-in page."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except (Unauthorized, Forbidden) as error:
                query = f"?{request.url.query}" if request.url.query else ""
                wanted = f"{request.url.path}{query}" if request.method == "GET" else ""
                return page(request, "login.html", error.status, wanted=wanted, refused=refused_for(request, error))
            except RequestValidationError as error:
                refusal: VerbatimError = RequestError(describe(error))
            except VerbatimError as error:
                refusal = error
            return page(request, "error.html", refusal.status, message=refusal.message, code=refusal.code)

        return answered


@cache
def ui_router() -> APIRouter:
    """The same for every app of the process: its routes hold nothing of one."""
    router = APIRouter(include_in_schema=False)
    seen = [Depends(admitted)]
    router.add_api_route("/", front_door, methods=["GET"])
    router.include_router(signing.routes(PageRoute))
    router.include_router(pages.routes(PageRoute), dependencies=seen)
    # Errors of these are for programs: the control side's.
    router.include_router(data.router, dependencies=seen)
    router.include_router(downloads.router, dependencies=seen)
    return router


async def front_door(request: Request) -> Response:
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(404)
    return RedirectResponse(home_of(request), 307, headers=HEADERS)
