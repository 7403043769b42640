"""What becomes of every sampled token: which calls are refused and why, and rows that break a promise are caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from reconstruct.accounting import Settled, account, check, measure_lost_share, settle
from reconstruct.builders import RowContext, merged, per_call
from reconstruct.errors import IdOutOfRange, LengthMismatch, MissingLogprob, ReconstructError, RecordError, SpanError
from reconstruct.records import PIVOT, REPLAY, Call
from reconstruct.spans import Span
from reconstruct.trajectory import Accounting, Quarantined, Trajectory, encode_accounting
from tests.support.sessions.calls import Talk, call, tell

CONTEXT = RowContext("s")


def built(calls: Sequence[Call]) -> tuple[Settled, list[Trajectory], Accounting]:
    settled = settle(calls)
    rows = merged(settled, CONTEXT)
    return settled, rows, account(settled, rows)


def quarantined(calls: Sequence[Call]) -> dict[str, str]:
    return {item.call_id: item.reason for item in built(calls)[2].quarantined}


def three_turns(**second: Any) -> list[Call]:
    """
    c1  1 2 | 3 4
    c2  1 2   3 4   5 | 6 7     changed as told
    c3  1 2   3 4   5   6 7   8 | 9
    """
    talk = Talk()
    talk.say("c1", [1, 2], [3, 4])
    talk.go_on("c2", "c1", [5], [6, 7], **second)
    talk.go_on("c3", "c2", [8], [9])
    return talk.calls


# A record on its own


@pytest.mark.parametrize(
    ("of_node", "error", "message"),
    [
        ({"said": [7, 8], "logprobs": [-1.0]}, LengthMismatch, r"2 sampled ids but 1 logprobs \(session s, call c1\)"),
        ({"said": [7, 8], "logprobs": [-1.0, None]}, MissingLogprob, r"\(session s, call c1, token 1\)"),
        ({"said": [7, 8], "logprobs": [float("-inf"), -1.0]}, MissingLogprob, r"\(session s, call c1, token 0\)"),
        ({"said": [7, -8]}, IdOutOfRange, r"id -8 is negative \(session s, call c1, token 1\)"),
        ({"delta": [-1], "said": [7]}, IdOutOfRange, r"id -1 is negative \(session s, call c1, token 0\)"),
        ({"said": [7, 8], "spans": []}, SpanError, r"spans cover 0 of 2 sampled tokens \(session s, call c1, token 0\)"),
        ({"said": [7, 8], "spans": [Span(3, 0, 1)]}, SpanError, r"spans cover 1 of 2 .* token 1\)"),
        ({"said": [7, 8], "spans": [Span(3, 0, 3)]}, SpanError, r"spans cover 3 of 2"),
        ({"said": [7, 8], "spans": [Span(3, 0, 1), Span(4, 0, 2)]}, SpanError, r"does not continue at 1 .* token 1\)"),
        ({"said": [7, 8], "spans": [Span(3, 1, 2)]}, SpanError, r"does not continue at 0"),
        ({"said": [7, 8], "spans": [Span(3, 0, 0), Span(3, 0, 2)]}, SpanError, r"does not continue at 0"),
        ({"said": [7, 8], "spans": [Span(-1, 0, 2)]}, SpanError, r"does not continue at 0"),
    ],
)
def test_a_record_that_breaks_a_rule_raises_its_own_error_with_session_call_and_token(
    of_node: dict[str, Any], error: type[RecordError], message: str
) -> None:
    broken = call("c1", **of_node)
    with pytest.raises(error, match=message):
        broken.node.check(session_id=broken.session_id, call_id=broken.call_id)


def test_a_record_that_keeps_all_rules_is_let_through() -> None:
    call("c1", delta=[1], said=[7, 8], spans=[Span(3, 0, 1), Span(4, 1, 2)]).node.check()
    call("c1").node.check()


# What is refused


def test_a_good_session_has_nothing_in_quarantine() -> None:
    assert built(three_turns())[2] == Accounting(5, 5, ())


@pytest.mark.case(9)
def test_a_missing_logprob_quarantines_its_call_alone_and_shifts_nothing() -> None:
    """
    row   1 2 3 4 5 6 7 8 9
    mask  0 0 1 1 0 0 0 0 1     6 7 stay as context
    """
    settled, rows, accounting = built(three_turns(logprobs=[-0.5, None]))
    assert accounting == Accounting(5, 3, (Quarantined("c2", 2, "missing_logprob"),), complete=False)
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert rows[0].loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert rows[0].logprobs.tolist() == [0, 0, -0.5, -1.0, 0, 0, 0, 0, -0.5]
    assert settled.stray == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"logprobs": [-0.5]}, "length_mismatch"),
        ({"logprobs": [-0.5, -0.5, -0.5]}, "length_mismatch"),
        ({"spans": []}, "weight_version_unknown"),
        ({"fields": {"trainable": False, "quarantine_reason": "placeholder_sampled"}}, "placeholder_sampled"),
        ({"fields": {"trainable": False}}, "not_trainable"),
    ],
)
def test_a_flawed_call_in_mid_path_stays_as_masked_context(changed: dict[str, Any], reason: str) -> None:
    _, rows, accounting = built(three_turns(**changed))
    assert accounting == Accounting(5, 3, (Quarantined("c2", 2, reason),), complete=False)
    assert [(row.call_ids, row.loss_mask.tolist()) for row in rows] == [(("c1", "c2", "c3"), [0, 0, 1, 1, 0, 0, 0, 0, 1])]


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    ("reason", "complete"),
    [("frozen_model", True), ("not_chosen", True), ("role_side", True), ("no_token_ids", False), ("missing_logprob", False)],
)
def test_a_session_is_complete_if_all_it_rests_on_is_trained_or_left_out(reason: str, complete: bool, goes_on: bool) -> None:
    """Wherever the call stands: its reply was delivered."""
    flaw = {"role": "side"} if reason == "role_side" else {"trainable": False, "quarantine_reason": reason}
    talk = tell("c1: 1 | 2", "c2 < c1: 3 | 4", *(["c3 / c2: 9 | 6"] if goes_on else []), c2=flaw)
    settled = settle(talk.calls, train_roles=("main",))
    accounting = account(settled, merged(settled, RowContext("s")))
    assert accounting.complete == complete, accounting
    assert measure_lost_share(settled, accounting) == (0 if complete else 1 / (2 + goes_on))


def test_a_negative_id_quarantines_every_call_that_was_sampled_after_it() -> None:
    """A trainer could not look the id up in its embedding: no row may hold it, masked or not.

    c1  1 2 | 3 4
    c2  1 2   3 4   5 | 6 -7
    c3  1 2   3 4   5   6 -7   8 | 9    refused: -7 is in its prompt
    c4  1 2   3 4   5   6      8 | 9    leans on c2, but not on its -7
    """
    talk = tell("c1: 1 2 | 3 4", "c2 < c1: 5 | 6 -7", "c3 < c2: 8 | 9", "c4 / c1 @ c2: 1 2 3 4 5 6 8 | 9")
    _, rows, accounting = built(talk.calls)
    assert {item.call_id: item.reason for item in accounting.quarantined} == dict.fromkeys(("c2", "c3"), "id_out_of_range")
    assert [row.call_ids for row in rows] == [("c1", "c4")]
    assert all((row.token_ids >= 0).all() for row in rows)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_calls_whose_parent_is_missing_are_kept_apart_and_counted(order: Sequence[int]) -> None:
    """The record of c2 is lost."""
    talk = tell("c1: 1 2 | 3 4", "c2 < c1: 5 | 6 7", "c3 < c2: 8 | 9", "c4 < c3: 8 | 9 9")
    kept = [talk.calls[0], *talk.calls[2:]]
    settled, rows, accounting = built([kept[at] for at in order])
    lost = (Quarantined("c3", 1, "unknown_parent"), Quarantined("c4", 2, "unknown_parent"))
    assert accounting == Accounting(5, 2, lost, complete=False)
    assert [row.call_ids for row in rows] == [("c1",)]
    assert [item.call_id for item in settled.stray] == ["c3", "c4"]


def test_calls_that_name_each_other_as_parents_are_kept_apart() -> None:
    first, second = call("c1", parent="c2", delta=[1], said=[2]), call("c2", parent="c1", delta=[1], said=[2])
    assert quarantined([first, second, call("c3", delta=[1], said=[2])]) == dict.fromkeys(("c1", "c2"), "unknown_parent")


def test_a_call_that_asks_more_of_its_base_than_it_holds_is_kept_apart_with_its_own_reason() -> None:
    """
    c1  1 2 | 3         three ids
    c2  five of c1 | 4
    c3  leans on c2 | 5
    """
    calls = [
        call("c1", delta=[1, 2], said=[3]),
        call("c2", base="c1", base_length=5, said=[4]),
        call("c3", parent="c2", delta=[1], said=[5]),
    ]
    assert quarantined(calls) == {"c2": "length_mismatch", "c3": "unknown_parent"}


def test_a_record_that_came_twice_is_counted_once() -> None:
    stray = call("c2", parent="c9", delta=[1], said=[2])
    good = call("c1", delta=[1], said=[2, 3])
    assert built([good, stray, good, stray])[2] == Accounting(3, 2, (Quarantined("c2", 1, "unknown_parent"),), complete=False)


def test_a_call_that_said_nothing_needs_no_row() -> None:
    assert built([call("c1", delta=[1, 2])])[1:] == ([], Accounting(0, 0, ()))


def test_a_session_without_calls_has_no_rows() -> None:
    assert built([])[1:] == ([], Accounting(0, 0, ()))


def test_dangling_calls_are_listed_without_tokens() -> None:
    settled, rows, _ = built([call("c1", delta=[1], said=[2])])
    accounting = account(settled, rows, {"c2": "dangling"})
    assert accounting == Accounting(1, 1, (Quarantined("c2", 0, "dangling"),), 1, complete=False)
    assert encode_accounting(accounting) == {
        "sampled_tokens": 1,
        "exported_tokens": 1,
        "quarantined": [{"call_id": "c2", "tokens": 0, "reason": "dangling"}],
        "dangling_calls": 1,
        "complete": False,
        "replayed_tokens": 0,
    }


# Rows that break a promise


def broken_rows() -> list[tuple[str, Any, str]]:
    """name, a change to the rows of a two-branch session, and what is said of it.

    c1  1 2 | 3 4
    c2  1 2   3 4   5 | 6
    c3  1 2   3 4   7 | 8

    row of c2   1 2 3 4 5 6   mask 0 0 1 1 0 1
    row of c3   1 2 3 4 7 8   mask 0 0 0 0 0 1
    """

    def in_first(**changed: Any) -> Any:
        return lambda rows: [replace(rows[0], **{name: change(rows[0]) for name, change in changed.items()}), *rows[1:]]

    def with_value(name: str, position: int, value: float) -> Any:
        def change(row: Trajectory) -> Any:
            array = getattr(row, name).copy()
            array[position] = value
            return array

        return change

    return [
        ("a row is left out", lambda rows: rows[:1], r"neither trained nor quarantined \(session s, call c3, token 0\)"),
        ("a row comes twice", lambda rows: [*rows, rows[1]], r"trained more than once \(session s, call c3, token 0\)"),
        (
            "a shared call is trained in both",
            lambda rows: [rows[0], replace(rows[1], weight_versions=V, **{name: getattr(rows[0], name) for name in TRAINED})],
            r"trained more than once \(session s, call c1, token 0\)",
        ),
        ("a token counts twice", in_first(loss_mask=with_value("loss_mask", 5, 2)), r"more than once .* call c2, token 0\)"),
        ("a prompt is trained", in_first(loss_mask=with_value("loss_mask", 1, 1)), r"none of its calls .* call c2, token 1\)"),
        ("an id differs", in_first(token_ids=with_value("token_ids", 4, 9)), r"differs from the call's .* call c2, token 4\)"),
        ("a logprob differs", in_first(logprobs=with_value("logprobs", 5, -9)), r"a wrong logprob .* call c2, token 5\)"),
        ("a masked logprob is not 0", in_first(logprobs=with_value("logprobs", 0, -1)), r"wrong logprob .* call c2, token 0\)"),
        (
            "a version differs",
            in_first(weight_versions=lambda row: (Span(7, 2, 4), Span(0, 5, 6))),
            r"a wrong weight version .* call c2, token 2\)",
        ),
        ("a version is missing", in_first(weight_versions=lambda row: row.weight_versions[:1]), r"version .* c2, token 5\)"),
        ("a row is short", in_first(token_ids=lambda row: row.token_ids[:-1]), r"has 5 ids, 6 mask values and 6 logprobs"),
        ("a call is unknown", in_first(call_ids=lambda row: ("c1", "c9")), r"calls that are not in the session"),
        ("no call is named", in_first(call_ids=lambda row: ()), r"calls that are not in the session"),
        ("calls do not extend", in_first(call_ids=lambda row: ("c3", "c2")), r"continues call c3 \(session s, call c2\)"),
    ]


V = (Span(0, 2, 4), Span(0, 5, 6))
TRAINED = ("loss_mask", "logprobs", "logprob_modes")
BROKEN = broken_rows()


@pytest.mark.parametrize(("change", "message"), [item[1:] for item in BROKEN], ids=[item[0] for item in BROKEN])
def test_rows_that_break_a_promise_are_refused_with_the_token(change: Any, message: str) -> None:
    settled, rows, _ = built(tell("c1: 1 2 | 3 4", "c2 < c1: 5 | 6", "c3 < c1: 7 | 8").calls)
    with pytest.raises(RecordError, match=message):
        account(settled, change(rows))


def test_a_row_that_trains_a_quarantined_call_is_refused() -> None:
    calls = three_turns(logprobs=[-0.5, None])
    settled, rows, _ = built(calls)
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 0, 1], dtype=np.int8)
    with pytest.raises(RecordError, match=r"quarantined as missing_logprob \(session s, call c2, token 0\)"):
        account(settled, [replace(rows[0], loss_mask=mask)])


def test_numbers_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ReconstructError, match="5 tokens were sampled, but 3 are exported and 1 quarantined"):
        check(Accounting(5, 3, (Quarantined("c1", 1, "not_delivered"),)))


# Forks


@pytest.mark.case(84)
def test_what_another_session_sampled_is_context_and_counted_beside_the_sum() -> None:
    """
    c1  1 2 | 3 4                  of session s
    c2  1 2   3 4   5 | 6 7        of session s
    c3  1 2   3 4   5   6 7   8 | 9    of the fork
    """
    calls = three_turns()
    fork = replace(calls[2], session_id="fork", marks={REPLAY: PIVOT})
    settled = settle([*calls[:2], fork], session_id="fork")
    assert settled.replayed == {"c1", "c2"}
    (row,) = rows = merged(settled, RowContext("fork", origin="s"))
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.loss_mask.tolist() == [0] * 8 + [1]
    assert not row.logprobs[:8].any()
    assert [(span.start, span.end) for span in row.weight_versions] == [(8, 9)]
    version = calls[0].node.spans[0].version
    assert row.metadata["replay"] == {
        "session_id": "s",
        "calls": 2,
        "tokens": 4,
        "weight_versions": [[version, 2, 4], [version, 5, 7]],
        "pivot": 8,
        "differs_from": None,
        "diverged_at": None,
    }
    (own,) = per_call(settled, RowContext("fork", origin="s"))
    assert own.metadata["replay"] == row.metadata["replay"] | {"tokens": 0, "weight_versions": []}
    accounting = account(settled, rows)
    assert accounting == Accounting(1, 1, (), 0, complete=True, replayed_tokens=4)
    assert measure_lost_share(settled, accounting) == 0
    # What goes on from the pivot has it in its row, too; a row of its own does not.
    on = replace(
        calls[2], call_id="c4", session_id="fork", node=replace(calls[2].node, parent_id="c3", base_id="c3", base_length=9)
    )
    both = settle([*calls[:2], fork, on], session_id="fork")
    assert merged(both, RowContext("fork", origin="s"))[0].metadata["replay"]["pivot"] == 8
    assert [row.metadata["replay"]["pivot"] for row in per_call(both, RowContext("fork", origin="s"))] == [8, None]
    # A builder that trains what was replayed is caught.
    greedy = replace(row, loss_mask=merged(settle([*calls[:2], fork]), RowContext("fork"))[0].loss_mask)
    with pytest.raises(RecordError, match="quarantined as replayed"):
        account(settled, [greedy])


def test_a_fork_at_the_first_call_replays_nothing_and_says_where_it_begins() -> None:
    fork = replace(three_turns()[0], session_id="fork", marks={REPLAY: PIVOT})
    (row,) = merged(settle([fork], session_id="fork"), RowContext("fork", origin="s"))
    assert (row.metadata["replay"]["calls"], row.metadata["replay"]["pivot"]) == (0, 2)
