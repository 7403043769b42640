"""IdText: token ids as JSON text, read and written only where they are new.

An engine is told a whole prompt and renders a whole history with every call. In one conversation each of those lists begins with
the one before, so its text is compared with the last ones and only the rest is parsed or spelled out. Comparing is a hundred times
cheaper than parsing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from reconstruct.records import Ids, pack_ids

_REMEMBERED = 2
"""Lists remembered each way: two conversations may take turns in one session."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[int]).decode


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A JSON list of integers and the same as ids."""

    text: bytes
    ids: Ids


class IdText:
    """The lists of one session, as far as they are remembered."""

    def __init__(self) -> None:
        self._read: deque[_Known] = deque(maxlen=_REMEMBERED)
        self._written: deque[_Known] = deque(maxlen=_REMEMBERED)

    def read(self, text: bytes, *, remember: bool = True) -> Ids:
        """The ids of a JSON list of integers. Raises msgspec.DecodeError when it is something else."""
        ids = self._parse(text)
        if remember:
            self._read.append(_Known(text, ids))
        return ids

    def _parse(self, text: bytes) -> Ids:
        end, known = max(((_shared_ids_end(item.text, text), item) for item in self._read), key=_first, default=(0, None))
        if not end or known is None:
            return pack_ids(_decode(text))
        head = known.ids[: text.count(b",", 0, end) + 1]
        return pack_ids(np.concatenate((head, np.array(_decode(b"[" + text[end + 1 :]), dtype=np.int32))))

    def write(self, ids: Ids) -> bytes:
        """`ids` as a JSON list."""
        best: _Known | None = None
        for item in self._written:
            if item.ids is ids:
                return item.text
            if (best is None or len(item.ids) > len(best.ids)) and _begins(ids, item.ids):
                best = item
        text = _encode(ids.tolist()) if best is None else _extended(best, ids)
        self._written.append(_Known(text, ids))
        return text


def _extended(known: _Known, ids: Ids) -> bytes:
    rest = _encode(ids[len(known.ids) :].tolist())
    return known.text if len(rest) == 2 else known.text[:-1] + b"," + rest[1:]


def _begins(ids: Ids, known: Ids) -> bool:
    return 0 < len(known) <= len(ids) and np.array_equal(ids[: len(known)], known)


def _shared_ids_end(left: bytes, right: bytes) -> int:
    """Where the comma after the last id stands that both texts begin with; 0 for none."""
    length = min(len(left), len(right))
    differs = np.frombuffer(left, np.uint8, length) != np.frombuffer(right, np.uint8, length)
    shared = int(differs.argmax()) if differs.any() else length
    return max(0, right.rfind(b",", 0, shared))


def _first(pair: tuple[int, object]) -> int:
    return pair[0]
