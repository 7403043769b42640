"""Abandoned attempts: one fact decides, whether a reply was delivered.

The property draws a harness that meets failures at random and keeps what it got; from that alone the oracle says what is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconstruct.accounting import DANGLING, NOT_DELIVERED, account, find_attempts, presume_delivered, settle
from reconstruct.builders import Builder, RowContext, merged, per_call
from reconstruct.records import Call, Forest
from reconstruct.spans import Span
from reconstruct.trajectory import Accounting, Trajectory
from tests.support.sessions.calls import Talk, call

CONTEXT = RowContext("s", reward=1.0)
VERSION_UNKNOWN = "weight_version_unknown"


def attempt(call_id: str, parent: str | None = None, **fields: Any) -> Call:
    """A call that said one token; it started at the second its id ends in, and took less than half a second."""
    fields = {"digest": call_id.encode(), "fingerprint": b"the same history", **fields}
    return call(call_id, parent=parent, delta=[1], said=[2], fields=fields)


def built(
    calls: Sequence[Call], delivered: set[str], builder: Builder = merged, dangling: Sequence[str] = ()
) -> tuple[list[Trajectory], Accounting]:
    settled = settle(calls, delivered=delivered)
    rows = builder(settled, CONTEXT)
    return rows, account(settled, rows, dict.fromkeys(dangling, DANGLING))


def quarantined(accounting: Accounting) -> dict[str, str]:
    return {item.call_id: item.reason for item in accounting.quarantined}


# What is an attempt


@pytest.mark.case(26)
def test_a_reply_that_was_not_delivered_is_an_attempt_whatever_was_asked_again() -> None:
    """The old bug: a retry that was not streamed, or had another temperature, left the first attempt a trained row."""
    for other in (b"the same body", b"another body"):
        calls = [attempt("c1", digest=b"the same body"), attempt("c2", digest=other)]
        rows, accounting = built(calls, {"c2"})
        assert [row.call_ids for row in rows] == [("c2",)]
        assert (quarantined(accounting), accounting.complete) == ({"c1": NOT_DELIVERED}, True)


def test_the_only_attempt_is_one_too() -> None:
    rows, accounting = built([attempt("c1")], set())
    assert rows == []
    assert (quarantined(accounting), accounting.complete) == ({"c1": NOT_DELIVERED}, True)


@pytest.mark.case(56)
def test_equal_requests_that_were_all_delivered_are_samples_also_where_one_is_marked_as_a_retry() -> None:
    calls = [attempt("c1"), attempt("c2", marks={"retry": "1"}), attempt("c3", marks={"retry": "2"})]
    rows, accounting = built(calls, {"c1", "c2", "c3"})
    assert [row.call_ids for row in rows] == [("c1",), ("c2",), ("c3",)]
    assert accounting.quarantined == ()


def test_a_reply_that_something_continues_was_delivered_whatever_was_noted() -> None:
    calls = [attempt("c1"), attempt("c2"), attempt("c3", "c1", fingerprint=b"the next history")]
    assert find_attempts(Forest(calls), {"c3"}) == {"c2"}


def test_the_choices_of_one_request_are_delivered_together() -> None:
    """c1 and c2 are choices of one request, and c3 goes on from c1: the harness had c2 as well."""
    first: dict[str, Any] = {"started_at": 1.0, "digest": b"n is 2"}
    calls = [attempt("c1", **first), attempt("c2", **first), attempt("c3", "c1", fingerprint=b"the next history")]
    assert find_attempts(Forest(calls[:2]), set()) == {"c1", "c2"}
    assert find_attempts(Forest(calls), {"c3"}) == set()


def test_what_is_an_attempt_does_not_depend_on_the_order_of_arrival() -> None:
    calls = [attempt("c1"), attempt("c2"), attempt("c3"), attempt("c4")]
    for order in itertools.permutations(calls):
        assert find_attempts(Forest(order), {"c2", "c4"}) == {"c1", "c3"}


@pytest.mark.case(55)
@pytest.mark.parametrize("known", [True, False])
def test_a_delivered_reply_that_a_push_cut_is_trained_and_truncated_or_makes_the_session_incomplete(known: bool) -> None:
    """
    c1  1 2 | 3 4
    c2  1 2   3 4   5 | 6 7     cut by a push; its weight versions are known or not
    """
    talk = Talk()
    talk.say("c1", [1, 2], [3, 4])
    cut = {"finish_reason": "abort", "status": "aborted"}
    talk.go_on("c2", "c1", [5], [6, 7], fields=cut, **({} if known else {"spans": []}))
    (row,), accounting = built(talk.calls, {"c1", "c2"})
    assert row.truncated == known
    assert row.loss_mask.tolist() == ([0, 0, 1, 1, 0, 1, 1] if known else [0, 0, 1, 1])
    assert (quarantined(accounting), accounting.complete) == ({} if known else {"c2": VERSION_UNKNOWN}, known)


def test_a_stream_that_broke_off_leaves_the_session_complete_though_no_version_of_it_is_known() -> None:
    """The old bug: the harness asked again and went on, and the session was incomplete: `weight_version_unknown`."""
    talk = Talk()
    talk.say("c1", [1, 2], [3, 4], spans=[], fields={"finish_reason": "abort", "status": "failed"})
    talk.say("c2", [1, 2], [5, 6])
    (row,), accounting = built(talk.calls, {"c2"})
    assert row.call_ids == ("c2",)
    assert (quarantined(accounting), accounting.complete) == ({"c1": NOT_DELIVERED}, True)


def test_an_undelivered_call_of_a_frozen_model_or_one_not_chosen_keeps_its_own_reason() -> None:
    for reason in ("frozen_model", "not_chosen"):
        accounting = built([attempt("c1", trainable=False, quarantine_reason=reason)], set())[1]
        assert (quarantined(accounting), accounting.complete) == ({"c1": reason}, True)


# A process that died before it could tell


def test_the_reply_of_a_process_that_died_counts_as_delivered_where_the_same_was_not_asked_again() -> None:
    assert presume_delivered([attempt("c1")], {"c1"}) == {"c1"}
    assert presume_delivered([attempt("c1"), attempt("c2", fingerprint=b"another history")], {"c1"}) == {"c1"}


@pytest.mark.parametrize("other", [{}, {"digest": b"c1"}, {"status": "failed"}], ids=["body", "same body", "failed"])
def test_a_reply_that_was_asked_for_again_was_lost_with_its_process(other: dict[str, Any]) -> None:
    assert presume_delivered([attempt("c1"), attempt("c2", **other)], {"c1"}) == set()


def test_samples_at_once_in_a_process_that_died_are_not_retries_of_each_other() -> None:
    assert presume_delivered([attempt("c1"), attempt("c2", started_at=1.1)], {"c1", "c2"}) == {"c1", "c2"}


def test_a_call_that_failed_was_not_delivered() -> None:
    assert presume_delivered([attempt("c1", status="failed")], {"c1"}) == set()


# Random failures


WHOLE, LIMIT, PUSH, PUSH_UNKNOWN, BROKEN, UNPARSED, HUNG_UP, UNREAD, DIED = (
    "whole",
    "cut by max_tokens",
    "cut by a push",
    "cut by a push, its weight versions unknown",
    "the engine's stream broke off",
    "the engine's parser failed",
    "the harness hung up",
    "the connection broke as the end was sent",
    "the process died while the engine sampled",
)
GOT = (WHOLE, LIMIT, PUSH, PUSH_UNKNOWN)
FIELDS: dict[str, dict[str, Any]] = {
    WHOLE: {},
    LIMIT: {"finish_reason": "length"},
    PUSH: {"finish_reason": "abort", "status": "aborted"},
    PUSH_UNKNOWN: {"finish_reason": "abort", "status": "aborted"},
    BROKEN: {"finish_reason": "abort", "status": "failed"},
    UNPARSED: {"status": "failed"},
    HUNG_UP: {"finish_reason": "abort", "status": "aborted"},
    UNREAD: {},
}
NO_VERSIONS = (PUSH_UNKNOWN, BROKEN)
CUT = (LIMIT, PUSH, PUSH_UNKNOWN, BROKEN, HUNG_UP)


@dataclass
class Run:
    """What a harness met. `got` and `lost` are the calls whose replies it got and did not; `continued` those it went on from with a call
    that was recorded: one that a process died in makes the session incomplete, and says nothing of the call before it."""

    talk: Talk = field(default_factory=Talk)
    got: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    continued: set[str] = field(default_factory=set)
    dangling: list[str] = field(default_factory=list)

    @property
    def unsound(self) -> set[str]:
        """The calls that the agent acted on and that cannot be trained."""
        acted_on = self.got | {call_id: what for call_id, what in self.lost.items() if call_id in self.continued}
        return {call_id for call_id, what in acted_on.items() if what in NO_VERSIONS}


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Several agents, perhaps with equal prompts, that ask, ask again, and go on from a reply: also from one that broke off, as far as
    they got it."""
    run, number = Run(), 0
    for _ in range(draw(st.integers(1, 3))):
        parent: str | None = None
        for _ in range(draw(st.integers(0, 4))):
            new = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
            prompt = [*(run.talk.full[parent] if parent else []), *new]
            for _ in range(draw(st.integers(1, 3))):
                number += 1
                ask(draw, run, f"c{number:02d}", parent, prompt)
            made = [each.call_id for each in run.talk.calls if each.node.parent_id == parent]
            if parent is not None and made:
                run.continued.add(parent)
            parent = draw(st.sampled_from([*made, *([parent] if parent else [])])) if made else parent
    return run


def ask(draw: st.DrawFn, run: Run, call_id: str, parent: str | None, prompt: Sequence[int]) -> None:
    what = draw(st.sampled_from([WHOLE, WHOLE, LIMIT, PUSH, PUSH_UNKNOWN, BROKEN, UNPARSED, HUNG_UP, UNREAD, DIED]))
    if what == DIED:
        run.dangling.append(call_id)
        return
    said = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    spans = [] if what in NO_VERSIONS else [Span(draw(st.integers(0, 2)), 0, len(said))]
    # Neither the body nor when it came says anything.
    fields = {
        **FIELDS[what],
        "digest": draw(st.sampled_from([b"streamed", b"whole"])),
        "started_at": float(draw(st.integers(0, 9))),
    }
    # Each request is one of its own.
    fields["fingerprint"] = call_id.encode()
    run.talk.say(call_id, prompt, said, parent=parent, spans=spans, fields=fields)
    (run.got if what in GOT else run.lost)[call_id] = what


@pytest.mark.case(55)
@given(runs(), st.sampled_from([merged, per_call]), st.randoms())
def test_what_a_harness_got_is_trained_or_breaks_the_session_and_the_rest_is_attempts(
    run: Run, builder: Builder, random: Any
) -> None:
    calls = list(run.talk.calls)
    random.shuffle(calls)
    rows, accounting = built(calls, set(run.got), builder, run.dangling)
    attempts = run.lost.keys() - run.continued
    expected = dict.fromkeys(run.unsound, VERSION_UNKNOWN) | dict.fromkeys(attempts, NOT_DELIVERED)
    assert quarantined(accounting) == expected | dict.fromkeys(run.dangling, DANGLING)
    assert accounting.complete == (not run.unsound and not run.dangling)
    sampled = {each.call_id: len(each.node.completion_ids) for each in calls}
    assert accounting.exported_tokens == sum(sampled[call_id] for call_id in sampled.keys() - expected.keys())
    for row in rows:
        if row.loss_mask.any():
            assert row.truncated == ((run.got | run.lost)[row.call_ids[-1]] in CUT)
        assert attempts.isdisjoint(row.call_ids)
