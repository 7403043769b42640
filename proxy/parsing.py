"""Parsing: a body becomes a canonical request, on the event loop while it is small and in a thread when it is not.

Everybody's calls wait while the loop parses one. What takes long is parsed in a thread, one body of a process at a time, so that memory
is bounded as well; and one of a session at a time, so that a session with many of them keeps others waiting for one alone. What was
refused took time for nothing: its session pays for it with its next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from proxy.dialects.base import Asked, Past, Request
from proxy.dialects.body import check_tools
from proxy.dialects.fields import check_recordable
from proxy.errors import RequestError, UnknownCall
from proxy.outward import refuse_remote_media, refuse_transfers
from proxy.session_tree import Draft, ParseTurn

SMALL_BYTES = 2**16
LARGE_BYTES = 2**19
MANY_VALUES = 5_000
"""Bodies up to the first size are parsed on the loop, and up to the second those that have no more commas than this, text's included:
a few milliseconds mostly, and tens of them where all of it is new parts of messages."""

Read = Callable[[Asked, Past], Request]
"""`parse` or `parse_count` of a dialect."""

RESTS = 10
"""A session whose request was refused waits so many times as long as that took until its next one is read."""


class Parsing:
    def __init__(self, *, remote_media: bool) -> None:
        self._remote_media = remote_media
        self._thread = asyncio.Lock()

    async def parse(self, draft: Draft, read: Read, asked: Asked, *, again: bool = False) -> Request:
        """The request. Raises RequestError as the dialect does, and UnknownCall; `again`: what was unknown was asked of the store."""
        quick, turn = _is_quick(asked.body), draft.tree.parse_turn
        if quick and turn is None:
            return self._timed(draft, read, asked, again)
        if turn is None:
            turn = draft.tree.parse_turn = ParseTurn()
        async with turn.lock:
            if (left := turn.rests_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            if quick:
                return self._timed(draft, read, asked, again)
            async with self._thread:
                return await asyncio.to_thread(self._timed, draft, read, asked, again)

    def _timed(self, draft: Draft, read: Read, asked: Asked, again: bool) -> Request:
        began = time.monotonic()
        try:
            return self._checked(draft, read, asked)
        except (RequestError, RecursionError) as error:
            if again or not isinstance(error, UnknownCall):
                now = time.monotonic()
                turn = draft.tree.parse_turn = draft.tree.parse_turn or ParseTurn()
                turn.rests_until = now + RESTS * (now - began)
            raise

    def _checked(self, draft: Draft, read: Read, asked: Asked) -> Request:
        request = read(asked, draft)
        check_tools(request.tools)
        check_recordable(request.forward)
        refuse_transfers(request)
        if not self._remote_media:
            refuse_remote_media(request)
        return request


def _is_quick(body: bytes) -> bool:
    return len(body) <= SMALL_BYTES or (len(body) <= LARGE_BYTES and body.count(b",") <= MANY_VALUES)
