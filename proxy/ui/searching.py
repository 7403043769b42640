"""Search in the messages of many sessions, within bounds that the page says.

It reads the records of the sessions that a list's other filters let through, newest first, until it has a page of findings, or has read
`MOST_SESSIONS` sessions or `MOST_BYTES`, and goes on from there when asked to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.services import Services
from proxy.store.keys import listing_member
from proxy.store.states import SessionState
from proxy.ui.session_view import list_strings
from reconstruct.codec import decode
from reconstruct.errors import ReconstructError

MOST_SESSIONS = 300
MOST_BYTES = 24 * 2**20
"""Of messages and replies as they are stored as JSON."""
CALLS_AT_ONCE = 16
AROUND = 60
"""Characters of an excerpt on either side."""


@dataclass(frozen=True, slots=True)
class Findings:
    """`excerpts`: by session, the first place that has the text. `cursor`: where the search goes on, None if it saw all."""

    sessions: Sequence[SessionState]
    excerpts: dict[str, str]
    searched: int
    read_bytes: int
    cursor: str | None


async def search_messages(services: Services, sessions: Iterable[SessionState], wanted: str, most: int) -> Findings:
    """The first `most` of the sessions that have `wanted` in a message, a reply or their own fields, in any case."""
    found: list[SessionState] = []
    excerpts: dict[str, str] = {}
    searched, read, last = 0, 0, None
    for state in sessions:
        if searched >= MOST_SESSIONS or read >= MOST_BYTES or len(found) >= most:
            return Findings(found, excerpts, searched, read, last)
        excerpt, size = await _search_session(services, state, wanted.casefold(), MOST_BYTES - read)
        searched, read = searched + 1, read + size
        last = listing_member(state.info.created_at, state.info.session_id)
        if excerpt:
            found.append(state)
            excerpts[state.info.session_id] = excerpt
    return Findings(found, excerpts, searched, read, None)


async def _search_session(services: Services, state: SessionState, wanted: str, most_bytes: int) -> tuple[str, int]:
    """An excerpt, "" if there is none, and how many bytes were read. Of a session that is larger than the bound the first calls."""
    read = 0
    for start in range(0, state.calls, CALLS_AT_ONCE):
        records = await services.sessions.load_records(state.info.session_id, start, start + CALLS_AT_ONCE - 1)
        excerpt, size = await asyncio.to_thread(find_excerpt, records, wanted, most_bytes - read)
        read += size
        if excerpt or read >= most_bytes:
            return excerpt, read
    return "", read


def find_excerpt(records: Iterable[bytes], wanted: str, most_bytes: int) -> tuple[str, int]:
    """The first place in new messages or replies that has the text `wanted`, which is casefolded, and how many bytes were read."""
    read = 0
    for record in records:
        try:
            call = decode(record)
        except ReconstructError:
            continue
        read += len(call.messages) + len(call.reply)
        for text in list_strings([_read(call.messages), _read(call.reply)]):
            if (at := text.casefold().find(wanted)) >= 0:
                return cut_excerpt(text, at, len(wanted)), read
        if read >= most_bytes:
            break
    return "", read


def cut_excerpt(text: str, at: int, length: int) -> str:
    begin, end = max(0, at - AROUND), at + length + AROUND
    return ("…" if begin else "") + " ".join(text[begin:end].split()) + ("…" if end < len(text) else "")


def _read(blob: bytes) -> Any:
    try:
        return msgspec.json.decode(blob)
    except msgspec.DecodeError:
        return []
