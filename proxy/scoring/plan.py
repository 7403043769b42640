"""Which calls of a session a scorer is asked about, and the few rows of ids that have all of them.

The forest's calls share their prompts. One request with the ids of a leaf scores every call on the way to it, so each call whose ids begin
another one's needs no request of its own. The rows come in the order of their ids: neighbours share the longest beginnings, which an
engine with a prefix cache then computes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxy.scoring.scorers import Scorer
from reconstruct.accounting import Settled
from reconstruct.media import Media
from reconstruct.records import MASKED, Call, Forest, Ids, shared_length


@dataclass(frozen=True, slots=True)
class Place:
    """The tokens that a call sampled, at `start` of a row."""

    call: Call
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.call.node.completion_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRow:
    """The ids of a call with all before them, its images, and every call whose tokens are scored with them. `shared`: how many ids it has
    in common with the row before it."""

    ids: Ids
    media: tuple[Media, ...]
    places: Sequence[Place]
    shared: int = 0


def find_wanted(settled: Settled, scorer: Scorer | None) -> list[Call]:
    """The calls that a scorer is asked about: those that are trained, of a `when: grammar` those that a grammar masked."""
    trained = (call for call in settled.forest.calls.values() if call.call_id not in settled.refused)
    return [
        call
        for call in trained
        if len(call.node.completion_ids) and (scorer is None or scorer.when == "always" or is_masked(call))
    ]


def is_masked(call: Call) -> bool:
    return any(span.mode == MASKED for span in call.node.modes)


def plan_rows(forest: Forest, calls: Iterable[Call]) -> list[ScoreRow]:
    """Rows that have the sampled tokens of all the calls, each of them once."""
    keyed = sorted((_key(forest, call), call.call_id, call) for call in calls)
    rows: list[ScoreRow] = []
    last = b""
    pending: list[tuple[bytes, Call]] = []
    for at, (key, call_id, call) in enumerate(keyed):
        pending = [(before, each) for before, each in pending if key.startswith(before)] + [(key, call)]
        if at + 1 < len(keyed) and keyed[at + 1][0].startswith(key):
            # In this order whatever it begins comes next.
            continue
        places = [Place(each, forest.prompt_length(each.call_id)) for _, each in pending]
        shared = shared_length(np.frombuffer(last, "i4"), np.frombuffer(key, "i4"))
        rows.append(ScoreRow(forest.full_ids(call_id), forest.media(call_id), places, shared))
        # A row's calls are scored with it: the next row that they begin, too, leaves them out.
        last, pending = key, []
    return rows


def measure_distinct(rows: Sequence[ScoreRow]) -> int:
    """How many ids the rows have, each beginning that neighbours share counted once."""
    return sum(len(row.ids) - row.shared for row in rows)


def _key(forest: Forest, call: Call) -> bytes:
    """Of the call's ids, in their order: one key begins another if the ids do, and stand for the same images."""
    ids: NDArray[np.uint32] = forest.full_ids(call.call_id).astype(">u4")
    for each in forest.media(call.call_id):
        # No id is that large.
        ids[each.start : each.end] = 2**31 + int(each.digest[:7], 16)
    return ids.tobytes()
