"""Ids as JSON text: whatever was read or written before, a list is read and written as a plain parser would."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.apis.json_text import IdText, IdTexts, ObjectText
from reconstruct.records import pack_ids

ids_lists = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 2**31 - 1)), max_size=12)

shorts = st.sampled_from([0, 6, 1024])
"""Lists of this many ids and more are compared with those before."""


@st.composite
def conversations(draw: st.DrawFn) -> list[list[int]]:
    """Lists that mostly begin with the beginning of an earlier one."""
    made: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 8))):
        earlier = draw(st.sampled_from(made))
        made.append(earlier[: draw(st.integers(0, len(earlier)))] + draw(ids_lists))
    return made


@given(conversations(), st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans(), shorts)
def test_what_is_read_is_what_the_text_says(
    lists: list[list[int]], separators: tuple[str, str], remember: bool, short: int
) -> None:
    id_text = IdText(short)
    for ids in lists:
        read = id_text.read(json.dumps(ids, separators=separators).encode(), remember=remember)
        assert read.tolist() == ids
        assert not read.flags.writeable


@given(conversations(), st.sets(st.integers(0, 7)), shorts)
def test_what_is_written_is_what_the_ids_are(lists: list[list[int]], told: set[int], short: int) -> None:
    """Also after ids that came as a text, which is then sent on."""
    id_text = IdText(short)
    for number, ids in enumerate(lists):
        packed = id_text.read(json.dumps(ids).encode() + b" ") if number in told else pack_ids(ids)
        assert json.loads(id_text.write(packed)) == ids
        assert json.loads(id_text.write(packed)) == ids


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 300), st.booleans()), max_size=30))
def test_all_sessions_together_are_remembered_up_to_a_limit(calls: list[tuple[str, int, bool]]) -> None:
    texts = IdTexts(4, 5_000)
    held: dict[str, IdText] = {}
    for session_id, length, goes_on in calls:
        # A call that is under way goes on with what it was given, though that may have been let go meanwhile.
        known = held[session_id] = (goes_on and held.get(session_id)) or texts.of(session_id)
        ids = list(range(length))
        assert known.read(json.dumps(ids).encode()).tolist() == ids
        assert texts.size == sum(text.size for text in texts._known.values()) <= 5_000
        assert len(texts._known) <= 4


def test_the_session_heard_of_last_is_remembered_longest() -> None:
    texts = IdTexts(3)
    first, second, third = (texts.of(name) for name in "abc")
    assert texts.of("a") is first
    fourth = texts.of("d")
    assert texts.of("a") is first and texts.of("c") is third and texts.of("d") is fourth
    assert texts.of("b") is not second


def test_an_id_that_merely_begins_like_another_is_another() -> None:
    """[1, 23] after [1, 2]: the texts share `1,2`, the ids only the 1."""
    id_text = IdText(0)
    for ids in ([1, 2], [1, 23], [1, 2, 3], [12], [1]):
        assert id_text.read(json.dumps(ids).encode()).tolist() == ids


@pytest.mark.parametrize("text", [b"[1,2,null]", b"[1,2,3.5]", b"[1,2,", b"[1,2]]", b'{"1":2}', b"null", b"[1,2,,3]", b""])
def test_a_text_that_is_no_list_of_integers_is_refused_also_after_a_good_one(text: bytes) -> None:
    for before in (None, b"[1,2]", b"[1,2,3]"):
        id_text = IdText(0)
        if before:
            id_text.read(before)
        with pytest.raises(msgspec.DecodeError):
            id_text.read(text)


@given(st.data())
def test_objects_are_written_as_if_each_was_new(data: st.DataObject) -> None:
    """Lists that begin with the very objects of an earlier one, with equal ones in their place, or with others."""
    text, sizes = ObjectText(lambda growth: sizes.append(growth)), list[int]()
    made: list[list[Any]] = [[]]
    for _ in range(data.draw(st.integers(1, 8))):
        earlier = data.draw(st.sampled_from(made))
        kept = earlier[: data.draw(st.integers(0, len(earlier)))]
        if kept and data.draw(st.booleans()):
            # Equal, and written otherwise.
            at = data.draw(st.integers(0, len(kept) - 1))
            kept[at] = dict(reversed(kept[at].items()))
        new = data.draw(
            st.lists(st.fixed_dictionaries({"b": st.sampled_from(["", "x", "],["]), "a": st.integers(0, 1)}), max_size=3)
        )
        made.append([*kept, *new])
        assert bytes(text.write(made[-1])) == msgspec.json.encode(made[-1])
    assert sum(sizes) == sum(each.size for each in text.written)


def test_only_what_is_new_is_encoded() -> None:
    text, first = ObjectText(), [{"a": 1}, {"a": 2}]
    text.write(first)
    first[0]["a"] = 3
    assert bytes(text.write([*first, {"b": 4}])) == b'[{"a":1},{"a":2},{"b":4}]'
