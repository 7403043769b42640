"""Where a listing of calls goes on: the same place however many calls are recorded meanwhile.

Recorded calls are counted, for they are only ever appended. Unfinished calls come behind them, in the order in which they began;
one that is recorded between two pages comes again, as a record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxy.errors import RequestError


@dataclass(frozen=True, slots=True)
class CallsCursor:
    """`recorded` records were shown, and the unfinished calls up to the one of that beginning and id."""

    recorded: int = 0
    unfinished: tuple[float, str] = (-math.inf, "")

    @classmethod
    def parse(cls, text: str | None) -> CallsCursor:
        """Raises RequestError for one that this service never gave."""
        if text is None:
            return cls()
        number, *rest = text.split("_", 2)
        try:
            if not (number.isascii() and number.isdigit()) or len(rest) == 1:
                raise ValueError
            return cls(int(number), (float(rest[0]), rest[1])) if rest else cls(int(number))
        except ValueError:
            raise RequestError(f"cursor: {text!r} is not one that this service gave", param="cursor") from None

    def __str__(self) -> str:
        began, call_id = self.unfinished
        return str(self.recorded) if not call_id else f"{self.recorded}_{began!r}_{call_id}"
