"""A session to take along: its calls and trajectories as the API gives them, its record as it is stored, or one page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from proxy import rows
from proxy.api.archive import part_as_wire
from proxy.api.session_wire import session_as_wire
from proxy.errors import NotFound
from proxy.ui.exporting import exported_page
from proxy.ui.rendering import HEADERS
from proxy.ui.shown import Shown, Ui
from reconstruct.trajectory import accounting_as_wire, as_wire

router = APIRouter(prefix="/ui")


@router.get("/sessions/{session_id}/download/{name}")
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
    records = await ui.services.sessions.records(session_id)
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
        trajectories = [as_wire(row, arrays="list") for row in look.built.rows]
        accounting = accounting_as_wire(look.built.accounting)
        return msgspec.json.encode({"trajectories": trajectories, "accounting": accounting})

    return await asyncio.to_thread(made)


async def record_file(ui: Ui, session_id: str) -> bytes:
    look = await ui.looks.at(session_id)
    named = await ui.services.archive.named_records(session_id, 0, -1)
    return msgspec.msgpack.encode(part_as_wire(look.state, look.delivered, look.intents, named, None))


async def page_file(ui: Ui, session_id: str) -> bytes:
    return await exported_page(await ui.looks.at(session_id), ui.texts)


FILES: Mapping[str, tuple[Callable[[Ui, str], Awaitable[bytes | Iterator[bytes]]], str]] = {
    "calls.json": (calls_file, "application/json"),
    "trajectories.json": (trajectories_file, "application/json"),
    "record.msgpack": (record_file, "application/msgpack"),
    "page.html": (page_file, "text/html; charset=utf-8"),
}
