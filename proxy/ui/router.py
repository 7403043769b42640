"""The pages as one router; `app.state.ui` is the process's Ui.

GET  /ui                                            sessions, searched and filtered
GET  /ui/groups, /ui/groups/{id}                    groups and their rewards; one group
GET  /ui/compare?left=&right=&group=                two sessions side by side; what is left out is the group's worst and best
GET  /ui/concepts                                   what the marks on the pages mean, each under an anchor
GET  /ui/tasks, /ui/tasks/{id}                      tasks; one of them with its rollouts
GET  /ui/run                                        rewards and what goes wrong, over weight versions and time
POST /ui/run                                        ends or hides a run, or takes that back
GET  /ui/run/{run.csv|run.json}                     the same numbers, as GET /run gives them
GET  /ui/sessions/{id}                              reward, feedback, the conversation, rows
POST /ui/sessions/{id}/review                       puts a flag and a note on it
GET  /ui/sessions/{id}/turns                        further turns, or a fork, as a fragment
GET  /ui/sessions/{id}/calls/{call}/details         sampling and timing of a call, as a fragment
GET  /ui/sessions/{id}/calls|rows/{name}/tokens     tokens, page by page, as JSON; …/next finds one
GET  /ui/sessions/{id}/calls/{call}/messages/{n}    a whole message as text; …/images/{n} an image in it
GET  /ui/sessions/{id}/media/{digest}               an image that tokens stand for
GET  /ui/sessions/{id}/download/{file}              calls.json, trajectories.json, record.msgpack, page.html
POST /ui/login, /ui/logout                          set and delete the cookie; GET /ui/login asks for the token
GET  /ui/static/{file}                              style and scripts
GET  /                                              redirects browsers here; 404 for programs
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from proxy import rows
from proxy.api.archive import list_images, part_as_wire
from proxy.api.media import image_response, load_image
from proxy.api.requests import describe, get_services, json_response, require_admin
from proxy.api.sessions import session_as_wire
from proxy.auth import Role, Tokens, check_same_site, credential, hash_key
from proxy.errors import Forbidden, NotFound, RequestError, Unauthorized, VerbatimError
from proxy.images import SCHEME
from proxy.ui import compare_pages, concepts, group_pages, pages, run_pages, tasks_pages
from proxy.ui.conversation import find_image, find_message, read_image, whole_text
from proxy.ui.export import export_page
from proxy.ui.rendering import HEADERS, STATIC, home_of, page, static
from proxy.ui.shown import Shown, Ui, read_form
from proxy.ui.tokens import LARGEST, TokenList, build_call_tokens, build_row_tokens, build_token_page
from reconstruct.trajectory import encode_accounting, encode_row

log = logging.getLogger(__name__)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PageRoute(APIRoute):
    """Answers errors as pages, and callers without access with the log-in page."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except (Unauthorized, Forbidden) as error:
                query = f"?{request.url.query}" if request.url.query else ""
                wanted = f"{request.url.path}{query}" if request.method == "GET" else ""
                return await page(request, "login.html", error.status, wanted=wanted, refused=explain_refusal(request, error))
            except RequestValidationError as error:
                refusal: VerbatimError = RequestError(describe(error))
            except VerbatimError as error:
                refusal = error
            return await page(request, "error.html", refusal.status, message=refusal.message, code=refusal.code)

        return answered


@cache
def ui_router() -> APIRouter:
    """One router for every app of the process: its routes hold no state."""
    router = APIRouter(include_in_schema=False)
    admins = [Depends(admit)]
    router.add_api_route("/", redirect_browser, methods=["GET"])
    router.include_router(routes(PageRoute))
    for part in (pages, group_pages, compare_pages, tasks_pages, run_pages, concepts):
        router.include_router(part.routes(PageRoute), dependencies=admins)
    # Programs read these, so their errors are the control API's.
    router.include_router(for_programs, dependencies=admins)
    return router


async def redirect_browser(request: Request) -> Response:
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(404)
    return RedirectResponse(home_of(request), 307, headers=HEADERS)


# Access: an admin, by a token in a header or by the cookie that the log-in page sets.
#
# The cookie holds no token. It is an expiry time and a random name, signed with the token's digest: any process can check it, and it ends
# with its time, with its token, or with the log-out, which the store remembers for as long as the cookie would last.


COOKIE = "verbatim_ui"
LASTS_SECONDS = 12 * 3600


async def admit(request: Request) -> None:
    """Raises Unauthorized or Forbidden for a caller who is not the admin, and as the store."""
    cookie, services = request.cookies.get(COOKIE), get_services(request)
    if credential(request.headers, {}) is None and cookie and is_valid(services.tokens, cookie):
        if not await services.log_outs.has(hash_key(cookie)):
            return
        raise Unauthorized("this log-in has ended: log in again")
    require_admin(request)


def log_in(request: Request, token: str) -> str:
    """The cookie's value. Raises Unauthorized or Forbidden unless `token` is an admin's."""
    services = get_services(request)
    try:
        services.tokens.check(token or None, Role.ADMIN)
    except RequestError as error:
        services.metrics.count_refusal("control", error.code)
        raise
    return sign_until(hash_key(token), int(time.time()) + LASTS_SECONDS, secrets.token_hex(16))


def sign_until(digest: bytes, ends_at: int, name: str) -> str:
    """The value of the cookie called `name` for the token with this digest, valid until `ends_at`, in epoch seconds."""
    signed = f"{ends_at}.{name}"
    return f"{signed}.{hmac.new(digest, f'verbatim ui {signed}'.encode(), hashlib.sha256).hexdigest()}"


def is_valid(tokens: Tokens, cookie: str, clock: Callable[[], float] = time.time) -> bool:
    """Whether the cookie has not expired and was made with a token that still is an admin's."""
    ends, _, rest = cookie.partition(".")
    name = rest.partition(".")[0]
    if not (ends.isascii() and ends.isdecimal() and len(ends) < 16) or int(ends) < clock():
        return False
    found = False
    for digest in tokens.digests_of(Role.ADMIN):
        # No early exit: the time taken must not depend on which token matches.
        found |= hmac.compare_digest(sign_until(digest, int(ends), name).encode(), cookie.encode())
    return found


def set_cookie(request: Request, response: Response, value: str) -> None:
    """`value` "" deletes it."""
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
    """Whether browsers reach the service over TLS, which a gateway may terminate."""
    public = get_services(request).settings.public_url or ""
    return request.url.scheme == "https" or public.startswith("https:")


def choose_target(wanted: str, home: str) -> str:
    """Where to go after the log-in: one of these pages and nowhere else."""
    safe = wanted == home or wanted.startswith((f"{home}/", f"{home}?"))
    return wanted if safe and "\\" not in wanted and wanted.isprintable() else home


def explain_refusal(request: Request, error: RequestError) -> str:
    """The message on the log-in page: none for a caller that sent no token."""
    tried = credential(request.headers, {}) is not None
    return error.message if tried or not isinstance(error, Unauthorized) else ""


# Login, logout and static files.


CACHE_STATIC = "public, max-age=86400, immutable"


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/login", login_page, methods=["GET"])
    router.add_api_route("/login", login, methods=["POST"])
    router.add_api_route("/logout", logout, methods=["POST"], dependencies=[Depends(admit)])
    router.add_api_route("/static/{name}", static_file, methods=["GET"])
    return router


async def login_page(request: Request) -> Response:
    return await page(request, "login.html", wanted="", refused="")


async def login(request: Request) -> Response:
    given = await read_form(request)
    wanted = choose_target(given.get("next", ""), home_of(request))
    try:
        value = log_in(request, given.get("token", "").strip())
    except RequestError as error:
        return await page(request, "login.html", error.status, wanted=wanted, refused=error.message)
    answer = RedirectResponse(wanted, 303, headers=HEADERS)
    set_cookie(request, answer, value)
    return answer


async def logout(request: Request) -> Response:
    """Needs the cookie, which a browser does not send on behalf of another site: no other site can log anyone out. The cookie opens
    nothing from then on, whoever has a copy of it."""
    check_same_site(request.headers, get_services(request).settings.public_url)
    if cookie := request.cookies.get(COOKIE):
        await get_services(request).log_outs.add(hash_key(cookie), LASTS_SECONDS)
    answer = await page(request, "login.html", wanted="", refused="")
    set_cookie(request, answer, "")
    return answer


async def static_file(name: str) -> Response:
    if name not in STATIC:
        raise NotFound(f"there is no file {name}")
    return Response(static(name), media_type=STATIC[name], headers={**HEADERS, "cache-control": CACHE_STATIC})


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
    view = await ui.views.load(session_id)
    records = await ui.services.sessions.load_records(session_id)
    calls = rows.every_call_as_wire(records, view.delivered, view.intents, view.in_flight)

    def pieces() -> Iterator[bytes]:
        yield b'{"session":' + msgspec.json.encode(session_as_wire(view.state)) + b',"calls":['
        for number, call in enumerate(calls):
            yield (b"," if number else b"") + msgspec.json.encode(call)
        yield b"]}"

    return pieces()


async def trajectories_file(ui: Ui, session_id: str) -> bytes:
    view = await ui.views.load(session_id)

    def made() -> bytes:
        trajectories = [encode_row(row, arrays="list") for row in view.built.rows]
        accounting = encode_accounting(view.built.accounting)
        return msgspec.json.encode({"trajectories": trajectories, "accounting": accounting})

    return await asyncio.to_thread(made)


async def record_file(ui: Ui, session_id: str) -> bytes:
    view = await ui.views.load(session_id)
    named = await ui.services.archive.load_named_records(session_id, 0, -1)
    log = await ui.services.sessions.load_log(session_id)
    images = await list_images(ui.services, view.state.info, [record for _, record in named])
    scores = await ui.services.scores.load_packed(session_id) if view.state.scored else {}
    part = part_as_wire(view.state, view.delivered, view.intents, named, None, log, images, scores)
    return await asyncio.to_thread(msgspec.msgpack.encode, part)


async def page_file(ui: Ui, session_id: str) -> bytes:
    log = await ui.services.sessions.load_log(session_id)
    view = await ui.views.load(session_id)
    records = () if view.state.info.replay is None else await ui.services.sessions.load_records(session_id)
    images = await ui.services.media.load(await list_images(ui.services, view.state.info, records))
    return await export_page(view, ui.texts, log, images)


FILES: Mapping[str, tuple[Callable[[Ui, str], Awaitable[bytes | Iterator[bytes]]], str]] = {
    "calls.json": (calls_file, "application/json"),
    "trajectories.json": (trajectories_file, "application/json"),
    "record.msgpack": (record_file, "application/msgpack"),
    "page.html": (page_file, "text/html; charset=utf-8"),
}

# Data that the pages fetch: tokens, whole messages, images.


Start = Annotated[int, Query(ge=0, le=2**31)]
Count = Annotated[int, Query(ge=1, le=LARGEST)]
What = Literal["surprise", "version", "kind", "id"]
Position = Annotated[int, Query(ge=-1, le=2**31)]

Tree = Literal["calls", "rows"]


@for_programs.get("/sessions/{session_id}/{tree}/{name}/tokens")
async def list_tokens(
    ui: Shown, session_id: str, tree: Tree, name: str, start: Start = 0, count: Count = 400, overview: bool = False
) -> Response:
    tokens = await _load_tokens(ui, session_id, tree, name)
    return _json(await build_token_page(tokens, ui.texts, start, count, overview=overview))


@for_programs.get("/sessions/{session_id}/{tree}/{name}/next")
async def find_next_token(
    ui: Shown,
    session_id: str,
    tree: Tree,
    name: str,
    what: What,
    after: Position = -1,
    value: Annotated[float | None, Query(allow_inf_nan=False)] = None,
) -> Response:
    tokens = await _load_tokens(ui, session_id, tree, name)
    position = await asyncio.to_thread(tokens.find_next, min(after, len(tokens)), what, value)
    return _json({"position": position})


@for_programs.get("/sessions/{session_id}/calls/{call_id}/messages/{index}")
async def message(ui: Shown, session_id: str, call_id: str, index: int) -> Response:
    view = await ui.views.load(session_id)

    def spelled() -> bytes:
        return whole_text(find_message(view.find_call(call_id), index)).encode("utf-8", "replace")

    text = await asyncio.to_thread(spelled)
    return Response(text, media_type="text/plain; charset=utf-8", headers=HEADERS)


@for_programs.get("/sessions/{session_id}/media/{digest}")
async def kept_image(ui: Shown, session_id: str, digest: str) -> Response:
    view = await ui.views.load(session_id)
    return image_response(await load_image(ui.services, view.state.info, digest))


@for_programs.get("/sessions/{session_id}/calls/{call_id}/messages/{index}/images/{number}")
async def image(ui: Shown, session_id: str, call_id: str, index: int, number: Annotated[int, Path(ge=0)]) -> Response:
    view = await ui.views.load(session_id)
    shown = await asyncio.to_thread(find_message, view.find_call(call_id), index)
    found = find_image(shown, number)
    if found.startswith(SCHEME):
        return image_response(await load_image(ui.services, view.state.info, found.removeprefix(SCHEME)))
    media_type, content = await asyncio.to_thread(read_image, shown, number)
    return Response(content, media_type=media_type, headers={**HEADERS, "cache-control": "private, max-age=3600"})


async def _load_tokens(ui: Ui, session_id: str, tree: Tree, name: str) -> TokenList:
    view = await ui.views.load(session_id)
    if tree == "calls":
        return await asyncio.to_thread(build_call_tokens, view, view.find_call(name))
    return await asyncio.to_thread(build_row_tokens, view, view.find_row(name))


def _json(content: object) -> Response:
    answer = json_response(content)
    answer.headers.update(HEADERS)
    return answer
