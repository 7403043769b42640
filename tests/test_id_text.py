"""Ids as JSON text: whatever was read or written before, a list is read and written as a plain parser would."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.id_text import IdText
from reconstruct.records import pack_ids

ids_lists = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 2**31 - 1)), max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> list[list[int]]:
    """Lists that mostly begin with the beginning of an earlier one."""
    made: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 8))):
        earlier = draw(st.sampled_from(made))
        made.append(earlier[: draw(st.integers(0, len(earlier)))] + draw(ids_lists))
    return made


@given(conversations(), st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans())
def test_what_is_read_is_what_the_text_says(lists: list[list[int]], separators: tuple[str, str], remember: bool) -> None:
    id_text = IdText()
    for ids in lists:
        read = id_text.read(json.dumps(ids, separators=separators).encode(), remember=remember)
        assert read.tolist() == ids
        assert not read.flags.writeable


@given(conversations())
def test_what_is_written_is_what_the_ids_are(lists: list[list[int]]) -> None:
    id_text = IdText()
    for ids in lists:
        packed = pack_ids(ids)
        assert json.loads(id_text.write(packed)) == ids
        assert json.loads(id_text.write(packed)) == ids


def test_an_id_that_merely_begins_like_another_is_another() -> None:
    """[1, 23] after [1, 2]: the texts share `1,2`, the ids only the 1."""
    id_text = IdText()
    for ids in ([1, 2], [1, 23], [1, 2, 3], [12], [1]):
        assert id_text.read(json.dumps(ids).encode()).tolist() == ids


@pytest.mark.parametrize("text", [b"[1,2,null]", b"[1,2,3.5]", b"[1,2,", b"[1,2]]", b'{"1":2}', b"null", b"[1,2,,3]", b""])
def test_a_text_that_is_no_list_of_integers_is_refused_also_after_a_good_one(text: bytes) -> None:
    for before in (None, b"[1,2]", b"[1,2,3]"):
        id_text = IdText()
        if before:
            id_text.read(before)
        with pytest.raises(msgspec.DecodeError):
            id_text.read(text)
