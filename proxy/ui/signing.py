"""Logging in and out, and the files that every page loads."""

from __future__ import annotations

from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from proxy.api.bodies import read_body
from proxy.errors import NotFound, RequestError
from proxy.ui.access import admitted, log_in, set_cookie, way_back
from proxy.ui.rendering import HEADERS, STATIC, home_of, page, static

LARGEST_FORM = 16_384
KEEP_STATIC = "public, max-age=86400, immutable"


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/login", login_page, methods=["GET"])
    router.add_api_route("/login", login, methods=["POST"])
    router.add_api_route("/logout", logout, methods=["POST"], dependencies=[Depends(admitted)])
    router.add_api_route("/static/{name}", static_file, methods=["GET"])
    return router


async def login_page(request: Request) -> Response:
    return page(request, "login.html", wanted="", refused="")


async def login(request: Request) -> Response:
    given = dict(parse_qsl((await read_body(request, LARGEST_FORM)).decode("utf-8", "replace")))
    wanted = way_back(given.get("next", ""), home_of(request))
    try:
        value = log_in(request, given.get("token", "").strip())
    except RequestError as error:
        return page(request, "login.html", error.status, wanted=wanted, refused=error.message)
    answer = RedirectResponse(wanted, 303, headers=HEADERS)
    set_cookie(request, answer, value)
    return answer


async def logout(request: Request) -> Response:
    """For who is logged in: the cookie does not come with what another site makes a browser send, so that none can end a log-in."""
    answer = page(request, "login.html", wanted="", refused="")
    set_cookie(request, answer, "")
    return answer


async def static_file(name: str) -> Response:
    if name not in STATIC:
        raise NotFound(f"there is no file {name}")
    return Response(static(name), media_type=STATIC[name], headers={**HEADERS, "cache-control": KEEP_STATIC})
