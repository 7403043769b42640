"""Training rows of hand-made sessions: every shape a session takes, checked by eye."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest

from reconstruct import builders
from reconstruct.accounting import account, settle
from reconstruct.builders import RowContext, merged, per_call
from reconstruct.records import Call
from reconstruct.spans import Span
from reconstruct.trajectory import Accounting, Quarantined, Trajectory
from tests.support.sessions.calls import Talk, call, tell

REFUSED: dict[str, Any] = {"trainable": False, "quarantine_reason": "placeholder_sampled"}


def rows_of(
    calls: Sequence[Call], builder: builders.Builder = merged, train_roles: Sequence[str] | None = None, **context: Any
) -> list[Trajectory]:
    """The rows, their accounting checked."""
    settled = settle(calls, train_roles=train_roles)
    rows = builder(settled, RowContext("s", **context))
    account(settled, rows)
    return rows


def pictured(rows: Sequence[Trajectory]) -> list[str]:
    """Each row as its calls and its ids, trained ones in brackets: "c1 c2: 1 2 [3] 4 [5]"."""
    return [
        " ".join(row.call_ids)
        + ": "
        + " ".join(f"[{item}]" if mask else str(item) for item, mask in zip(row.token_ids, row.loss_mask, strict=True))
        for row in rows
    ]


def accounted(calls: Sequence[Call]) -> Accounting:
    settled = settle(calls)
    return account(settled, merged(settled, RowContext("s")))


# One branch


def test_an_append_only_session_is_one_row() -> None:
    talk = tell("c1: 1 2 | 3 4", "c2 < c1: 5 | 6", "c3 < c2: 7 8 | 9")
    assert pictured(rows_of(talk.calls)) == ["c1 c2 c3: 1 2 [3] [4] 5 [6] 7 8 [9]"]


def test_a_row_carries_each_tokens_logprob_and_weight_version() -> None:
    """The second reply was sampled while the weights changed from 4 to 5.

    ids       1 2 3    4    5 6    7    8
    logprobs  0 0 -0.5 -1.0 0 -0.5 -1.0 -1.5
    version       4    4      4    5    5
    """
    talk = Talk()
    talk.say("c1", [1, 2], [3, 4], version=4)
    talk.go_on("c2", "c1", [5], [6, 7, 8], spans=[Span(4, 0, 1), Span(5, 1, 3)])
    (row,) = rows_of(talk.calls)
    assert row.logprobs.tolist() == [0, 0, -0.5, -1.0, 0, -0.5, -1.0, -1.5]
    assert row.weight_versions == (Span(4, 2, 4), Span(4, 5, 6), Span(5, 6, 8))


def test_arrays_of_a_row_are_of_one_length_and_of_the_contracts_types() -> None:
    (row,) = rows_of([call("c1", delta=[1], said=[2, 3])])
    assert len(row.token_ids) == len(row.loss_mask) == len(row.logprobs) == 3
    assert [array.dtype.str for array in (row.token_ids, row.loss_mask, row.logprobs)] == ["<i4", "|i1", "<f4"]


@pytest.mark.case(18)
def test_few_shot_assistant_messages_are_prompt_and_never_trained() -> None:
    """2 and 4 stand for assistant messages that the harness wrote itself."""
    assert pictured(rows_of(tell("c1: 1 2 3 4 5 | 6", "c2 < c1: 7 | 8").calls)) == ["c1 c2: 1 2 3 4 5 [6] 7 [8]"]


@pytest.mark.case(5)
def test_the_close_of_a_cut_reply_is_masked() -> None:
    """c1 stopped for length; 9 is the template's turn end, which the model did not say."""
    talk = tell("c1: 1 | 2 3", "c2 < c1: 9 5 | 6", c1={"finish_reason": "length"}, c2={"finish_reason": "length"})
    rows = rows_of(talk.calls)
    assert pictured(rows) == ["c1 c2: 1 [2] [3] 9 5 [6]"]
    assert (rows[0].finish_reason, rows[0].truncated) == ("length", True)


def test_a_row_ends_as_its_last_call_did() -> None:
    last = {"finish_reason": "tool_calls", "role": "subagent", "agent": "explore"}
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", c1={"finish_reason": "length"}, c2=last)
    (row,) = rows_of(talk.calls)
    assert (row.finish_reason, row.truncated, row.role, row.agent) == ("tool_calls", False, "subagent", "explore")


# Retries and siblings


@pytest.mark.case(25)
def test_a_retried_first_turn_loses_nothing_afterwards() -> None:
    """The reply c1 never arrived; the harness asked again and went on from c2. c1 is quarantined where its record
    says so, and trained as a row of its own where it does not."""
    for fields, rows in ((REFUSED, ["c2 c3: 1 2 [4] 5 [6]"]), ({}, ["c1: 1 2 [3]", "c2 c3: 1 2 [4] 5 [6]"])):
        talk = tell("c1: 1 2 | 3", "c2 @ c1: 1 2 | 4", "c3 < c2: 5 | 6", c1=fields)
        assert pictured(rows_of(talk.calls)) == rows


def test_a_refused_call_in_mid_session_is_untrained_with_its_reason() -> None:
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c1: 3 | 5", "c4 < c3: 6 | 7", c2=REFUSED)
    assert pictured(rows_of(talk.calls)) == ["c1 c3 c4: 1 [2] 3 [5] 6 [7]"]
    assert accounted(talk.calls) == Accounting(4, 3, (Quarantined("c2", 1, "placeholder_sampled"),), complete=False)


def test_a_refused_call_that_was_continued_is_context_of_what_followed() -> None:
    """c2 is refused, but c3 was sampled after its tokens: they stay in the row, masked, and c1 is trained once."""
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c2: 5 | 6", c2=REFUSED)
    assert pictured(rows_of(talk.calls)) == ["c1 c2 c3: 1 [2] 3 4 5 [6]"]


def test_a_branch_whose_end_is_refused_still_trains_its_beginning() -> None:
    """The refused c3 is nobody's context: the row ends before it."""
    assert pictured(rows_of(tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c2: 5 | 6", c3=REFUSED).calls)) == ["c1 c2: 1 [2] 3 [4]"]


@pytest.mark.case(27)
def test_best_of_n_keeps_every_choice_and_merges_none() -> None:
    """Three choices of one call; the session goes on from the second. The first branch trains what they share."""
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 / c1 @ c2: 1 2 3 | 5", "c4 / c1 @ c2: 1 2 3 | 6", "c5 < c3: 7 | 8")
    assert pictured(rows_of(talk.calls)) == ["c1 c2: 1 [2] 3 [4]", "c1 c4: 1 2 3 [6]", "c1 c3 c5: 1 2 3 [5] 7 [8]"]


def test_equal_choices_are_each_trained() -> None:
    """Two samples that happen to be the same are two samples."""
    assert pictured(rows_of(tell("c1: 1 | 2", "c2 @ c1: 1 | 2").calls)) == ["c1: 1 [2]", "c2: 1 [2]"]


@pytest.mark.case(28)
def test_a_session_that_goes_on_from_an_older_sibling_branches_there() -> None:
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c2: 5 | 6", "c4 < c1: 7 | 8")
    assert pictured(rows_of(talk.calls)) == ["c1 c2 c3: 1 [2] 3 [4] 5 [6]", "c1 c4: 1 2 7 [8]"]


@pytest.mark.case(29)
def test_two_interleaved_conversations_are_two_branches() -> None:
    """By turns; they share the system prompt 0."""
    talk = tell("a1: 0 1 | 2", "b2 @ a1: 0 5 | 6", "a3 < a1: 3 | 4", "b4 < b2: 7 | 8")
    assert pictured(rows_of(talk.calls)) == ["a1 a3: 0 1 [2] 3 [4]", "b2 b4: 0 5 [6] 7 [8]"]


@pytest.mark.case(30)
def test_two_sub_agents_with_identical_prompts_are_two_branches() -> None:
    """They said the same first, too; each goes on from its own reply."""
    talk = tell("a1: 0 1 | 2", "b2 @ a1: 0 1 | 2", "b3 < b2: 3 | 4", "a4 < a1: 3 | 5")
    assert pictured(rows_of(talk.calls)) == ["b2 b3: 0 1 [2] 3 [4]", "a1 a4: 0 1 [2] 3 [5]"]


# Edits and compaction


@pytest.mark.case(16)
def test_an_edited_history_is_a_row_of_its_own_with_the_edit_masked() -> None:
    """The harness changed the reply 2 into 9: c2's prompt does not begin with what c1 said."""
    talk = tell("c1: 1 | 2", "c2 / c1: 1 9 3 | 4", "c3 < c2: 5 | 6")
    assert pictured(rows_of(talk.calls)) == ["c1: 1 [2]", "c2 c3: 1 9 3 [4] 5 [6]"]


def test_a_retokenized_continuation_is_never_merged() -> None:
    """The engine rendered 2 3 as 23: one id differs, so the context differs, and the row branches."""
    assert pictured(rows_of(tell("c1: 1 | 2 3", "c2 / c1: 1 23 5 | 6").calls)) == ["c1: 1 [2] [3]", "c2: 1 23 5 [6]"]


@pytest.mark.case(31)
def test_compaction_after_170_turns_is_a_second_row_that_starts_with_the_summary() -> None:
    """Turns c1 … c170, the compaction call c171 on top of them, and a new root with the summary 7 that c171 said."""
    talk = Talk()
    talk.say("c1", [0, 1], [2])
    for turn in range(2, 171):
        talk.go_on(f"c{turn}", f"c{turn - 1}", [3], [4])
    talk.go_on("c171", "c170", [6], [7], fields={"role": "compaction"})
    talk.say("c172", [0, 7, 8], [9], base="c171")
    talk.go_on("c173", "c172", [3], [5])
    rows = rows_of(talk.calls)
    assert [len(row.call_ids) for row in rows] == [171, 2]
    assert [int(row.loss_mask.sum()) for row in rows] == [171, 2]
    assert pictured(rows[1:]) == ["c172 c173: 0 7 8 [9] 3 [5]"]
    assert rows[0].token_ids.tolist() == [0, 1, 2, *[3, 4] * 169, 6, 7]


# Roles that are not trained


WORK = ("main", "subagent")


def test_a_call_of_a_role_that_is_not_trained_has_a_row_of_its_own_with_nothing_to_train() -> None:
    """c2 makes a title: a root of its own."""
    talk = tell("c1: 1 | 2", "c2: 8 | 9", c2={"role": "side"})
    rows = rows_of(talk.calls, train_roles=WORK)
    assert [(row.role, picture) for row, picture in zip(rows, pictured(rows), strict=True)] == [
        ("main", "c1: 1 [2]"),
        ("side", "c2: 8 9"),
    ]
    assert pictured(rows_of(talk.calls, per_call, train_roles=WORK)) == ["c1: 1 [2]", "c2: 8 9"]


def test_the_work_before_a_compaction_is_a_row_of_the_work_and_not_of_the_compaction() -> None:
    """The summary 6 was sampled after the work. Were the work trained in the summary's row, it would be labelled "compaction",
    and a trainer that takes the agent's own work alone would lose it."""
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c2: 5 | 6", c3={"role": "compaction"})
    rows = rows_of(talk.calls, train_roles=WORK)
    assert [(row.role, picture) for row, picture in zip(rows, pictured(rows), strict=True)] == [
        ("main", "c1 c2: 1 [2] 3 [4]"),
        ("compaction", "c1 c2 c3: 1 2 3 4 5 6"),
    ]


def test_a_row_that_trains_nothing_takes_no_call_from_one_that_does() -> None:
    """The compaction c2 comes before c3, which goes on from c1."""
    talk = tell("c1: 1 | 2", "c2 < c1: 5 | 6", "c3 < c1: 3 | 4", c2={"role": "compaction"})
    assert pictured(rows_of(talk.calls, train_roles=WORK)) == ["c1 c2: 1 2 5 6", "c1 c3: 1 [2] 3 [4]"]


def test_a_call_of_a_role_that_is_not_trained_stays_as_context_where_the_work_went_on_from_it() -> None:
    talk = tell("c1: 1 | 2", "c2 < c1: 5 | 6", "c3 < c2: 3 | 4", c2={"role": "compaction"})
    assert pictured(rows_of(talk.calls, train_roles=WORK)) == ["c1 c2 c3: 1 [2] 5 6 3 [4]"]


# Per call


def test_per_call_gives_one_row_per_trainable_call() -> None:
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c2: 5 | 6 7", "c4 < c3: 8 |", c2=REFUSED)
    assert pictured(rows_of(talk.calls, per_call)) == ["c1: 1 [2]", "c3: 1 2 3 4 5 [6] [7]"]


@pytest.mark.case(36)
def test_merged_and_per_call_train_the_same_tokens() -> None:
    """Each trained token as its whole context, itself, its logprob and its version."""
    talk = Talk()
    talk.say("c1", [1], [2, 3], version=1)
    talk.go_on("c2", "c1", [4], [5], version=2)
    talk.say("c3", [1, 2, 3, 4], [6], parent="c1", base="c2", version=2)
    talk.go_on("c4", "c3", [7], [8, 9], spans=[Span(2, 0, 1), Span(3, 1, 2)])
    talk.say("c5", [1, 9], [2], parent="c4", version=3)
    assert trained(rows_of(talk.calls)) == trained(rows_of(talk.calls, per_call))


def trained(rows: Sequence[Trajectory]) -> list[tuple[Any, ...]]:
    tokens = []
    for row in rows:
        for span in row.weight_versions:
            for position in range(span.start, span.end):
                assert row.loss_mask[position] == 1
                context = tuple(row.token_ids[: position + 1].tolist())
                tokens.append((context, float(row.logprobs[position]), span.version))
    assert len(tokens) == sum(int(row.loss_mask.sum()) for row in rows)
    return sorted(tokens)


# Order, identity, rewards


@pytest.mark.case(34)
def test_rows_do_not_depend_on_the_order_of_arrival() -> None:
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 / c1 @ c2: 1 2 3 | 5", "c4 / c1 @ c2: 1 2 3 | 6", "c5 < c3: 7 | 8")
    expected = named_and_pictured(rows_of(talk.calls))
    for order in permutations(talk.calls):
        assert named_and_pictured(rows_of(order)) == expected


def named_and_pictured(rows: Sequence[Trajectory]) -> list[tuple[str, str]]:
    return list(zip([row.trajectory_id for row in rows], pictured(rows), strict=True))


def test_trajectory_ids_are_stable_and_differ_by_builder_session_and_calls() -> None:
    """They are what a trainer deduplicates by, also across builds: the values are frozen here."""
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c1: 5 | 6")
    first, second = rows_of(talk.calls)
    assert (first.trajectory_id, second.trajectory_id) == (FIRST_ID, SECOND_ID)
    others = [row.trajectory_id for row in (*rows_of(talk.calls, per_call), *rows_of(talk.calls[:1]))]
    elsewhere = [row.trajectory_id for row in merged(settle(talk.calls), RowContext("another"))]
    assert len({FIRST_ID, SECOND_ID, *others, *elsewhere}) == 8


FIRST_ID, SECOND_ID = "306259b5aa5409cd5fbf75f6", "806478e1f0673fb25d6a2a91"


def test_rows_carry_what_their_session_is_told() -> None:
    (row,) = rows_of([call("c1", delta=[1], said=[2])], group_id="g", task_id="t", reward=0.5, metadata={"seed": 3})
    assert (row.session_id, row.group_id, row.task_id, row.reward, row.metadata) == ("s", "g", "t", 0.5, {"seed": 3})


def test_a_branch_has_its_own_reward_where_it_was_given_one() -> None:
    """By its last call, or by its trajectory id."""
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c1: 5 | 6", "c4 < c1: 7 | 8")
    named = rows_of(talk.calls)[1].trajectory_id
    rewards = [row.reward for row in rows_of(talk.calls, reward=0.0, per_branch={"c2": 1.0, named: 2.0, "c1": 9.0})]
    assert rewards == [1.0, 2.0, 0.0]


def test_rewards_of_single_calls_travel_with_the_rows_that_hold_them() -> None:
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", "c3 < c1: 5 | 6")
    rows = rows_of(talk.calls, reward=1.0, per_call={"c2": 0.25, "c9": 9.0}, metadata={"seed": 3})
    spans = {"c1": [1, 2], "c2": [3, 4]}
    assert [row.metadata for row in rows] == [
        {"seed": 3, "per_call_rewards": {"c2": 0.25}, "per_call_spans": spans},
        {"seed": 3},
    ]
    assert [row.reward for row in rows] == [1.0, 1.0]


# Size


def test_a_session_a_thousand_calls_deep_is_one_row() -> None:
    talk = Talk()
    talk.say("c0", [1], [2])
    for at in range(1, 1000):
        talk.go_on(f"c{at}", f"c{at - 1}", [3], [at])
    (row,) = rows_of(talk.calls)
    assert len(row.token_ids) == 2000
    assert int(row.loss_mask.sum()) == 1000
    assert row.call_ids == tuple(f"c{at}" for at in range(1000))


@pytest.mark.case(35)
def test_a_session_ten_thousand_choices_wide_trains_each_once() -> None:
    """
    c0      1 | 2
    c1      1   2 3 | 1
    c2 …    (the prompt of c1) | 2 …
    """
    calls = [call("c0", delta=[1], said=[2]), call("c1", parent="c0", base="c0", base_length=2, delta=[3], said=[1])]
    calls += [call(f"c{at}", parent="c0", base="c1", base_length=3, said=[at]) for at in range(2, 10_000)]
    rows = rows_of(calls)
    assert len(rows) == 9999
    assert pictured(rows[:1]) == ["c0 c1: 1 [2] 3 [1]"]
    assert pictured(rows[-1:]) == ["c0 c9999: 1 2 3 [9999]"]
