"""Media: equal ids are equal context only where the same images stand behind them, and placeholders are never trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reconstruct.accounting import account, settle
from reconstruct.builders import RowContext, merged, per_call
from reconstruct.errors import LengthMismatch, RecordError
from reconstruct.media import IMAGE, Media, agreed_length
from reconstruct.records import Call, Forest
from tests.support.sessions.calls import call

RED, BLUE = "aa" * 32, "bb" * 32
PAD = 9


def image(digest: str, start: int, length: int = 2) -> Media:
    return Media(digest, IMAGE, start, length)


def seen(call_id: str, *media: Media, **fields: object) -> Call:
    """A call with media in its delta."""
    made = call(call_id, **fields)  # type: ignore[arg-type]
    return replace(made, node=replace(made.node, media=media))


def two_turns() -> list[Call]:
    """
    c1  1 [9 9] | 3
    c2  1 [9 9]   3   4 [9 9] 5 | 6
    """
    return [
        seen("c1", image(RED, 1), delta=[1, PAD, PAD], said=[3]),
        seen("c2", image(BLUE, 1), parent="c1", base="c1", base_length=4, delta=[4, PAD, PAD, 5], said=[6]),
    ]


def test_a_prompt_has_the_media_of_its_base_and_its_own() -> None:
    forest = Forest(two_turns())
    assert forest.media("c1") == (image(RED, 1),)
    assert forest.media("c2") == (image(RED, 1), image(BLUE, 5))
    assert forest.branch("c2") == ["c1", "c2"]


@pytest.mark.case(72)
@pytest.mark.parametrize("builder", [merged, per_call])
def test_rows_carry_media_at_their_own_positions_and_placeholders_are_not_trained(builder) -> None:  # type: ignore[no-untyped-def]
    settled = settle(two_turns())
    rows = builder(settled, RowContext("s"))
    account(settled, rows)
    assert rows[-1].media == (image(RED, 1), image(BLUE, 5))
    assert rows[-1].loss_mask.tolist()[1:3] == [0, 0]


def test_a_row_with_other_media_than_its_calls_or_with_a_trained_placeholder_is_refused() -> None:
    settled = settle(two_turns())
    (row,) = merged(settled, RowContext("s"))
    with pytest.raises(RecordError, match="other media"):
        account(settled, [replace(row, media=row.media[:1])])
    mask = row.loss_mask.copy()
    mask[2] = 1
    with pytest.raises(RecordError, match="placeholder is trained"):
        account(settled, [replace(row, loss_mask=mask)])


def test_a_call_whose_ids_begin_with_its_parents_does_not_extend_it_if_another_image_stands_behind_them() -> None:
    """
    c1  1 [9 9] | 3      red
    c2  1 [9 9]   3 4 | 6  blue
    """
    forest = Forest(
        [
            seen("c1", image(RED, 1), delta=[1, PAD, PAD], said=[3]),
            seen("c2", image(BLUE, 0), parent="c1", base="c1", base_length=1, delta=[PAD, PAD, 3, 4], said=[6]),
        ]
    )
    assert forest.prompt_ids("c2").tolist() == [1, PAD, PAD, 3, 4]
    assert forest.media("c2") == (image(BLUE, 1),)
    assert not forest.extends("c2")


def test_a_base_that_ends_within_an_image_quarantines_the_call() -> None:
    cut = seen("c2", parent="c1", base="c1", base_length=2, delta=[4], said=[6])
    first = two_turns()[0]
    with pytest.raises(LengthMismatch, match="media range"):
        Forest([first, cut])
    assert settle([first, cut]).refused == {"c2": "length_mismatch"}


@pytest.mark.parametrize("media", [[image(RED, -1)], [image(RED, 3)], [image(RED, 0), image(BLUE, 1)], [image(RED, 0, 0)]])
def test_media_outside_the_delta_or_upon_one_another_quarantine_the_call(media: list[Media]) -> None:
    broken = seen("c1", *media, delta=[1, PAD, PAD, 2], said=[3])
    assert settle([broken]).refused == {"c1": "length_mismatch"}


@pytest.mark.parametrize(
    ("shared", "left", "right", "agreed"),
    [
        (9, [], [], 9),
        (9, [image(RED, 2)], [image(RED, 2)], 9),
        (9, [image(RED, 2)], [image(BLUE, 2)], 2),
        (9, [image(RED, 2)], [], 2),
        (9, [], [image(RED, 2)], 2),
        (9, [image(RED, 2)], [image(RED, 2, 3)], 2),
        (3, [image(RED, 2)], [image(RED, 2)], 2),
        (2, [image(RED, 2)], [image(RED, 2)], 2),
        (1, [image(RED, 2)], [image(BLUE, 2)], 1),
        (9, [image(RED, 2), image(RED, 5)], [image(RED, 2), image(BLUE, 5)], 5),
        (9, [image(RED, 2)], [image(RED, 2), image(BLUE, 5)], 5),
    ],
)
def test_shared_ids_agree_up_to_the_first_that_differs(shared: int, left: list[Media], right: list[Media], agreed: int) -> None:
    assert agreed_length(shared, left, right) == agreed_length(shared, right, left) == agreed
