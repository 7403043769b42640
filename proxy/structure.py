"""Bounds on the structure of a JSON text, checked before it is decoded: nesting and number of values.

What a body costs follows from its values, not from its bytes: 56 MB of empty objects take a hundred times the memory and time of one
text as long. A text is scanned a piece at a time, so that threads that share the interpreter wait for one piece at most. What stands
inside strings is distinguished only if the first scan fails, since that costs more than decoding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from proxy.errors import RequestError

MAX_DEPTH = 100
"""Levels of nesting in a JSON value. Templates, engines and this process recurse into it."""

MAX_VALUES = 250_000
"""Values in a request: messages, their parts, and the members of both."""

MAX_FIELD_VALUES = 50_000
"""Values in one field beside the history, such as the tools: they are compared with every call."""

MAX_MESSAGES = 20_000
"""Messages, or items, in one history."""

MAX_TOOLS = 2_048

PIECE_BYTES = 2**19

_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_QUOTE, _BACKSLASH = ord('"'), b"\\"
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_VALUES = np.zeros(256, bool)
_VALUES[list(b"[{,:")] = True

Bytes = NDArray[np.uint8]


def check_depth(raw: bytes) -> None:
    """Raise RequestError if the JSON text is nested more than `MAX_DEPTH` levels deep. Depth hidden behind text that is no JSON hits the
    recursion limit, which is answered the same way."""
    brackets = raw.translate(None, _NOT_BRACKETS) if len(raw) <= PIECE_BYTES else raw
    if len(brackets) > MAX_DEPTH and _depth(_pieces(brackets)) > MAX_DEPTH and _depth(_outside_strings(raw)) > MAX_DEPTH:
        raise RequestError(f"the body is nested too deeply: more than {MAX_DEPTH} levels")


def check_values(raw: bytes, most: int, what: str, param: str | None = None) -> None:
    """Raise RequestError if the JSON text, called `what`, holds more than `most` values, names of members included."""
    # A value takes at least two bytes: its own and a comma.
    if len(raw) > 2 * most and _has_more(_pieces(raw), most) and _has_more(_outside_strings(raw), most):
        raise RequestError(f"{what} holds more than {most} values", param=param)


def _depth(pieces: Iterator[Bytes]) -> int:
    level = deepest = 0
    for piece in pieces:
        steps = np.cumsum(_STEPS[piece], dtype=np.int32)
        if len(steps):
            deepest = max(deepest, level + int(steps.max()))
            level += int(steps[-1])
        if deepest > MAX_DEPTH:
            break
    return deepest


def _has_more(pieces: Iterator[Bytes], most: int) -> bool:
    values = 0
    for piece in pieces:
        values += int(np.count_nonzero(_VALUES[piece]))
        if values > most:
            return True
    return False


def _pieces(raw: bytes) -> Iterator[Bytes]:
    for start in range(0, len(raw), PIECE_BYTES):
        yield np.frombuffer(raw, np.uint8, min(PIECE_BYTES, len(raw) - start), start)


def _outside_strings(raw: bytes) -> Iterator[Bytes]:
    """The bytes of the text that are not part of a string."""
    inside, start = False, 0
    while start < len(raw):
        piece = raw[start : start + PIECE_BYTES]
        start += len(piece)
        # A backslash and what it escapes must stay in one piece.
        if (len(piece) - len(piece.rstrip(_BACKSLASH))) % 2:
            piece += raw[start : start + 1]
            start += 1
        found = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        strings = np.logical_xor.accumulate(found == _QUOTE) ^ inside
        if len(strings):
            inside = bool(strings[-1])
        yield found[~strings]
