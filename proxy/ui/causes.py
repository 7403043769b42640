"""Equal failures as one: messages that differ in numbers, ids and paths alone have one cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VARYING = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|(?:/[\w.+-]+){2,}|\b(?=\w*\d)[\w.-]*[-_.:]\d[\w.:-]*|\d+(?:\.\d+)?")
"""Addresses, digests, paths, names with a number behind a sign, numbers."""
MOST_CAUSES = 20
MOST_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Cause:
    """`text`: the message of the first of the `count` failures; `names`: of the first few."""

    text: str
    count: int
    names: Sequence[str]

    @property
    def kind(self) -> str:
        """What a failure begins with before its message, and what its equals share."""
        return self.text.partition(":")[0] if ":" in self.text[:60] else self.text[:60]


def group_causes(failures: Iterable[tuple[str, str]]) -> list[Cause]:
    """Of (message, name) pairs, the most frequent first, at most `MOST_CAUSES`. Empty messages are none."""
    grouped: dict[str, list[tuple[str, str]]] = {}
    for message, name in failures:
        if message:
            text = message.strip()[:MOST_CHARACTERS]
            grouped.setdefault(VARYING.sub("#", text), []).append((text, name))
    found = [Cause(each[0][0], len(each), [name for _, name in each[:5]]) for each in grouped.values()]
    return sorted(found, key=lambda cause: -cause.count)[:MOST_CAUSES]
