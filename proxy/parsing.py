"""Parsing: a body becomes a canonical request, on the event loop while it is small and in a thread when it is not.

Everybody's calls wait while the loop parses one. What takes long is parsed in a thread, one body of a process at a time, so that memory
is bounded as well; and one of a session at a time, so that a session with many of them keeps others waiting for one alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

from proxy.dialects.base import Asked, Past, Request
from proxy.dialects.body import check_tools
from proxy.outward import refuse_remote_media, refuse_transfers
from proxy.session_tree import Draft, SessionTree

SMALL_BYTES = 2**16
LARGE_BYTES = 2**19
MANY_VALUES = 5_000
"""Bodies up to the first size are parsed on the loop, and up to the second those that have no more commas than this, text's included:
a few milliseconds mostly, and tens of them where all of it is new parts of messages."""

Read = Callable[[Asked, Past], Request]
"""`parse` or `parse_count` of a dialect."""


class Parsing:
    def __init__(self, *, remote_media: bool) -> None:
        self._remote_media = remote_media
        self._turn = asyncio.Lock()
        self._turns: WeakKeyDictionary[SessionTree, asyncio.Lock] = WeakKeyDictionary()

    async def parse(self, draft: Draft, read: Read, asked: Asked) -> Request:
        """The request. Raises RequestError as the dialect does, and UnknownCall."""
        if _is_quick(asked.body):
            return self._checked(draft, read, asked)
        async with self._turns.setdefault(draft.tree, asyncio.Lock()), self._turn:
            return await asyncio.to_thread(self._checked, draft, read, asked)

    def _checked(self, draft: Draft, read: Read, asked: Asked) -> Request:
        request = read(asked, draft)
        check_tools(request.tools)
        refuse_transfers(request)
        if not self._remote_media:
            refuse_remote_media(request)
        return request


def _is_quick(body: bytes) -> bool:
    return len(body) <= SMALL_BYTES or (len(body) <= LARGE_BYTES and body.count(b",") <= MANY_VALUES)
