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

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from proxy import rows
from proxy.api.archive import part_as_wire
from proxy.api.requests import describe, get_services, json_response, read_body, require_admin
from proxy.api.sessions import session_as_wire
from proxy.auth import Role, Tokens, credential, hash_key
from proxy.errors import Forbidden, NotFound, RequestError, Unauthorized, VerbatimError
from proxy.ui import pages
from proxy.ui.export import exported_page
from proxy.ui.messages import conversation, whole_text
from proxy.ui.rendering import HEADERS, STATIC, home_of, page, static
from proxy.ui.shown import Shown, Ui
from proxy.ui.tokens import LARGEST, TokenSource, call_tokens, row_tokens, token_page
from reconstruct.trajectory import encode_accounting, encode_row

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
    router.include_router(routes(PageRoute))
    router.include_router(pages.routes(PageRoute), dependencies=seen)
    # Errors of these are for programs: the control side's.
    router.include_router(for_programs, dependencies=seen)
    return router


async def front_door(request: Request) -> Response:
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(404)
    return RedirectResponse(home_of(request), 307, headers=HEADERS)


# Access: an admin, by token in a header or by the cookie that the login page sets.
#
# The cookie does not hold the token. It is a timestamp sealed with the token's digest: any process can check it, it expires by itself, and
# it stops working once its token is removed.


COOKIE = "verbatim_ui"
LASTS_SECONDS = 12 * 3600


def admitted(request: Request) -> None:
    """Raises Unauthorized or Forbidden for a caller who is not the admin."""
    sealed = request.cookies.get(COOKIE)
    if credential(request.headers, {}) is None and sealed and opens(get_services(request).tokens, sealed):
        return
    require_admin(request)


def log_in(request: Request, token: str) -> str:
    """The cookie's value for an admin token. Raises Unauthorized or Forbidden for any other."""
    services = get_services(request)
    try:
        services.tokens.check(token or None, Role.ADMIN)
    except RequestError as error:
        services.metrics.refused("control", error.code)
        raise
    return sealed_until(hash_key(token), int(time.time()) + LASTS_SECONDS)


def sealed_until(digest: bytes, ends_at: int) -> str:
    """The value of a cookie that a token of this digest opens until `ends_at`, in epoch seconds."""
    said = str(ends_at)
    return f"{said}.{hmac.new(digest, f'verbatim ui {said}'.encode(), hashlib.sha256).hexdigest()}"


def opens(tokens: Tokens, sealed: str, clock: Callable[[], float] = time.time) -> bool:
    """Whether the cookie was made with an admin token that is still valid, and has not ended."""
    said, _, _ = sealed.partition(".")
    if not (said.isascii() and said.isdecimal() and len(said) < 16) or int(said) < clock():
        return False
    found = False
    for digest in tokens.digests_of(Role.ADMIN):
        # All of them, so that time does not tell which one.
        found |= hmac.compare_digest(sealed_until(digest, int(said)).encode(), sealed.encode())
    return found


def set_cookie(request: Request, response: Response, value: str) -> None:
    """`value` "" takes it away."""
    response.set_cookie(
        COOKIE,
        value,
        max_age=LASTS_SECONDS if value else 0,
        path=home_of(request),
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )


def is_secure(request: Request) -> bool:
    """Whether browsers reach the service over TLS, which something before it may end."""
    public = get_services(request).settings.public_url or ""
    return request.url.scheme == "https" or public.startswith("https:")


def way_back(wanted: str, home: str) -> str:
    """Where to go after the log-in: a page of these and nowhere else."""
    safe = wanted == home or wanted.startswith((f"{home}/", f"{home}?"))
    return wanted if safe and "\\" not in wanted and wanted.isprintable() else home


def refused_for(request: Request, error: RequestError) -> str:
    """What the log-in page says of a refusal: nothing to who has not tried yet."""
    tried = credential(request.headers, {}) is not None
    return error.message if tried or not isinstance(error, Unauthorized) else ""


# Login, logout and static files.


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


# Downloads of a session: calls and trajectories as the API returns them, the stored record, or a single page.


for_programs = APIRouter(prefix="/ui")


@for_programs.get("/sessions/{session_id}/download/{name}")
async def download(ui: Shown, session_id: str, name: str) -> Response:
    if name not in FILES:
        raise NotFound(f"there is no download {name}; there are: {', '.join(FILES)}")
    make, media_type = FILES[name]
    content = await make(ui, session_id)
    headers = {**HEADERS, "content-disposition": f'attachment; filename="{session_id}-{name}"'}
    if isinstance(content, bytes):
        return Response(content, media_type=media_type, headers=headers)
    return StreamingResponse(content, media_type=media_type, headers=headers)


async def calls_file(ui: Ui, session_id: str) -> Iterator[bytes]:
    look = await ui.looks.at(session_id)
    records = await ui.services.sessions.load_records(session_id)
    calls = rows.every_call_as_wire(records, look.delivered, look.intents, look.in_flight)

    def pieces() -> Iterator[bytes]:
        yield b'{"session":' + msgspec.json.encode(session_as_wire(look.state)) + b',"calls":['
        for number, call in enumerate(calls):
            yield (b"," if number else b"") + msgspec.json.encode(call)
        yield b"]}"

    return pieces()


async def trajectories_file(ui: Ui, session_id: str) -> bytes:
    look = await ui.looks.at(session_id)

    def made() -> bytes:
        trajectories = [encode_row(row, arrays="list") for row in look.built.rows]
        accounting = encode_accounting(look.built.accounting)
        return msgspec.json.encode({"trajectories": trajectories, "accounting": accounting})

    return await asyncio.to_thread(made)


async def record_file(ui: Ui, session_id: str) -> bytes:
    look = await ui.looks.at(session_id)
    named = await ui.services.archive.load_named_records(session_id, 0, -1)
    return msgspec.msgpack.encode(part_as_wire(look.state, look.delivered, look.intents, named, None))


async def page_file(ui: Ui, session_id: str) -> bytes:
    return await exported_page(await ui.looks.at(session_id), ui.texts)


FILES: Mapping[str, tuple[Callable[[Ui, str], Awaitable[bytes | Iterator[bytes]]], str]] = {
    "calls.json": (calls_file, "application/json"),
    "trajectories.json": (trajectories_file, "application/json"),
    "record.msgpack": (record_file, "application/msgpack"),
    "page.html": (page_file, "text/html; charset=utf-8"),
}

# Data that the pages fetch: pages of tokens, the next token of interest, whole messages.


Start = Annotated[int, Query(ge=0, le=2**31)]
Count = Annotated[int, Query(ge=1, le=LARGEST)]
What = Literal["surprise", "version", "kind", "id"]
Position = Annotated[int, Query(ge=-1, le=2**31)]

Tree = Literal["calls", "rows"]


@for_programs.get("/sessions/{session_id}/{tree}/{name}/tokens")
async def tokens(
    ui: Shown, session_id: str, tree: Tree, name: str, start: Start = 0, count: Count = 400, overview: bool = False
) -> Response:
    source = await _source(ui, session_id, tree, name)
    return _json(await token_page(source, ui.texts, start, count, overview=overview))


@for_programs.get("/sessions/{session_id}/{tree}/{name}/next")
async def following(
    ui: Shown,
    session_id: str,
    tree: Tree,
    name: str,
    what: What,
    after: Position = -1,
    value: Annotated[float | None, Query(allow_inf_nan=False)] = None,
) -> Response:
    source = await _source(ui, session_id, tree, name)
    return _json({"position": source.after(min(after, len(source)), what, value)})


@for_programs.get("/sessions/{session_id}/calls/{call_id}/messages/{index}")
async def message(ui: Shown, session_id: str, call_id: str, index: int) -> Response:
    look = await ui.looks.at(session_id)
    messages = conversation(look, look.call(call_id))
    if not 0 <= index < len(messages):
        raise NotFound(f"call {call_id} has no message {index}")
    text = whole_text(messages[index]).encode("utf-8", "replace")
    return Response(text, media_type="text/plain; charset=utf-8", headers=HEADERS)


async def _source(ui: Ui, session_id: str, tree: Tree, name: str) -> TokenSource:
    look = await ui.looks.at(session_id)
    return call_tokens(look, look.call(name)) if tree == "calls" else row_tokens(look, look.row(name))


def _json(content: object) -> Response:
    answer = json_response(content)
    answer.headers.update(HEADERS)
    return answer
