"""Draft: what one request adds to its session's memory, for as long as nobody knows whether its call is recorded.

`keep` gives it to the session; without that it goes with the request, as whatever was refused does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from proxy.call.memo import Converted, HistoryMemo, Reading
from proxy.call.session import MEMORY_PER_BYTE, SeenKey, Session
from proxy.call.window import TOKEN_BYTES, check_texts, find_texts
from proxy.dialects.base import Divide, HistoryMessage, ItemReader, Seals, T
from proxy.dialects.raw_history import SplitBody
from proxy.dialects.splitting import split_body
from proxy.images import ImageReader
from reconstruct.messages import hash_bytes
from reconstruct.records import Call

_SHORT_BYTES = 4096
"""Raw messages up to this size are their own key; longer ones are remembered by their digest."""
_SEEN_BYTES = 1536
"""What one remembered message takes beside its content: measured for a short one, with its digests and its key."""
_VALUE_BYTES = 96
"""The same for a JSON value within a message: those of an object of one member."""


class Draft:
    """Implements `proxy.dialects.base.Past`."""

    __slots__ = ("_converted", "_memos", "_new", "_read", "_reader", "refreshed", "seals", "session", "window")

    def __init__(self, session: Session, window: int | None = None) -> None:
        self.session = session
        self.window = window
        """The most tokens that any engine takes, None where that is not known."""
        self._reader: ImageReader | None = None
        self.refreshed = False
        self.seals = Seals()
        self._new: dict[SeenKey, tuple[list[HistoryMessage], int]] = {}
        self._memos: Sequence[HistoryMemo] = ()
        self._read: tuple[Divide, SplitBody, Reading] | None = None
        """The history that was read last, as it may be remembered."""
        self._converted: list[Converted] = []

    @property
    def images(self) -> Mapping[str, bytes]:
        """The bytes of the new messages' images, by digest."""
        return {} if self._reader is None else self._reader.images

    @property
    def way(self) -> str:
        """How much of the body was known; see `SplitBody`. "" before its history was read."""
        return "" if self._read is None else self._read[1].way

    def body(self, body: bytes) -> SplitBody:
        """The request's body as it was read; whole where it has no history."""
        split = None if self._read is None else self._read[1]
        return split if split is not None and split.body is body else SplitBody(body, {}, [])

    def split(self, body: bytes, listed: str, divide: Divide) -> SplitBody:
        self._memos = self.session.memos.find(divide)
        return split_body(body, listed, [memo.raw for memo in self._memos])

    def read(self, split: SplitBody, divide: Divide) -> tuple[list[HistoryMessage], list[bytes]]:
        reading, first = Reading(), 0
        for memo in self._memos:
            if memo.raw is split.before:
                reading, first = memo.reading.up_to(split.known)
        for unit in divide(split.items(first)):
            if unit.fresh:
                reading.places.append((first + unit.start, len(reading.messages), len(reading.aside)))
            if unit.read is None:
                reading.aside.append(unit.raw)
            else:
                reading.messages.extend(self.read_item(unit.raw, unit.read))
        self._read = divide, split, reading
        return [*reading.messages], [*reading.aside]

    def convert(self, given: Any, convert: Callable[[Any], T]) -> T:
        for value, by, result in (*self.session.memos.converted, *self._converted):
            if value is given and by is convert:
                return cast(T, result)
        made = convert(given)
        if given:
            self._converted.append((given, convert, made))
        return made

    def read_item(self, raw: bytes, read: ItemReader) -> list[HistoryMessage]:
        # The same bytes may mean another message in another dialect.
        key = (read, raw if len(raw) <= _SHORT_BYTES else hash_bytes(raw))
        seen = self.session.items.get(key)
        if seen is not None:
            return seen
        new = self._new.get(key)
        if new is None:
            before = 0 if self._reader is None else self._reader.size_bytes
            opened = self.seals.opened_bytes
            found = read(raw, self)
            if self.window is not None and len(raw) > TOKEN_BYTES * self.window:
                # To digest it takes ten times as long as to read it.
                check_texts(find_texts(each.message for each in found), self.window, "messages")
            messages = [self.session.digest(each, self._read_images) for each in found]
            length = len(raw)
            if self._reader is not None:
                # The bytes of images are not kept with their messages.
                length = max(0, length - 4 * (self._reader.size_bytes - before) // 3)
            length += self.seals.opened_bytes - opened
            new = self._new[key] = messages, _SEEN_BYTES + MEMORY_PER_BYTE * length + _VALUE_BYTES * raw.count(b",")
        return new[0]

    def _read_images(self, message: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Of a new message."""
        if self._reader is None:
            self._reader = ImageReader(self.session.bounds)
        return self._reader.read(message)

    def keep(self) -> None:
        """The call is recorded."""
        for key, (seen, size) in self._new.items():
            self.session.keep(key, seen, size)
        if self._read is not None:
            self.session.memos.keep(*self._read, self._converted)
        self._new, self._read = {}, None

    def call(self, call_id: str) -> Call:
        return self.session.call(call_id)

    def reply(self, call_id: str) -> dict[str, Any]:
        return self.session.reply(call_id)

    def history(self, call_id: str) -> list[HistoryMessage]:
        return self.session.history(call_id)
