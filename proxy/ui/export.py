"""One session as one HTML file that needs no service: its tree, its calls, and its tokens with the same view of them.

Every message and every token is in it once, with the call that brought it: a row or a prompt is put together when it is looked at, as
the forest does it, so that a session of many branches is no larger than what was said in it. Nothing is loaded, and nothing runs but
the scripts whose digests the file's own policy names.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from markupsafe import Markup

from proxy.ui.look import CallLine, Look
from proxy.ui.messages import ShownMessage, reply_of, shown_message
from proxy.ui.pages import totals
from proxy.ui.pictures import tree_picture
from proxy.ui.rendering import SCRIPTS, static, templates
from proxy.ui.tokens import TRAINED, WITHHELD, TokenTexts, version_runs
from reconstruct.records import Call, Ids
from reconstruct.trajectory import Trajectory

_decode = msgspec.json.decode
WHOLE = 2**62


@dataclass(frozen=True, slots=True)
class SavedCall:
    """`messages` are the new ones of its request and the reply. `source` says which token list it is found in, from `position` on."""

    line: CallLine
    parent_number: int | None
    messages: Sequence[ShownMessage]
    source: int | None
    position: int


@dataclass(frozen=True, slots=True)
class Source:
    """A token list: all up to the end of the last of its calls. `marks` are the kinds of what was sampled in it, from a position to
    another."""

    name: str
    call_ids: Sequence[str]
    marks: Sequence[tuple[int, int, int]]


async def exported_page(look: Look, texts: TokenTexts) -> bytes:
    """The file."""
    sources = await asyncio.to_thread(_sources, look)
    calls = [look.call(line.call_id) for line in look.lines]
    await _learn(texts, calls)
    table: dict[str, int] = {}
    places = {call.call_id: at for at, call in enumerate(calls)}
    missing, stored = "", []
    for call in calls:
        told = await texts.of(call.policy, _own_ids(call).tolist())
        missing = missing or told.missing
        stored.append(await asyncio.to_thread(_stored, call, places if call.call_id in look.forest else {}, told.texts, table))
    told_sources = [{"last": places[each.call_ids[-1]], "marks": each.marks} for each in sources]
    tokens = {"calls": stored, "sources": told_sources, "texts": list(table), "missing": missing}
    return await asyncio.to_thread(_rendered, look, sources, tokens)


def _rendered(look: Look, sources: Sequence[Source], stored: dict[str, Any]) -> bytes:
    css, scripts = static("app.css"), {name: static(name) for name in SCRIPTS}
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(css)}; script-src {' '.join(map(_digest, scripts.values()))}"
    )
    text = (
        templates()
        .get_template("export.html")
        .render(
            look=look,
            state=look.state,
            total=totals(look),
            tree=tree_picture(look.lines),
            calls=_saved_calls(look, sources),
            sources=[each.name for each in sources],
            policy=policy,
            css=Markup(css.decode()),
            scripts={name: Markup(script.decode()) for name, script in scripts.items()},
            stored=Markup(_in_script(stored)),
        )
    )
    return text.encode("utf-8", "replace")


def _sources(look: Look) -> list[Source]:
    """A token list for every row, and for every call in none."""
    sources = [_row_source(number, row) for number, row in enumerate(look.built.rows, 1)]
    in_rows = {call_id for row in look.built.rows for call_id in row.call_ids}
    return sources + [_call_source(line) for line in look.lines if line.call_id not in in_rows]


def _row_source(number: int, row: Trajectory) -> Source:
    trained = [(TRAINED, start, end) for value, start, end in version_runs(row.loss_mask.astype(np.int64)) if value == 1]
    return Source(f"row {number}, {row.role}, {len(row.token_ids)} tokens", row.call_ids, trained)


def _call_source(line: CallLine) -> Source:
    length = line.prompt_tokens + line.sampled_tokens
    own = [(TRAINED if not line.refused else WITHHELD, line.prompt_tokens, length)]
    return Source(f"call {line.number}, in no row, {length} tokens", (line.call_id,), own)


def _saved_calls(look: Look, sources: Sequence[Source]) -> list[SavedCall]:
    numbers = {line.call_id: line.number for line in look.lines}
    found: dict[str, int] = {}
    for at, source in enumerate(sources):
        for call_id in source.call_ids:
            found.setdefault(call_id, at)
    return [
        SavedCall(line, numbers.get(line.parent_id or ""), _messages(look, line), found.get(line.call_id), line.prompt_tokens)
        for line in look.lines
    ]


def _messages(look: Look, line: CallLine) -> list[ShownMessage]:
    call = look.call(line.call_id)
    new = [shown_message(call.messages_from + at, message, most=WHOLE) for at, message in enumerate(_decode(call.messages))]
    return [*new, shown_message(call.message_count, reply_of(call), is_reply=True, most=WHOLE)]


async def _learn(texts: TokenTexts, calls: Sequence[Call]) -> None:
    """Have all tokens spelled in few requests, so that none is needed for each call."""
    for policy in {call.policy for call in calls}:
        found = [np.unique(_own_ids(call)) for call in calls if call.policy == policy]
        await texts.alone(policy, np.unique(np.concatenate(found)).tolist())


def _own_ids(call: Call) -> Ids:
    """What the call stores itself: what was new in its prompt, and what it sampled."""
    return np.concatenate((call.node.delta_ids, call.node.completion_ids))


def _stored(call: Call, places: Mapping[str, int], texts: Sequence[str | None], table: dict[str, int]) -> dict[str, Any]:
    """The call's own tokens as the token view reads them, and where among the calls that one is whose first tokens stand before them,
    if `places` has it. Texts are numbered in `table`."""
    node = call.node
    base = places.get(node.base_id or "")
    numbers = [-1 if text is None else table.setdefault(text, len(table)) for text in texts]
    return {
        "base": base,
        "base_length": 0 if base is None else node.base_length,
        "given": len(node.delta_ids),
        "ids": _packed(_own_ids(call), "<i4"),
        "logprobs": _packed(node.logprobs, "<f4") if len(node.logprobs) == len(node.completion_ids) else "",
        "texts": _packed(np.array(numbers), "<i4"),
        "spans": [[span.version, span.start, span.end] for span in node.spans],
    }


def _packed(array: Any, kind: str) -> str:
    return base64.b64encode(np.asarray(array).astype(kind).tobytes()).decode()


def _in_script(told: Any) -> str:
    """JSON that ends no script element and turns no writing around, whatever it holds."""
    return json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")


def _digest(content: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
