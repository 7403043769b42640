"""Who may see the pages: the admin, by token in a header as everywhere, or by a cookie that the log-in page gives for a token.

The cookie does not hold the token. It is a time and a seal over it, made with the token's digest: any process can check it, it ends
by itself, and it opens nothing any more once its token is taken away.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

from fastapi import Request, Response

from proxy.api.access import admin_only, services_of
from proxy.auth import credential, hash_key
from proxy.errors import RequestError, Unauthorized
from proxy.tokens import Role, Tokens
from proxy.ui.rendering import home_of

COOKIE = "verbatim_ui"
LASTS_SECONDS = 12 * 3600


def admitted(request: Request) -> None:
    """Raises Unauthorized or Forbidden for a caller who is not the admin."""
    sealed = request.cookies.get(COOKIE)
    if credential(request.headers, {}) is None and sealed and opens(services_of(request).tokens, sealed):
        return
    admin_only(request)


def log_in(request: Request, token: str) -> str:
    """The cookie's value for an admin token. Raises Unauthorized or Forbidden for any other."""
    services = services_of(request)
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
    public = services_of(request).settings.public_url or ""
    return request.url.scheme == "https" or public.startswith("https:")


def way_back(wanted: str, home: str) -> str:
    """Where to go after the log-in: a page of these and nowhere else."""
    safe = wanted == home or wanted.startswith((f"{home}/", f"{home}?"))
    return wanted if safe and "\\" not in wanted and wanted.isprintable() else home


def refused_for(request: Request, error: RequestError) -> str:
    """What the log-in page says of a refusal: nothing to who has not tried yet."""
    tried = credential(request.headers, {}) is not None
    return error.message if tried or not isinstance(error, Unauthorized) else ""
