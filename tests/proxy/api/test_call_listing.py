"""A session's calls as the API lists them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.rows import every_call_as_wire
from reconstruct.codec import encode
from reconstruct.records import Call, Forest
from tests.support.sessions.calls import call

TURNS = 1000


def chain() -> list[Call]:
    """c0 <- c1 <- c2 <- ...: each adds one id and samples one; the root alone says which model was asked for."""
    calls = [call("c0", delta=[1], said=[2], fields={"preamble": b'{"model":"policy"}'})]
    for turn in range(1, TURNS):
        base = f"c{turn - 1}"
        calls.append(call(f"c{turn}", parent=base, base=base, base_length=2 * turn, delta=[1], said=[2]))
    return calls


def test_listing_a_chain_of_calls_walks_it_once_to_name_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call's way up to its root was walked anew: 500,000 steps for a session of 1,000 calls."""
    steps, walk = 0, Forest.lineage

    def counted(forest: Forest, call_id: str | None) -> Iterator[Call]:
        nonlocal steps
        for ancestor in walk(forest, call_id):
            steps += 1
            yield ancestor

    monkeypatch.setattr(Forest, "lineage", counted)
    calls = chain()
    listed = list(every_call_as_wire([encode(each) for each in calls], set(), [], set()))
    assert [each["call_id"] for each in listed] == [each.call_id for each in calls]
    assert {each["model"] for each in listed} == {"policy"}
    assert steps <= TURNS
