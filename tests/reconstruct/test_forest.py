"""The forest: prompts put together from shared prefixes, and which call extends which."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from reconstruct.codec import encode
from reconstruct.errors import LengthMismatch, UnknownParent
from reconstruct.records import Call, Forest, shared_length
from tests.support.sessions.calls import Talk, call, tell


def test_a_prompt_is_its_parents_ids_and_its_own() -> None:
    forest = Forest(tell("c1: 1 2 | 3 4", "c2 < c1: 5 | 6").calls)
    assert forest.prompt_ids("c2").tolist() == [1, 2, 3, 4, 5]
    assert forest.full_ids("c2").tolist() == [1, 2, 3, 4, 5, 6]
    assert (forest.prompt_length("c2"), forest.full_length("c2")) == (5, 6)
    assert forest.extends("c2")
    assert forest.branch("c2") == ["c1", "c2"]


@pytest.mark.parametrize("shared", [0, 1, 2, 3, 4])
def test_a_prompt_leans_on_any_part_of_its_base(shared: int) -> None:
    """
    c1  1 2 | 3 4
    c2  the first 0..4 of those, then 9 | 8
    """
    forest = Forest(
        [call("c1", delta=[1, 2], said=[3, 4]), call("c2", parent="c1", base="c1", base_length=shared, delta=[9], said=[8])]
    )
    assert forest.prompt_ids("c2").tolist() == [*[1, 2, 3, 4][:shared], 9]
    assert forest.extends("c2") == (shared == 4)


def test_a_prompt_reaches_through_several_bases_that_share_only_a_part() -> None:
    """
    c1  1 2 3 | 4 5
    c2  1 2 3   4   6 | 7      four of c1
    c3  1 2 3   4   6   8 | 9  five of c2
    c4  1 2   0 | 0            two of c3, which are c1's
    """
    forest = Forest(
        [
            call("c1", delta=[1, 2, 3], said=[4, 5]),
            call("c2", base="c1", base_length=4, delta=[6], said=[7]),
            call("c3", base="c2", base_length=5, delta=[8], said=[9]),
            call("c4", base="c3", base_length=2, delta=[0], said=[0]),
        ]
    )
    assert forest.full_ids("c3").tolist() == [1, 2, 3, 4, 6, 8, 9]
    assert forest.full_ids("c4").tolist() == [1, 2, 0, 0]
    assert [forest.prefix("c3", length).tolist() for length in range(8)] == [
        [1, 2, 3, 4, 6, 8, 9][:length] for length in range(8)
    ]


def test_ids_are_int32_even_where_there_are_none() -> None:
    forest = Forest([call("c1")])
    assert forest.full_ids("c1").dtype == np.int32
    assert forest.full_ids("c1").tolist() == []


def test_choices_stand_on_the_first_and_belong_to_the_parent_that_the_call_continues() -> None:
    """The second and third choice repeat no prompt: they lean on the first choice, not on the parent."""
    forest = Forest(tell("c1: 1 2 | 3 4", "c2 < c1: 5 | 6", "c3 / c1 @ c2: 1 2 3 4 5 | 7", "c4 / c1 @ c2: 1 2 3 4 5 | 8").calls)
    assert [forest.full_ids(name).tolist() for name in ("c3", "c4")] == [[1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 8]]
    assert forest.branch("c4") == ["c1", "c4"]


EXTENDING = {
    "every choice of a call that goes on": (
        ("c1: 1 2 | 3 4", "c2 < c1: 5 | 6", "c3 / c1 @ c2: 1 2 3 4 5 | 7", "c4 / c1 @ c2: 1 2 3 4 5 | 8"),
        {"c2", "c3", "c4"},
    ),
    "choices that continue a cut reply": (("c1: 1 2 | 3", "c2 < c1: | 4", "c3 / c1 @ c2: 1 2 3 | 5"), {"c2", "c3"}),
    "rendered afresh, and its choice": (("c1: 1 2 | 3 4", "c2 / c1: 1 2 9 | 5", "c3 / c1 @ c2: 1 2 9 | 6"), set()),
    "stored on a retry that said the same by chance": (
        ("c1: 1 2 | 3 4", "c2 @ c1: 1 2 | 3 4", "c3 / c1 @ c2: 1 2 3 4 5 | 6"),
        {"c3"},
    ),
    "stored on a retry that said something else": (
        ("c1: 1 2 | 3 4", "c2 @ c1: 1 2 | 3 7", "c3 / c1 @ c2: 1 2 3 7 5 | 6"),
        set(),
    ),
    "stored whole": (("c1: 1 2 | 3 4", "c2 / c1 @ -: 1 2 3 4 5 | 6", "c3 / c1 @ -: 1 2 3 5 | 6"), {"c2"}),
    "ends inside its parent's reply": (("c1: 1 2 | 3 4", "c2 / c1: 1 2 3 | 4"), set()),
    "a root that leans on another, as a retried first turn": (("c1: 1 2 | 3", "c2 @ c1: 1 2 | 4"), set()),
}


@pytest.mark.parametrize(("calls", "extending"), EXTENDING.values(), ids=EXTENDING)
def test_a_call_extends_its_parent_if_its_prompt_begins_with_it(calls: tuple[str, ...], extending: set[str]) -> None:
    forest = Forest(tell(*calls).calls)
    assert {name for name in forest.calls if forest.extends(name)} == extending
    assert forest.branch("c2") == (["c1", "c2"] if "c2" in extending else ["c2"])


def test_a_base_used_for_less_than_it_shares_changes_nothing() -> None:
    """c2 leans on one id of its parent and repeats the others.

    c1  1 2 | 3 4
    c2  1   2 3 4 5 | 6
    """
    forest = Forest(
        [call("c1", delta=[1, 2], said=[3, 4]), call("c2", parent="c1", base="c1", base_length=1, delta=[2, 3, 4, 5], said=[6])]
    )
    assert forest.extends("c2")


def test_lineage_goes_through_parents_that_share_no_tokens() -> None:
    forest = Forest([call("c1", delta=[1], said=[2]), call("c2", parent="c1", delta=[7], said=[8])])
    assert [item.call_id for item in forest.lineage("c2")] == ["c2", "c1"]
    assert list(forest.lineage(None)) == []


def test_calls_are_found_by_what_they_asked_and_answered() -> None:
    first, again = (
        call(name, delta=[1], said=[2], fields={"fingerprint": b"f", "reply_fingerprint": b"g"}) for name in ("c1", "c2")
    )
    forest = Forest([first, again])
    assert list(forest.find_by_prompt(b"f")) == ["c1", "c2"]
    assert list(forest.find_by_reply(b"g")) == ["c1", "c2"]
    assert list(forest.find_by_reply(b"f")) == []
    assert list(forest.children(None)) == ["c1", "c2"]
    assert list(forest.children("c1")) == []


def test_adding_a_call_again_changes_nothing() -> None:
    first = call("c1", delta=[1], said=[2])
    forest = Forest([first, first])
    assert len(forest) == 1
    assert list(forest.children(None)) == ["c1"]


@pytest.mark.parametrize("named", [{"parent": "c9"}, {"base": "c9"}])
def test_a_parent_or_base_that_is_not_there_is_refused_by_name(named: dict[str, Any]) -> None:
    forest = Forest([call("c1", delta=[1], said=[2])])
    with pytest.raises(UnknownParent, match=r"call c9 is not in the session \(session s, call c2\)"):
        forest.add(call("c2", delta=[1], said=[2], **named))
    assert "c2" not in forest
    assert list(forest.children("c9")) == []


@pytest.mark.parametrize(("base", "length"), [("c1", 4), ("c1", -1), (None, 1)])
def test_a_base_shorter_than_what_is_asked_of_it_is_refused(base: str | None, length: int) -> None:
    """
    c1  1 2 | 3    holds three ids
    """
    forest = Forest([call("c1", delta=[1, 2], said=[3])])
    with pytest.raises(LengthMismatch, match="session s, call c2"):
        forest.add(call("c2", base=base, base_length=length, said=[5]))
    assert "c2" not in forest


@pytest.mark.case(35)
def test_a_session_a_thousand_calls_deep_needs_no_recursion_and_linear_storage() -> None:
    """Each call adds one id and says one. The recursion limit is far below the depth; a record is as small at the end."""
    talk = Talk()
    talk.say("c0", [1], [2])
    for at in range(1, 1000):
        talk.go_on(f"c{at}", f"c{at - 1}", [at], [at])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        forest = Forest(talk.calls)
        assert forest.full_ids("c999").tolist() == talk.full["c999"]
        assert forest.branch("c999") == [f"c{at}" for at in range(1000)]
        assert sum(1 for _ in forest.lineage("c999")) == 1000
    finally:
        sys.setrecursionlimit(limit)
    sizes = [len(encode(item)) for item in talk.calls]
    assert max(sizes) - min(sizes) < 32


@pytest.mark.case(35)
def test_ten_thousand_choices_beside_each_other_stand_on_one_prompt() -> None:
    """
    c0      1 2 | 3
    c1      1 2   3   4 | 1
    c2 …    (the prompt of c1) | 2 …
    """
    forest = Forest(
        [call("c0", delta=[1, 2], said=[3]), call("c1", parent="c0", base="c0", base_length=3, delta=[4], said=[1])]
    )
    for at in range(2, 10_000):
        forest.add(call(f"c{at}", parent="c0", base="c1", base_length=4, said=[at]))
    assert forest.full_ids("c9999").tolist() == [1, 2, 3, 4, 9999]
    assert len(forest.children("c0")) == 9999
    assert all(forest.extends(name) for name in forest.children("c0"))


def test_ten_thousand_roots_each_leaning_on_the_one_before_are_read_in_a_step_each() -> None:
    """Side calls share only the system prompt (1 2) and each is stored on the call before it. Reading the last prompt must not
    walk through all of them: the work is counted in nodes whose ids are cut.

    c0      1 2   0 | 7
    c1      1 2   1 | 7    two ids of c0
    c2      1 2   2 | 7    two ids of c1, which are c0's
    """
    forest = Forest([call("c0", delta=[1, 2, 0], said=[7])])
    for at in range(1, 10_000):
        forest.add(call(f"c{at}", base=f"c{at - 1}", base_length=2, delta=[at], said=[7]))
    looked_up: list[str] = []
    forest.calls = _CountedLookups(forest.calls, looked_up)
    assert forest.full_ids("c9999").tolist() == [1, 2, 9999, 7]
    assert len(looked_up) < 10


class _CountedLookups(dict[str, Call]):
    def __init__(self, calls: dict[str, Call], looked_up: list[str]) -> None:
        super().__init__(calls)
        self.looked_up = looked_up

    def __getitem__(self, call_id: str) -> Call:
        self.looked_up.append(call_id)
        return super().__getitem__(call_id)


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([4], [5], 0)],
)
def test_the_shared_length_is_that_of_the_common_prefix(left: list[int], right: list[int], shared: int) -> None:
    assert shared_length(np.array(left, dtype=np.int32), np.array(right, dtype=np.int32)) == shared
