"""The prompt of a call, planned over a toy template: a user's turn begins with 1, an assistant's with 2, both end with 9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from reconstruct.prompt import IDS_UNKNOWN, Parent, Prompt, Rendering, plan
from reconstruct.records import Ids, pack_ids

WORDS = {"hi": 11, "hello": 12, "bye": 13, "?": 14, "x": 15, "7": 16}
OPEN = {"user": 1, "assistant": 2}


class Rejected(Exception):
    pass


def render(rendering: Rendering) -> Ids:
    ids: list[int] = []
    for message in rendering.messages:
        if message["content"] not in WORDS:
            raise Rejected
        ids += [OPEN[message["role"]], WORDS[message["content"]], 9]
    return pack_ids([*ids, 2] if rendering.add_generation_prompt else ids)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def run(messages: Sequence[dict[str, Any]], parent: Parent | None, close: Ids | None = None) -> tuple[Prompt, list[Rendering]]:
    """The prompt, and all renderings that it took. Raises Rejected for a required one that the template does not take."""
    steps, asked = plan(messages, parent, close, retain_thinking=False), []
    step = next(steps)
    while True:
        answers = []
        for rendering in step.renderings:
            asked.append(rendering)
            try:
                answers.append(render(rendering))
            except Rejected:
                if step.required:
                    raise
                answers.append(pack_ids(()))
        try:
            step = steps.send(answers)
        except StopIteration as stop:
            prompt, whole = stop.value
            assert whole in asked and len(whole.messages) == len(messages)
            return prompt, asked


def parent(ids: list[int] | None = None, tail: Sequence[dict[str, Any]] | None = None, **fields: Any) -> Parent:
    """Asked "hi" (1 11 9 2), it sampled 20 21 9: the text "hello" in other ids than the template's."""
    known = [1, 11, 9, 2, 20, 21, 9] if ids is None else ids
    made: dict[str, Any] = {"ids": pack_ids(known), "sampled": 3, "closed": True, "asked": pack_ids([1, 11, 9, 2]), **fields}
    return Parent([user("hi"), said("hello")], [user("bye")] if tail is None else tail, **made)


HISTORY = [user("hi"), said("hello"), user("bye")]


def test_a_first_call_is_rendered() -> None:
    prompt, asked = run([user("hi")], None)
    assert prompt.ids.tolist() == prompt.rendering.tolist() == [1, 11, 9, 2]
    assert prompt.branch_reason is None and prompt.continues is False and len(asked) == 1


def test_a_continued_call_keeps_what_was_sampled_and_learns_the_turn_end() -> None:
    prompt, _ = run(HISTORY, parent())
    assert prompt.ids.tolist() == [1, 11, 9, 2, 20, 21, 9, 1, 13, 9, 2]
    assert prompt.rendering.tolist() == [1, 11, 9, 2, 12, 9, 1, 13, 9, 2]
    assert prompt.branch_reason is None and prompt.continues and prompt.close is not None and prompt.close.tolist() == [9]


def test_a_known_turn_end_is_not_looked_for_again() -> None:
    """The whole request, the same with another reply and with another tail."""
    prompt, asked = run(HISTORY, parent(), pack_ids([9]))
    assert prompt.branch_reason is None and len(asked) == 3


def test_a_reply_in_the_templates_own_ids_needs_no_turn_end() -> None:
    prompt, asked = run(HISTORY, parent([1, 11, 9, 2, 12, 9], sampled=2))
    assert prompt.branch_reason is None and len(asked) == 1 and prompt.close is None
    assert prompt.ids.tolist() == prompt.rendering.tolist() == [1, 11, 9, 2, 12, 9, 1, 13, 9, 2]


def test_a_parent_without_ids_is_no_base() -> None:
    prompt, _ = run(HISTORY, Parent([user("hi"), said("hello")], [user("bye")], None, 0, True))
    assert prompt.branch_reason == IDS_UNKNOWN and prompt.ids.tolist() == prompt.rendering.tolist()


def test_a_history_that_ends_with_the_reply_is_rendered() -> None:
    prompt, _ = run(HISTORY[:2], parent(tail=[]))
    assert prompt.branch_reason is None and prompt.continues and prompt.ids.tolist() == [1, 11, 9, 2, 12, 9, 2]


def test_a_turn_end_that_the_template_hides_is_a_reason_to_branch() -> None:
    known = WORDS.pop("x")
    try:
        prompt, _ = run(HISTORY, parent())
    finally:
        WORDS["x"] = known
    assert prompt.branch_reason == "turn_end_unknown" and prompt.close is None


def test_a_reply_that_cannot_be_bridged_branches_with_the_reason() -> None:
    prompt, _ = run(HISTORY, parent([1, 11, 9, 2], sampled=0))
    assert prompt.branch_reason == "turn_end_differs" and prompt.ids.tolist() == prompt.rendering.tolist()


def test_a_reply_that_ends_with_another_token_than_the_templates_keeps_it_and_the_templates_end_is_declared() -> None:
    prompt, _ = run(HISTORY, parent([1, 11, 9, 2, 20, 21, 8]))
    assert prompt.branch_reason is None and prompt.adds_end
    assert prompt.ids.tolist() == [1, 11, 9, 2, 20, 21, 8, 9, 1, 13, 9, 2]
    prompt, _ = run(HISTORY, parent())
    assert not prompt.adds_end


@pytest.mark.case(13)
@pytest.mark.parametrize("ids", [[31, 41, 39, 32, 20, 21, 9], [5, 1, 11, 9, 2, 20, 21, 9]], ids=["tokenizer", "template"])
@pytest.mark.parametrize("known", [True, False])
def test_what_another_model_sampled_is_not_continued(ids: list[int], known: bool) -> None:
    """The engine was started anew with a model of other ids, or whose template begins otherwise. Also where it is no longer known what
    the parent was asked with."""
    prompt, _ = run(HISTORY, parent(ids, asked=pack_ids(ids[:-3]) if known else None))
    assert prompt.branch_reason == "history_rewritten" and prompt.ids.tolist() == prompt.rendering.tolist()


def test_a_parent_whose_rendering_is_no_longer_known_is_continued_where_its_row_begins_as_the_engine_renders_it() -> None:
    prompt, asked = run(HISTORY, parent(asked=None), pack_ids([9]))
    assert prompt.branch_reason is None and prompt.ids.tolist() == [1, 11, 9, 2, 20, 21, 9, 1, 13, 9, 2]
    assert (len(asked), asked[-1]) == (5, Rendering([user("hi")], False))


def test_a_parent_of_another_dress_must_have_been_rendered_alike() -> None:
    """Its prompt began with 1 11 9 under this render key; under another with 5."""
    prompt, _ = run(HISTORY, parent(other_render_key=True))
    assert prompt.continues and prompt.branch_reason is None
    prompt, _ = run(HISTORY, parent(other_render_key=True, asked=pack_ids([5, 1, 11, 9, 2])))
    assert not prompt.continues and prompt.branch_reason is None and prompt.ids.tolist() == prompt.rendering.tolist()


def test_without_its_rendering_a_parent_of_another_dress_is_judged_by_its_prompt() -> None:
    prompt, _ = run(HISTORY, parent(other_render_key=True, asked=None))
    assert prompt.continues
    prompt, _ = run(HISTORY, parent([5, 1, 11, 9, 2, 20, 21, 9], other_render_key=True, asked=None))
    assert not prompt.continues


def test_the_tail_is_rendered_as_the_lineage_names_it_and_a_fresh_prompt_as_the_harness_sent_it() -> None:
    """The harness sent "bye"; in the lineage it is "?"."""
    prompt, _ = run(HISTORY, parent(tail=[user("?")]))
    assert prompt.ids.tolist()[-4:] == [1, 14, 9, 2]
    prompt, _ = run(HISTORY, parent([1, 11, 9, 2], tail=[user("?")], sampled=0))
    assert prompt.branch_reason == "turn_end_differs" and prompt.ids.tolist()[-4:] == [1, 13, 9, 2]
