"""Pages from templates, with the headers that every answer of these pages carries.

Everything shown is escaped by the templates, and a browser runs and applies nothing but the files of this package: what agents and
models say is text, whatever it looks like.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from fastapi import Request, Response
from markupsafe import Markup

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
SCRIPTS = ("theme.js", "app.js", "token_sources.js", "tokens.js")
STATIC = {"app.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}


TURNING = {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, 0x61C, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
NOTHING = "\u2013"
"""Stands where there is no number."""


@cache
def static(name: str) -> bytes:
    """A file of STATIC."""
    return files("proxy.ui").joinpath("static", name).read_bytes()


@cache
def static_mark() -> str:
    """Another one whenever a file changes: part of their addresses, so that they may be kept."""
    return hashlib.sha256(b"".join(static(name) for name in STATIC)).hexdigest()[:12]


@cache
def templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("proxy.ui"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    made.filters |= {
        "count": counted,
        "number": number,
        "time": told_time,
        "iso": iso_time,
        "seconds": seconds,
        "part": part,
        "pretty": pretty,
    }
    made.globals["address"] = address
    return made


def _finalized(value: Any) -> Any:
    """Nothing for None; signs that turn the direction of writing around can be seen, and turn nothing."""
    if value is None:
        return ""
    return value.translate(TURNING) if isinstance(value, str) and not isinstance(value, Markup) else value


def page(request: Request, name: str, status: int = 200, **shown: Any) -> Response:
    """The page of a template."""
    text = templates().get_template(name).render(home=home_of(request), mark=static_mark(), path=request.url.path, **shown)
    # A message may hold half a character.
    return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8", headers=HEADERS)


def home_of(request: Request) -> str:
    """The path of these pages, behind whatever the service itself is under."""
    return f"{request.scope.get('root_path', '')}/ui"


def address(path: str, query: Mapping[str, Any] | None = None, **more: Any) -> str:
    """The path with its parts quoted, and a query of what is neither None nor ""."""
    given = {name: value for name, value in {**(query or {}), **more}.items() if value not in (None, "")}
    return quote(path, safe="/") + (f"?{urlencode(given)}" if given else "")


def counted(value: int) -> str:
    """With blanks between thousands, as no language disputes."""
    return f"{value:,}".replace(",", "\u202f")


def number(value: float | None, places: int = 4) -> str:
    return NOTHING if value is None else f"{value:.{places}g}"


def part(value: float, whole: float) -> str:
    """A share in hundredths, for a picture's width."""
    return f"{100 * value / whole:.2f}" if whole else "0"


def seconds(value: float | None) -> str:
    """A span of time, short."""
    if value is None:
        return NOTHING
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 90:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def pretty(value: Any) -> str:
    """As indented JSON; of what is nested too deeply for that only what it is."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except RecursionError:
        return str(type(value))


def told_time(epoch_seconds: float) -> str:
    return datetime.fromtimestamp(epoch_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso_time(epoch_seconds: float) -> str:
    return datetime.fromtimestamp(epoch_seconds, UTC).isoformat(timespec="seconds")
