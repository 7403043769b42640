"""Ids that the service mints into its replies, so that a replayed reply names the call it came from."""

from __future__ import annotations

import base64
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxy.errors import RequestError

_SEAL = b"verbatim1:"
_CALL_ID_LENGTH = 24
_PIECE_BYTES = 2**16

MAX_SEALED_BYTES = 2**26
"""Bytes of reasoning that the seals of one request may hold: as many as a body may have by default."""


def new_call_id() -> str:
    """24 hex digits that sort by minting time: 12 of milliseconds, 12 random."""
    return f"{int(time.time() * 1000):012x}{os.urandom(6).hex()}"


def tool_call_id(call_id: str, position: int) -> str:
    """`call_<call id>_<position>`; reconstruct.messages.minted_call_ids reads it back."""
    return f"call_{call_id}_{position}"


def seal(call_id: str, reasoning: str = "") -> str:
    """An opaque value that a vendor's client returns unread (a thinking signature, encrypted reasoning). It holds the call's id, and the
    reasoning for clients that drop its text. Standard base64, which clients check."""
    return base64.b64encode(_SEAL + call_id.encode() + zlib.compress(reasoning.encode("utf-8", "replace"))).decode()


class LongSeals(Exception):
    """The seals of a request hold more than `Seals.most_bytes`, which is less than any request may have."""


@dataclass(slots=True, eq=False)
class Seals:
    """Opens the seals of one request. Anyone can write one that holds a thousand times its own size, so what they hold is counted and
    bounded for all of them together."""

    most_bytes: int = MAX_SEALED_BYTES
    opened_bytes: int = 0
    """Of reasoning, not compressed; what was opened twice counts twice, and what turned out to be damaged counts too."""

    def open(self, sealed: Any) -> tuple[str, str] | None:
        """(call id, reasoning) of a seal; None for anything else, such as another service's signature. Raises RequestError beyond
        MAX_SEALED_BYTES, LongSeals beyond a lower `most_bytes`."""
        if not isinstance(sealed, str):
            return None
        try:
            content = base64.b64decode(sealed.encode(), validate=True)
            if not content.startswith(_SEAL):
                return None
            start = len(_SEAL) + _CALL_ID_LENGTH
            reasoning = b"".join(map(self._count, _decompress(content[start:])))
            return content[len(_SEAL) : start].decode(), reasoning.decode()
        except (ValueError, zlib.error):
            return None

    def _count(self, piece: bytes) -> bytes:
        self.opened_bytes += len(piece)
        if self.opened_bytes <= self.most_bytes:
            return piece
        if self.most_bytes < MAX_SEALED_BYTES:
            raise LongSeals
        raise RequestError(f"the reasoning sealed in the request is longer than {MAX_SEALED_BYTES} bytes")


def _decompress(packed: bytes) -> Iterator[bytes]:
    """A piece at a time, so that damaged data is noticed no later than too much of it. Raises zlib.error."""
    unpacking = zlib.decompressobj()
    while packed and not unpacking.eof:
        yield unpacking.decompress(packed, _PIECE_BYTES)
        packed = unpacking.unconsumed_tail
    yield unpacking.flush()
