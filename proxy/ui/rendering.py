"""Renders the templates, with the headers of every response of these pages.

The templates escape everything, and browsers run and apply nothing but the files of this package: the text of agents and models stays text.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from fastapi import Request, Response
from markupsafe import Markup, escape

from proxy.api.requests import get_services
from proxy.store.states import SessionState
from proxy.ui.conversation import pretty
from reconstruct.reasons import REASONS, name_reason

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
SCRIPTS = ("theme.js", "app.js", "tokens.js")
STATIC = {"app.css": "text/css", "run.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}

DIRECTION_MARKS = {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, 0x61C, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Characters that reverse the direction of text, made visible."""
NO_NUMBER = "\u2013"
FEEDBACK_LINES, FEEDBACK_CHARACTERS = 3, 240


@cache
def static(name: str) -> bytes:
    """A file of STATIC."""
    return files("proxy.ui").joinpath("static", name).read_bytes()


@cache
def static_version() -> str:
    """Changes with the files; part of their URLs, so that browsers may cache them."""
    return hashlib.sha256(b"".join(static(name) for name in STATIC)).hexdigest()[:12]


@cache
def templates() -> jinja2.Environment:
    made = jinja2.Environment(
        # All at once: another install may take this one's place while the process runs.
        loader=jinja2.DictLoader({file.name: file.read_text() for file in files("proxy.ui").joinpath("templates").iterdir()}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    made.filters |= {
        "count": format_count,
        "number": format_number,
        "time": format_time,
        "iso": format_iso,
        "seconds": format_seconds,
        "part": format_share,
        "pretty": pretty,
        "highlight": highlight,
        "feedback": read_feedback,
        "begin": cut_feedback,
        "why": explain_reason,
        "reason": name_reason,
    }
    made.globals |= {"address": address, "group_address": group_address}
    return made


def _finalize(value: Any) -> Any:
    """A text with its direction marks made visible; "" for None."""
    if value is None:
        return ""
    return value.translate(DIRECTION_MARKS) if isinstance(value, str) and not isinstance(value, Markup) else value


async def page(request: Request, name: str, status: int = 200, **shown: Any) -> Response:
    """A response with the rendered template. A thread renders it, since texts may be long, and compiles it at its first use."""
    told = {"home": home_of(request), "origin": origin_of(request), "version": static_version(), "path": request.url.path}
    shown |= {"has_tasks": request.app.state.ui.tasks is not None, **told}
    text = await asyncio.to_thread(render, name, shown)
    return Response(text, status, media_type="text/html; charset=utf-8", headers=HEADERS)


def render(name: str, shown: Mapping[str, Any]) -> bytes:
    # "replace": a message may contain half a character.
    return templates().get_template(name).render(shown).encode("utf-8", "replace")


def home_of(request: Request) -> str:
    """The path of these pages, after the path that the service itself is mounted under."""
    return f"{request.scope.get('root_path', '')}/ui"


def origin_of(request: Request) -> str:
    """The address of the service as its callers write it, without a slash at the end."""
    public = get_services(request).settings.public_url
    return (public or str(request.base_url)).rstrip("/")


def address(path: str, query: Mapping[str, Any] | None = None, **more: Any) -> str:
    """The quoted path, with a query of the values that are neither None nor ""."""
    given = {name: value for name, value in {**(query or {}), **more}.items() if value not in (None, "")}
    return quote(path, safe="/") + (f"?{urlencode(given)}" if given else "")


def group_address(home: str, group_id: str) -> str:
    """The path of a group's page. A slash in its id is quoted: browsers fold `a/../b` away."""
    return f"{quote(home)}/groups/{quote(group_id, safe='')}"


def format_count(value: int) -> str:
    """With thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def format_number(value: float | None, places: int = 4) -> str:
    """`places` digits; a larger number whole, as counts are."""
    if value is None:
        return NO_NUMBER
    return format_count(round(value)) if 10**places <= abs(value) < 1e12 else f"{value:.{places}g}"


def format_share(value: float, whole: float) -> str:
    """In percent."""
    return f"{100 * value / whole:.2f}" if whole else "0"


def format_seconds(value: float | None) -> str:
    if value is None:
        return NO_NUMBER
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 90:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def highlight(text: str, wanted: str) -> str | Markup:
    """`text` with every occurrence of `wanted` marked, in any case."""
    if not wanted:
        return text
    pieces = re.split(f"({re.escape(wanted)})", text.translate(DIRECTION_MARKS), flags=re.IGNORECASE)
    return Markup("").join(
        Markup("<mark>{}</mark>").format(piece) if number % 2 else escape(piece) for number, piece in enumerate(pieces)
    )


def read_feedback(state: SessionState) -> str:
    """The evaluator's own words; "" if it gave none."""
    feedback = state.reward_metadata.get("feedback")
    return feedback.strip() if isinstance(feedback, str) else ""


def explain_reason(reason: str) -> str:
    """Why tokens are in quarantine, in a sentence."""
    return REASONS[name_reason(reason)].sentence


def cut_feedback(text: str) -> str:
    """The first lines."""
    cut = "\n".join(text.splitlines()[:FEEDBACK_LINES])[:FEEDBACK_CHARACTERS]
    return cut if len(cut) == len(text) else f"{cut} …"


def format_time(epoch_seconds: float) -> str:
    return datetime.fromtimestamp(epoch_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_iso(epoch_seconds: float) -> str:
    return datetime.fromtimestamp(epoch_seconds, UTC).isoformat(timespec="seconds")
