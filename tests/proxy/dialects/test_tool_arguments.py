"""Tool arguments between a chat's text and another vendor's objects: what goes out comes back as the same call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.fields import UNPARSED, arguments_object, arguments_text
from reconstruct.messages import canonical_json, plain_arguments


@given(st.text() | st.dictionaries(st.text(), st.integers() | st.text()).map(json.dumps))
def test_arguments_come_back_as_the_same_call(text: str) -> None:
    back = arguments_text(json.loads(json.dumps(arguments_object(text))))
    assert canonical_json(plain_arguments(back)) == canonical_json(plain_arguments(text))


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_no_arguments_are_an_empty_object(text: str) -> None:
    assert arguments_object(text) == {}


@pytest.mark.parametrize("text", ['{"path": "a', "[1]", "7", '"x"', "null", "nothing at all"])
def test_what_is_no_object_travels_in_a_wrapper(text: str) -> None:
    assert arguments_object(text) == {UNPARSED: text}
    assert arguments_text({UNPARSED: text}) == text


def test_the_wrapper_that_claude_code_writes_itself_is_the_text_it_could_not_read() -> None:
    assert arguments_text({UNPARSED: {"raw": '{"path": "a', "len": 11}}) == '{"path": "a'


def test_arguments_that_only_look_like_the_wrapper_stay_what_they_are() -> None:
    for value in ({UNPARSED: 1}, {UNPARSED: "x", "more": 1}, {UNPARSED: {"len": 3}}):
        assert json.loads(arguments_text(value)) == value
