"""The promises over random sessions, against an oracle that knows whole prompts only.

A session is drawn call by call: a root (new, repeated, or sharing a beginning), a continuation, a fresh rendering under a parent
(edit, compaction, re-tokenised history), another choice, or a retry; with cuts, aborts, lost and flawed records, starts out of
order, and ids from so small a vocabulary that equal tokens by chance are common. What is stored leans on any earlier call, with any
part of what they share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconstruct.accounting import Settled, account, settle
from reconstruct.builders import Builder, RowContext, merged, per_call
from reconstruct.codec import decode, encode
from reconstruct.errors import RecordError
from reconstruct.records import Call, Forest
from reconstruct.spans import Span
from reconstruct.trajectory import Accounting, Trajectory
from tests.support.sessions.calls import Talk, common_prefix
from tests.support.sessions.tree_oracle import Oracle, Row, Told

CONTEXT = RowContext("s", reward=1.0)

tokens = st.integers(0, 3)
FLAWS = ("placeholder_sampled", "no_token_ids", "missing_logprob", "weight_version_unknown", "length_mismatch")
TRAINED = frozenset({"main", "subagent"})
UNTRAINED = frozenset({"compaction", "side"})
FEWER = settings(max_examples=50)
"""For properties of rows that another test compares with the oracle's, over as many sessions as usual."""
KINDS = ("root", "same_root", "go_on", "go_on", "go_on", "fresh", "choice", "retry", "cut")


@dataclass
class Drawn:
    """A session twice over: as the store has it, and as the oracle is told it."""

    talk: Talk = field(default_factory=Talk)
    told: list[Told] = field(default_factory=list)

    @property
    def records(self) -> list[Call]:
        lost = {item.call_id for item in self.told if item.lost}
        return [call for call in self.talk.calls if call.call_id not in lost]

    @property
    def oracle(self) -> Oracle:
        return Oracle(self.told, UNTRAINED)


@st.composite
def sessions(draw: st.DrawFn, *, flawed: bool = True) -> Drawn:
    drawn = Drawn()
    for number in range(draw(st.integers(0, 10))):
        parent, prompt = draw(placed(drawn.told))
        add(draw, drawn, f"c{number:02d}", parent, prompt, flawed)
    return drawn


@st.composite
def placed(draw: st.DrawFn, told: Sequence[Told]) -> tuple[str | None, tuple[int, ...]]:
    """The next call's parent and whole prompt."""
    new = tuple(draw(st.lists(tokens, max_size=3)))
    kind = draw(st.sampled_from(KINDS)) if told else "root"
    if kind == "root":
        return None, new
    earlier = draw(st.sampled_from(told))
    whole = earlier.prompt + earlier.said
    if kind == "same_root":
        return None, earlier.prompt
    if kind == "go_on":
        return earlier.call_id, whole + new
    if kind == "fresh":
        return earlier.call_id, new
    if kind == "cut":
        return earlier.call_id, whole[: draw(st.integers(0, len(whole)))] + new
    return earlier.parent, earlier.prompt


def add(draw: st.DrawFn, drawn: Drawn, call_id: str, parent: str | None, prompt: tuple[int, ...], flawed: bool) -> None:
    said = tuple(draw(st.lists(tokens, max_size=3)))
    versions = tuple(sorted(draw(st.lists(st.integers(0, 2), min_size=len(said), max_size=len(said)))))
    logprobs: list[float | None] = [-draw(st.integers(1, 99)) / 4 for _ in said]
    flaw = draw(st.sampled_from(("", "", *FLAWS))) if flawed and said else ""
    base, base_length = draw(leaning(drawn, parent, prompt))
    finish_reason = draw(st.sampled_from(("stop", "stop", "length", "abort", "tool_calls"))) if flawed else "stop"
    started_at = float(draw(st.integers(0, 12)))
    role = draw(st.sampled_from(("main", "main", "subagent", "compaction", "side"))) if flawed else "main"
    lost = flawed and draw(st.integers(0, 15)) == 15
    if flaw == "missing_logprob":
        logprobs[draw(st.integers(0, len(said) - 1))] = None
    drawn.talk.say(
        call_id,
        prompt,
        said,
        parent=parent,
        base=base,
        base_length=base_length,
        logprobs=[*logprobs, -1.0] if flaw == "length_mismatch" else logprobs,
        spans=[] if flaw == "weight_version_unknown" else as_spans(versions),
        fields={
            "started_at": started_at,
            "finish_reason": finish_reason,
            "role": role,
            **({"trainable": False, "quarantine_reason": flaw} if flaw in FLAWS[:2] else {}),
        },
    )
    names = frozenset(name for name in (parent, base) if name)
    drawn.told.append(
        Told(call_id, prompt, said, tuple(logprobs), versions, parent, names, started_at, finish_reason, flaw, lost, role)
    )


@st.composite
def leaning(draw: st.DrawFn, drawn: Drawn, parent: str | None, prompt: tuple[int, ...]) -> tuple[str | None, int]:
    """The call that a prompt is stored on, and how much of it: its parent mostly, any earlier call, or none."""
    earlier = [item.call_id for item in drawn.told]
    usual = [parent] if parent else [None]
    base = draw(st.sampled_from([*usual, *usual, None, *earlier]))
    if base is None:
        return None, 0
    shared = common_prefix(drawn.talk.full[base], prompt)
    return base, draw(st.sampled_from([shared, shared, draw(st.integers(0, shared))]))


def as_spans(versions: Sequence[int]) -> list[Span]:
    spans, start = [], 0
    for version, run in groupby(versions):
        length = len(list(run))
        spans.append(Span(version, start, start + length))
        start += length
    return spans


def built(records: Sequence[Call], builder: Builder = merged) -> tuple[Settled, list[Trajectory], Accounting]:
    settled = settle(records, train_roles=TRAINED)
    rows = builder(settled, CONTEXT)
    return settled, rows, account(settled, rows)


def as_oracle_rows(rows: Sequence[Trajectory]) -> list[Row]:
    return [
        Row(
            row.call_ids,
            tuple(row.token_ids.tolist()),
            tuple(row.loss_mask.tolist()),
            tuple(row.logprobs.tolist()),
            tuple(versions_of(row)),
            row.finish_reason,
            row.role,
        )
        for row in rows
    ]


def versions_of(row: Trajectory) -> list[int | None]:
    versions: list[int | None] = [None] * len(row.token_ids)
    for span in row.weight_versions:
        for position in range(span.start, span.end):
            assert versions[position] is None
            versions[position] = span.version
    return versions


def outcome(rows: Sequence[Trajectory], accounting: Accounting) -> Any:
    """All that a trainer and the API see of a session's rows."""
    return [row.trajectory_id for row in rows], as_oracle_rows(rows), accounting


@given(sessions())
def test_every_prompt_is_the_one_the_model_saw_and_extends_its_parent_exactly_where_it_begins_with_it(drawn: Drawn) -> None:
    oracle = drawn.oracle
    forest = settle(drawn.records, train_roles=TRAINED).forest
    assert set(forest.calls) == set(oracle.stored) - oracle.homeless
    for call_id in forest.calls:
        told = oracle.stored[call_id]
        assert tuple(forest.prompt_ids(call_id).tolist()) == told.prompt
        assert tuple(forest.full_ids(call_id).tolist()) == told.prompt + told.said
        assert forest.extends(call_id) == oracle.extends(told)
        assert forest.branch(call_id) == [step.call_id for step in oracle.way(told)]


@pytest.mark.case(33)
@given(sessions())
def test_merged_and_per_call_rows_are_the_oracles_and_train_the_same_tokens(drawn: Drawn) -> None:
    by_branch, by_call = (as_oracle_rows(built(drawn.records, builder)[1]) for builder in (merged, per_call))
    assert by_branch == drawn.oracle.merged()
    assert by_call == drawn.oracle.per_call()
    assert trained_tokens(by_branch) == trained_tokens(by_call)


def trained_tokens(rows: Sequence[Row]) -> Counter[Any]:
    """Each trained token with its whole context, logprob and version."""
    return Counter(
        (row.token_ids[: position + 1], row.logprobs[position], row.versions[position])
        for row in rows
        for position, mask in enumerate(row.loss_mask)
        if mask
    )


@FEWER
@given(sessions(), st.sampled_from([merged, per_call]))
def test_the_ids_before_every_trained_token_are_those_it_was_sampled_after(drawn: Drawn, builder: Builder) -> None:
    """P2. Each trained token must be one that a call of the row sampled after just these ids, with this logprob and version."""
    told = {item.call_id: item for item in drawn.told}
    for row in as_oracle_rows(built(drawn.records, builder)[1]):
        samples = [
            (item.prompt + item.said[:at], item.said[at], item.logprobs[at], item.versions[at])
            for item in (told[call_id] for call_id in row.call_ids)
            for at in range(len(item.said))
        ]
        for position, mask in enumerate(row.loss_mask):
            if mask:
                token = (row.token_ids[:position], row.token_ids[position], row.logprobs[position], row.versions[position])
                assert token in samples
            else:
                assert (row.logprobs[position], row.versions[position]) == (0.0, None)


@pytest.mark.case(33)
@FEWER
@given(sessions(), st.sampled_from([merged, per_call]))
def test_every_sampled_token_is_trained_once_or_quarantined_with_a_reason(drawn: Drawn, builder: Builder) -> None:
    """P3. By call, so that one token too many here cannot make up for one too few there."""
    oracle = drawn.oracle
    _, rows, accounting = built(drawn.records, builder)
    trained = Counter[tuple[str, int]]()
    for row in rows:
        for call_id in row.call_ids:
            start = len(oracle.stored[call_id].prompt)
            for at in range(len(oracle.stored[call_id].said)):
                trained[call_id, at] += int(row.loss_mask[start + at])
    quarantined = {item.call_id: item for item in accounting.quarantined}
    for item in oracle.stored.values():
        due = 0 if item.call_id in quarantined else 1
        assert [trained[item.call_id, at] for at in range(len(item.said))] == [due] * len(item.said)
    assert [(item.call_id, item.tokens, item.reason) for item in accounting.quarantined] == oracle.quarantined()
    assert accounting.sampled_tokens == oracle.sampled()
    assert accounting.exported_tokens == sum(trained.values())


@pytest.mark.case(34)
@FEWER
@given(sessions(), st.randoms(), st.sampled_from([merged, per_call]))
def test_the_result_depends_neither_on_the_order_of_arrival_nor_on_the_store(
    drawn: Drawn, random: Any, builder: Builder
) -> None:
    expected = outcome(*built(drawn.records, builder)[1:])
    shuffled = [decode(encode(call)) for call in drawn.records]
    random.shuffle(shuffled)
    assert outcome(*built([*shuffled, *shuffled[:2]], builder)[1:]) == expected


@FEWER
@given(sessions(), st.sampled_from([merged, per_call]))
def test_trajectory_ids_are_unique_and_those_of_the_same_calls_stay(drawn: Drawn, builder: Builder) -> None:
    """What arrives later may add rows or lengthen them, but a row of the same calls keeps its id."""
    whole = built(drawn.records, builder)[1]
    by_calls = {row.call_ids: row.trajectory_id for row in whole}
    assert len({row.trajectory_id for row in whole}) == len(by_calls) == len(whole)
    for row in built(drawn.records[:-1], builder)[1]:
        assert by_calls.get(row.call_ids, row.trajectory_id) == row.trajectory_id


@FEWER
@given(sessions(flawed=False))
def test_a_session_without_flaws_is_exported_to_the_last_token(drawn: Drawn) -> None:
    accounting = built(drawn.records)[2]
    assert accounting.exported_tokens == accounting.sampled_tokens == drawn.oracle.sampled()
    assert accounting.quarantined == ()


@FEWER
@given(sessions(), st.data())
def test_calls_may_be_added_in_any_order_that_has_parents_first(drawn: Drawn, data: st.DataObject) -> None:
    """A live tree takes calls in as they are committed, one started early may come late. What it says of each is the same."""
    settled = settle(drawn.records, train_roles=TRAINED)
    waiting = list(settled.forest.calls.values())
    live = Forest()
    while waiting:
        ready = [
            call for call in waiting if all(name is None or name in live for name in (call.node.parent_id, call.node.base_id))
        ]
        call = data.draw(st.sampled_from(ready))
        waiting.remove(call)
        live.add(call)
    for call_id in settled.forest.calls:
        assert live.full_ids(call_id).tolist() == settled.forest.full_ids(call_id).tolist()
        assert live.branch(call_id) == settled.forest.branch(call_id)


@FEWER
@given(sessions(), st.data())
def test_rows_with_anything_changed_are_refused(drawn: Drawn, data: st.DataObject) -> None:
    """The invariants hold for the rows of any builder: a single wrong value is found."""
    settled, rows, _ = built(drawn.records)
    if not rows:
        return
    at = data.draw(st.integers(0, len(rows) - 1))
    name = data.draw(st.sampled_from(["token_ids", "loss_mask", "logprobs"]))
    array: np.ndarray[Any, Any] = getattr(rows[at], name).copy()
    position = data.draw(st.integers(0, len(array) - 1))
    array[position] = 1 - array[position] if name == "loss_mask" else array[position] - 1
    changed = [*rows[:at], replace(rows[at], **cast(Any, {name: array})), *rows[at + 1 :]]
    missing_or_doubled = [[*rows[:at], *rows[at + 1 :]], [*rows, rows[at]]] if rows[at].loss_mask.any() else []
    for broken in (changed, *missing_or_doubled):
        try:
            account(settled, broken)
        except RecordError as error:
            assert error.session_id == "s"
        else:
            raise AssertionError(f"{name}[{position}] of row {at} was changed unseen")
