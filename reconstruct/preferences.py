"""Preference pairs: what a lookahead chose, beside each candidate that it did not choose, after the same prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from reconstruct.records import CHOSEN, LOOKAHEAD, NOT_CHOSEN, Call, Forest


@dataclass(frozen=True, slots=True)
class Preference:
    """Two calls of one prompt; both have token ids."""

    chosen: Call
    rejected: Call


def find_preferences(forest: Forest) -> Iterator[Preference]:
    """One for each candidate that was not chosen where another was, in the order of recording. Candidates that say the same, token for
    token, prefer nothing."""
    asked: dict[tuple[str | None, bytes, float], Call] = {}
    for call in forest.calls.values():
        if not call.ids_known:
            continue
        request = (call.node.parent_id, call.digest, call.started_at)
        if call.marks.get(LOOKAHEAD) == CHOSEN:
            asked[request] = call
        chosen = asked.get(request)
        if chosen is None or call.marks.get(LOOKAHEAD) != NOT_CHOSEN:
            continue
        if not np.array_equal(chosen.node.completion_ids, call.node.completion_ids):
            yield Preference(chosen, call)
