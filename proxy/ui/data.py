"""What the pages fetch: tokens in pages, the next token of interest, whole messages."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from proxy.api.answers import json_response
from proxy.errors import NotFound
from proxy.ui.rendering import HEADERS
from proxy.ui.shown import Shown, Ui
from proxy.ui.shown_messages import conversation, whole_text
from proxy.ui.token_pages import LARGEST, token_page
from proxy.ui.token_source import TokenSource, call_tokens, row_tokens

router = APIRouter(prefix="/ui")

Start = Annotated[int, Query(ge=0, le=2**31)]
Count = Annotated[int, Query(ge=1, le=LARGEST)]
What = Literal["surprise", "version", "kind", "id"]
Position = Annotated[int, Query(ge=-1, le=2**31)]

Tree = Literal["calls", "rows"]


@router.get("/sessions/{session_id}/{tree}/{name}/tokens")
async def tokens(
    ui: Shown, session_id: str, tree: Tree, name: str, start: Start = 0, count: Count = 400, overview: bool = False
) -> Response:
    source = await _source(ui, session_id, tree, name)
    return _json(await token_page(source, ui.texts, start, count, overview=overview))


@router.get("/sessions/{session_id}/{tree}/{name}/next")
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


@router.get("/sessions/{session_id}/calls/{call_id}/messages/{index}")
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
