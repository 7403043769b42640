"""A request body taken apart: its fields decoded, the items of its history raw. What a recorded body of the session brought as well is
neither parsed nor decoded again.

Three ways lead through `split_body`, and all give the same:

- fast: the body begins as a known one does up to the end of its history's last item, and ends as that does after it. Only what stands
  between is parsed. JSON is read from left to right by an automaton: equal bytes from the start leave it inside the list, after an item;
  what follows is taken only if it is whole items, and equal bytes to the end then read alike.
- medium: the top level is parsed in one pass, and the history begins with items of a known one, byte for byte with what separates them,
  up to where an item ends in both.
- full: nothing is known.

Whatever is in doubt goes the full way, which also makes all errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from proxy.dialects.fields import (
    MAX_FIELD_VALUES,
    MAX_VALUES,
    check_tools,
    check_values,
    count_values,
    decode,
    replace_surrogates,
)
from proxy.dialects.raw_history import RawHistory, Span, SplitBody
from proxy.errors import RequestError

MAX_MESSAGES = 20_000
"""Messages, or items, in one history."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_SPACE = b" \t\r\n"

_LONG_FIELD = 1024
"""A field of at least so many bytes, such as the tools, is decoded once: its bytes are compared with those of known bodies."""

_COUNTED_BYTES = 2 * MAX_VALUES
"""A shorter body cannot hold too many values."""


def split_body(body: bytes, listed: str, known: Sequence[RawHistory] = ()) -> SplitBody:
    """The body's fields, decoded, without `listed`, and the raw items of that; an absent list is empty. `known`: what earlier bodies
    were remembered as.

    A lone surrogate, which JSON can express and UTF-8 cannot, becomes the replacement character. Raises RequestError if the body is no
    JSON object, `listed` is no list, or there are more values, items or tools than one request may have.
    """
    for before in known:
        if (found := _go_on(body, before)) is not None:
            return found
    values = count_values(body) if len(body) > _COUNTED_BYTES else None
    if values is not None and values > MAX_VALUES:
        check_values(body, MAX_VALUES, "the body")
    try:
        return _split(body, listed, known, values)
    except RequestError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = _split(replace_surrogates(body, error), listed, (), None)
        # Its offsets are not those of the body that came.
        return SplitBody(body, found.fields, found.new)


def _go_on(body: bytes, before: RawHistory) -> SplitBody | None:
    """The body as `before` and items that follow its last one; None where it is something else."""
    view, end = memoryview(before.body), int(before.ends[-1])
    tail = len(body) - (len(before.body) - before.tail)
    if tail < end or not body.startswith(view[:end]) or not body.endswith(view[before.tail :]):
        return None
    between = body[end:tail]
    new = _read_more(between)
    if new is None or len(before) + len(new) > MAX_MESSAGES:
        return None
    values = None
    if len(body) > _COUNTED_BYTES:
        values = (count_values(before.body) if before.values is None else before.values) + count_values(between)
        if values > MAX_VALUES:
            return None
    grown = len(body) - len(before.body)
    # A field after the history has moved with its end.
    long = {name: (at, to) if at < before.start else (at + grown, to + grown) for name, (at, to) in before.long.items()}
    last = end + len(between.rstrip(_SPACE))
    return SplitBody(body, before.fields, new, (before.start, last), tail, long, values, len(before), before, "fast")


def _read_more(text: bytes) -> list[bytes] | None:
    """The raw items of what stands between an item and the end of its list; None where that is no more of the list."""
    text = text.strip(_SPACE)
    if not text:
        return []
    if text[:1] != b",":
        return None
    try:
        new = _LIST.decode(b"[%b]" % text[1:])
    except (msgspec.DecodeError, RecursionError):
        return None
    return [bytes(item) for item in new] or None


def _split(body: bytes, listed: str, known: Sequence[RawHistory], values: int | None) -> SplitBody:
    try:
        raw = _OBJECT.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError("the body must be a JSON object") from error
    history = raw.pop(listed, None)
    fields: dict[str, Any] = {}
    long: dict[str, Span] = {}
    for name, value in raw.items():
        fields[name], place = _decode_field(name, value, body, known)
        if place is not None:
            long[name] = place
    if history is None or bytes(history) == b"null":
        return SplitBody(body, fields, [])
    place = _find_place(history, body)
    if place is None:
        return SplitBody(body, fields, _list_items(history, listed))
    before, count, new = _find_shared(body, place, known)
    if before is None:
        new = _list_items(history, listed)
    if count + len(new) > MAX_MESSAGES:
        # Without `param`: callers take an error about this field to mean that it is no list, which some vendors allow.
        raise RequestError(f"'{listed}' holds {count + len(new)} items, of at most {MAX_MESSAGES}")
    start, tail = place[0], place[1] - 1
    last = start + len(body[start:tail].rstrip(_SPACE))
    return SplitBody(body, fields, new, (start, last), tail, long, values, count, before, "medium" if before else "full")


def _list_items(history: msgspec.Raw, listed: str) -> list[bytes]:
    try:
        return [bytes(item) for item in _LIST.decode(history)]
    except msgspec.ValidationError as error:
        raise RequestError(f"'{listed}' must be a list", param=listed) from error


def _find_shared(body: bytes, place: Span, known: Sequence[RawHistory]) -> tuple[RawHistory | None, int, list[bytes]]:
    """The known history that shares most items with the beginning of the list at `place`, how many they are, and the items after."""
    best, count = None, 0
    for before in known:
        shared = _count_shared(body, place, before)
        if shared > count:
            best, count = before, shared
    while best is not None and count:
        end = place[0] + int(best.ends[count - 1]) - best.start
        new = _read_more(body[end : place[1] - 1]) if end < place[1] else None
        if new is not None:
            return best, count, new
        # The beginning of a longer number is no item.
        count -= 1
    return None, 0, []


def _count_shared(body: bytes, place: Span, before: RawHistory) -> int:
    """How many items of `before` the list at `place` begins with byte for byte, what separates them included."""
    view, low, high = memoryview(before.body), 0, len(before)
    while low < high:
        middle = (low + high + 1) // 2
        if body.startswith(view[before.start : int(before.ends[middle - 1])], place[0]):
            low = middle
        else:
            high = middle - 1
    return low


def _decode_field(name: str, raw: msgspec.Raw, body: bytes, known: Sequence[RawHistory]) -> tuple[Any, Span | None]:
    """The field's value, the very same as in a known body that has the same bytes for it, and where it stands if it is long."""
    text = bytes(raw)
    place = _find_place(raw, body) if len(text) >= _LONG_FIELD else None
    if place is not None:
        for before in known:
            at, to = before.long.get(name, (0, 0))
            if to - at == len(text) and before.body[at:to] == text:
                return before.fields[name], place
    check_values(text, MAX_FIELD_VALUES, f"'{name}'", name)
    value = decode(text)
    if name == "tools" and isinstance(value, list):
        check_tools(value)
    return value, place


def _find_place(raw: msgspec.Raw, body: bytes) -> Span | None:
    """Where the decoder found the value in the body, by its address; None if it stands elsewhere."""
    start = _address(raw) - _address(body)
    end = start + len(memoryview(raw))
    return (start, end) if 0 <= start < end <= len(body) else None


def _address(buffer: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
