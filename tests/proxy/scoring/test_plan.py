"""Few rows have all calls of a session, each once, at the place of its own ids."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from proxy.scoring.plan import measure_distinct, plan_rows
from reconstruct.accounting import settle
from reconstruct.media import IMAGE, Media
from reconstruct.records import Forest
from tests.reconstruct.test_properties import Drawn, sessions
from tests.support.sessions.calls import call


@given(sessions())
def test_every_call_is_in_one_row_at_its_own_ids_and_no_row_begins_another(drawn: Drawn) -> None:
    forest = settle(drawn.talk.calls).forest
    rows = plan_rows(forest, forest.calls.values())
    placed = [place.call.call_id for row in rows for place in row.places]
    assert sorted(placed) == sorted(forest.calls)
    for row in rows:
        for place in row.places:
            assert row.ids[: place.end].tolist() == forest.full_ids(place.call.call_id).tolist()
    wholes = [row.ids.tolist() for row in rows]
    assert not any(one == other[: len(one)] for one in wholes for other in wholes if one is not other)
    # What neighbours share is all that any two rows share.
    assert measure_distinct(rows) == len({tuple(whole[:end]) for whole in wholes for end in range(1, len(whole) + 1)})


def test_equal_ids_that_stand_for_different_images_are_two_rows_that_share_what_stands_before() -> None:
    """9 stands for an image: c2's is another than c1's."""
    calls = [call(name, delta=[1, 9, 9, 2], said=[3]) for name in ("c1", "c2")]
    shown = [(Media(letter * 64, IMAGE, 1, 2),) for letter in "ab"]
    forest = Forest(replace(each, node=replace(each.node, media=media)) for each, media in zip(calls, shown, strict=True))
    first, second = plan_rows(forest, forest.calls.values())
    assert (len(first.places), len(second.places), second.shared) == (1, 1, 1)
