"""The structure of a JSON text, looked at before it is decoded: its levels of nesting and how many values it holds.

What a body costs follows from its values, not from its bytes: 56 MB of empty objects take a hundred times the memory and time of one
text as long. A text is looked at a piece at a time, so that whoever shares the interpreter waits for one piece at most; what stands
in strings is told apart only where there is a suspicion, since that costs more than decoding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from proxy.errors import RequestError

MAX_DEPTH = 100
"""Levels of nesting that a JSON value may have. Templates, engines and this process recurse into it."""

MAX_VALUES = 250_000
"""Values that a request may hold: messages, their parts, and the members of both."""

MAX_FIELD_VALUES = 50_000
"""Values in one field beside the history, the tools above all: they are compared with every call."""

MAX_MESSAGES = 20_000
"""Messages, or items of them, in one history."""

MAX_TOOLS = 2_048
"""Tools that one request may offer."""

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
    """Raise RequestError when the JSON text is nested more than `MAX_DEPTH` levels deep. Who hides depth behind text that is no JSON
    meets the recursion limit, which is answered in the same way."""
    brackets = raw.translate(None, _NOT_BRACKETS) if len(raw) <= PIECE_BYTES else raw
    if len(brackets) > MAX_DEPTH and _deepest(_pieces(brackets)) > MAX_DEPTH and _deepest(_outside_strings(raw)) > MAX_DEPTH:
        raise RequestError(f"the body is nested too deeply: more than {MAX_DEPTH} levels")


def check_values(raw: bytes, most: int, what: str, param: str | None = None) -> None:
    """Raise RequestError when the JSON text, which is `what`, holds more than `most` values, names of members included."""
    # A value takes two bytes at least, its own and a comma.
    if len(raw) <= 2 * most or _fewer(_pieces(raw), most) or _fewer(_outside_strings(raw), most):
        return
    raise RequestError(f"{what} holds more than {most} values", param=param)


def _deepest(pieces: Iterator[Bytes]) -> int:
    level = deepest = 0
    for piece in pieces:
        steps = np.cumsum(_STEPS[piece], dtype=np.int32)
        if len(steps):
            deepest = max(deepest, level + int(steps.max()))
            level += int(steps[-1])
        if deepest > MAX_DEPTH:
            break
    return deepest


def _fewer(pieces: Iterator[Bytes], most: int) -> bool:
    values = 0
    for piece in pieces:
        values += int(np.count_nonzero(_VALUES[piece]))
        if values > most:
            return False
    return True


def _pieces(raw: bytes) -> Iterator[Bytes]:
    for start in range(0, len(raw), PIECE_BYTES):
        yield np.frombuffer(raw, np.uint8, min(PIECE_BYTES, len(raw) - start), start)


def _outside_strings(raw: bytes) -> Iterator[Bytes]:
    """The bytes of the text that stand in no string."""
    inside, start = False, 0
    while start < len(raw):
        piece = raw[start : start + PIECE_BYTES]
        start += len(piece)
        # What a backslash escapes must not be cut from it.
        if (len(piece) - len(piece.rstrip(_BACKSLASH))) % 2:
            piece += raw[start : start + 1]
            start += 1
        found = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        strings = np.logical_xor.accumulate(found == _QUOTE) ^ inside
        if len(strings):
            inside = bool(strings[-1])
        yield found[~strings]
