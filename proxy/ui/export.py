"""A session's page as one HTML file that needs no service: the whole conversation, and the tokens with the same view of them.

Every message and token is in it once, with the call that added it. The browser assembles a row or a prompt when it is shown, as the forest
does, so branches add only their own tokens. The file loads nothing, and runs only the scripts whose digests its policy names.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from proxy.images import SCHEME, data_url
from proxy.ui.conversation import UNCUT
from proxy.ui.pictures import draw_tree
from proxy.ui.rendering import SCRIPTS, static, templates
from proxy.ui.session_view import ShownSession, describe_call, show_turn, summarize
from proxy.ui.tokens import TokenTexts, choose_kind, find_version_runs
from reconstruct.records import Call, Ids
from reconstruct.trajectory import Trajectory


async def export_page(view: ShownSession, texts: TokenTexts, log: str = "", images: Mapping[str, bytes] | None = None) -> bytes:
    """`log` is the end of the agent's output; `images` are the session's, by digest."""
    calls = [view.find_call(summary.call_id) for summary in view.summaries]
    await _prefetch_texts(texts, calls)
    table: dict[str, int] = {}
    places = {call.call_id: at for at, call in enumerate(calls)}
    missing, stored = "", []
    for call in calls:
        spelled = await texts.spell(call.policy, _own_ids(call).tolist())
        missing = missing or spelled.missing
        stored.append(await asyncio.to_thread(_pack_call, view, call, places, spelled.texts, table))
    rows = [_pack_row(row, places) for row in view.built.rows]
    tokens = {"calls": stored, "rows": rows, "texts": list(table), "missing": missing}
    return await asyncio.to_thread(_render, view, places, tokens, log, images or {})


def _render(
    view: ShownSession, places: Mapping[str, int], tokens: dict[str, Any], log: str, images: Mapping[str, bytes]
) -> bytes:
    css, scripts = static("app.css"), {name: static(name) for name in SCRIPTS}
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(css)}; script-src {' '.join(map(_digest, scripts.values()))}"
    )
    text = (
        templates()
        .get_template("export.html")
        .render(
            view=view,
            state=view.state,
            total=summarize(view),
            tree=draw_tree(view.summaries),
            rows=list(enumerate(view.built.rows, 1)),
            row_count=len(view.built.rows),
            walk=view.conversation.walk(),
            turn_of=lambda summary: show_turn(view, summary, limit=UNCUT),
            details_of=lambda call_id: describe_call(view, call_id),
            places=places,
            log=log,
            policy=policy,
            css=Markup(css.decode()),
            scripts={name: Markup(script.decode()) for name, script in scripts.items()},
            stored=Markup(_dump_for_script(tokens)),
        )
    )
    return _show_images(text, images).encode("utf-8", "replace")


def _show_images(text: str, images: Mapping[str, bytes]) -> str:
    """The page with the images themselves. No text of a conversation has a quotation mark in it."""

    def show(found: re.Match[str]) -> str:
        return f'src="{data_url(images[found[1]])}"' if found[1] in images else found[0]

    return re.sub(f'src="{SCHEME}([0-9a-f]{{64}})"', show, text)


async def _prefetch_texts(texts: TokenTexts, calls: Sequence[Call]) -> None:
    """Look up all tokens in few requests, so that no call needs one of its own."""
    for policy in {call.policy for call in calls}:
        found = [np.unique(_own_ids(call)) for call in calls if call.policy == policy]
        await texts.spell_each(policy, np.unique(np.concatenate(found)).tolist())


def _own_ids(call: Call) -> Ids:
    """The ids that the call's own record has: what is new in its prompt, and its completion."""
    return np.concatenate((call.node.delta_ids, call.node.completion_ids))


def _pack_call(
    view: ShownSession, call: Call, places: Mapping[str, int], texts: Sequence[str | None], table: dict[str, int]
) -> dict[str, Any]:
    """The call's own tokens, and the position of the call whose first tokens precede them. Texts are numbered in `table`."""
    node = call.node
    base = places.get(node.base_id or "") if call.call_id in view.forest else None
    numbers = [-1 if text is None else table.setdefault(text, len(table)) for text in texts]
    return {
        "base": base,
        "base_length": 0 if base is None else node.base_length,
        "added": len(node.delta_ids),
        "kind": choose_kind(view, call),
        "ids": _pack(_own_ids(call), "<i4"),
        "logprobs": _pack(node.logprobs, "<f4") if len(node.logprobs) == len(node.completion_ids) else "",
        "texts": _pack(np.array(numbers), "<i4"),
        "spans": [[span.version, span.start, span.end] for span in node.spans],
        "media": [[each.digest, each.start, each.end] for each in node.media],
    }


def _pack_row(row: Trajectory, places: Mapping[str, int]) -> dict[str, Any]:
    """The position of the row's last call, and [start, end] of each run of trained tokens."""
    runs = find_version_runs(row.loss_mask.astype(np.int64))
    return {"last": places[row.call_ids[-1]], "trained": [[start, end] for mask, start, end in runs if mask == 1]}


def _pack(array: Any, kind: str) -> str:
    return base64.b64encode(np.asarray(array).astype(kind).tobytes()).decode()


def _dump_for_script(value: Any) -> str:
    """JSON that cannot end a script element, whatever texts it contains."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _digest(content: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
