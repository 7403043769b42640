"""The order in which a session's calls are read, and the blocks that its messages are shown as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import NotFound
from proxy.ui.conversation import CallSummary, arrange, find_image, find_message, read_image, show_message
from tests.support.service.ui_sessions import summary
from tests.support.sessions.calls import call


def read(calls: Sequence[CallSummary]) -> str:
    """The conversation in one line: forks stand in parentheses."""
    shown = {"begin": "(", "end": ")"}
    return " ".join(shown.get(kind) or str(item.number) for kind, item in arrange(calls).walk())


def test_a_conversation_continues_where_most_calls_are() -> None:
    """1 - 2, and 3 - 4 - 5 after another reply to the same prompt."""
    assert read([summary(1, None), summary(2, 1), summary(3, 1), summary(4, 3), summary(5, 4)]) == "1 ( 2 ) 3 4 5"


def test_a_branch_that_nothing_continues_stands_after_the_call_it_forks_from() -> None:
    assert read([summary(1, None), summary(2, 1), summary(3, 2), summary(4, 1, "edited")]) == "1 ( 4 ) 2 3"


def test_of_two_last_replies_the_trained_one_is_read_as_the_end() -> None:
    assert read([summary(1, None), summary(2, 1, quarantine_reason="superseded"), summary(3, 1)]) == "1 ( 2 ) 3"


def test_sub_agents_stand_after_the_call_that_started_them_even_if_they_run_at_once() -> None:
    """2 starts two sub-agents, 3 - 5 and 4 - 6; 7 has their results."""
    helper = {"role": "subagent"}
    calls = [summary(1, None), summary(2, 1), summary(3, None, **helper), summary(4, None, **helper)]
    calls += [summary(5, 3, **helper), summary(6, 4, **helper), summary(7, 2)]
    assert read(calls) == "1 2 ( 3 5 ) ( 4 6 ) 7"
    assert [fork.title for fork in arrange(calls).forks["c2"]] == ["Sub-agent", "Sub-agent"]


def test_a_side_call_before_the_first_call_is_read_first() -> None:
    assert read([summary(1, None, role="side"), summary(2, None), summary(3, 2)]) == "1 2 3"


def test_a_compaction_is_a_fork_and_what_comes_after_it_is_read_on() -> None:
    calls = [summary(1, None), summary(2, 1, role="compaction"), summary(3, None, "new_root"), summary(4, 3)]
    assert read(calls) == "1 ( 2 ) 3 4"


def test_a_conversation_that_runs_beside_another_stands_where_it_began() -> None:
    assert read([summary(1, None), summary(2, None), summary(3, 1), summary(4, 2)]) == "1 ( 2 4 ) 3"
    assert read([summary(1, None), summary(2, 1), summary(3, None), summary(4, None)]) == "1 2 3 4"


def test_calls_whose_parent_is_missing_are_read_too() -> None:
    assert read([summary(1, None), summary(2, 99)]) == "1 2"


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["main", "subagent", "side"])), max_size=30))
def test_every_call_is_read_exactly_once(drawn: list[tuple[int, str]]) -> None:
    calls = [
        summary(number, parent if 0 < parent < number else None, role=role) for number, (parent, role) in enumerate(drawn, 1)
    ]
    found = arrange(calls)
    numbers = [item.number for kind, item in found.walk() if kind == "turn"]
    assert sorted(numbers) == [each.number for each in calls]
    assert all(call in found.thread_of[call.call_id].calls for call in calls)


def test_a_deep_session_is_arranged_without_recursion() -> None:
    """Each call is of another role than its parent, so each is a fork of the one before."""
    calls = [summary(number, number - 1 or None, role=("main", "side")[number % 2]) for number in range(1, 5001)]
    assert sum(kind == "begin" for kind, _ in arrange(calls).walk()) == 4999


def blocks(message: Any, **more: Any) -> list[tuple[str, str]]:
    return [(block.kind, block.text) for block in show_message(0, message, **more).blocks]


def test_a_reply_is_shown_in_the_order_in_which_it_was_sampled() -> None:
    function = {"name": "bash", "arguments": '{"command": "a\\nb", "timeout": 5}'}
    message = {"role": "assistant", "tool_calls": [{"id": "t1", "function": function}], "content": "Now.", "reasoning": "Hm."}
    assert blocks(message) == [("reasoning", "Hm."), ("text", "Now."), ("tool_call", "command: a\nb\ntimeout: 5")]


@pytest.mark.parametrize("arguments", ["{not json", "[1]", "7", '{"a": {"b": [1, 2]}}', ""])
def test_arguments_of_any_form_are_shown(arguments: str) -> None:
    function = {"name": "bash", "arguments": arguments}
    assert len(blocks({"role": "assistant", "tool_calls": [{"function": function}]})) == 1


@pytest.mark.parametrize(
    "message", [None, 7, "text", [], {}, {"role": 3, "content": {"text": 1}}, {"content": [None, {"type": "x"}]}]
)
def test_a_message_of_any_form_is_shown(message: Any) -> None:
    assert show_message(0, message).role


def test_a_tool_output_names_its_tool_and_a_long_text_is_cut() -> None:
    message = {"role": "tool", "tool_call_id": "t1", "content": "0123456789"}
    (block,) = show_message(0, message, tool_names={"t1": "bash"}, limit=4).blocks
    assert (block.kind, block.name, block.text, block.length, block.cut) == ("tool_result", "bash", "0123", 10, True)


def test_messages_are_found_among_those_that_the_call_brought() -> None:
    record = call(fields={"messages": b'["new"]', "messages_from": 3, "message_count": 4, "reply": b'{"content": "r"}'})
    assert (find_message(record, 3), find_message(record, 4)) == ("new", {"content": "r"})
    for index in (-1, 0, 2, 5):
        with pytest.raises(NotFound):
            find_message(record, index)


def test_an_image_that_is_not_base64_is_not_found() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}]
    with pytest.raises(NotFound):
        read_image({"content": parts}, 0)


def test_an_image_that_the_store_keeps_is_found_by_its_digest() -> None:
    digest = "ab" * 32
    message = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "digest": digest}]}
    assert [block.kind for block in show_message(0, message).blocks] == ["text", "image"]
    assert find_image(message, 0) == f"sha256:{digest}"
    with pytest.raises(NotFound):
        find_image(message, 1)
