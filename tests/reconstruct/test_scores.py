"""Scores in rows: each number stands at the token that it is about, whatever the session did to its history.

The scorer of these tests says of a token what a function of the ids up to it gives, so that every number in a row can be worked out
again.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconstruct.accounting import settle
from reconstruct.builders import Builder, merged, per_call
from reconstruct.details import NO_TOKEN
from reconstruct.errors import DecodeError
from reconstruct.records import LOGPROB_MODES, Call, Forest
from reconstruct.score_columns import lay_scores
from reconstruct.scores import Score, Scores, decode_score, encode_score, unscored
from reconstruct.spans import Span
from reconstruct.trajectory import Trajectory, encode_row
from tests.reconstruct.test_properties import CONTEXT, FEWER, Drawn, sessions
from tests.support.sessions.calls import tell

K = 2
NAN = float("nan")


def logprob_of(ids: Sequence[int]) -> float:
    """What the teacher says of the last of `ids` after those before it; a float32."""
    return -(1 + zlib.crc32(struct.pack(f"<{len(ids)}i", *ids)) % 1000) / 8


def top_of(ids: Sequence[int]) -> list[tuple[int, float]]:
    return [(int(-logprob_of(ids) * 8) + at, logprob_of(ids) / 2 - at) for at in range(K)]


def scored(prompt: Sequence[int], said: Sequence[int], policy: str = "teacher", version: int = 3) -> Score:
    wholes = [[*prompt, *said[: at + 1]] for at in range(len(said))]
    tops = [top_of(whole) for whole in wholes]
    return Score(
        policy,
        "raw",
        np.array([logprob_of(whole) for whole in wholes], np.float32),
        np.array([[token for token, _ in top] for top in tops], np.int32).reshape(-1, K),
        np.array([[value for _, value in top] for top in tops], np.float32).reshape(-1, K),
        (Span(version, 0, len(said)),) if said else (),
    )


def score_all(drawn: Drawn) -> dict[str, Scores]:
    found: dict[str, Scores] = {}
    for each in drawn.talk.calls:
        whole, said = drawn.talk.full[each.call_id], each.node.completion_ids.tolist()
        found[each.call_id] = {"teacher": scored(whole[: len(whole) - len(said)], said)}
    return found


def rows_of(calls: Sequence[Call], builder: Builder = merged) -> tuple[list[Trajectory], Forest]:
    settled = settle(list(calls))
    return builder(settled, CONTEXT), settled.forest


def check_true(row: Trajectory) -> None:
    """Whatever the row's score says of a token is what the scorer says of it."""
    ids, score = row.token_ids.tolist(), row.scores["teacher"]
    for at in np.flatnonzero(score.known).tolist():
        assert score.logprobs[at] == logprob_of(ids[: at + 1])
        assert list(zip(score.top_ids[at].tolist(), score.top_logprobs[at].tolist(), strict=True)) == top_of(ids[: at + 1])
    assert (score.top_ids[~score.known] == NO_TOKEN).all() and np.isnan(score.top_logprobs[~score.known]).all()


@FEWER
@given(sessions(flawed=False), st.sampled_from([merged, per_call]))
def test_every_sampled_token_has_its_own_score_and_no_other_token_has_one(drawn: Drawn, builder: Builder) -> None:
    rows, forest = rows_of(drawn.records, builder)
    for before, row in zip(rows, lay_scores(rows, forest, score_all(drawn)), strict=True):
        assert replace(row, scores={}).trajectory_id == before.trajectory_id
        assert (row.token_ids is before.token_ids, row.loss_mask is before.loss_mask, row.logprobs is before.logprobs) == (
            True,
        ) * 3
        if not row.loss_mask.any():
            assert row.scores == {}
            continue
        check_true(row)
        score = row.scores["teacher"]
        np.testing.assert_array_equal(score.known, row.loss_mask == 1)
        assert score.error == ""
        covered = np.zeros(len(row.token_ids), bool)
        for span in score.weight_versions:
            covered[span.start : span.end] = True
        np.testing.assert_array_equal(covered, row.loss_mask == 1)


@FEWER
@given(sessions(), st.data())
def test_calls_without_a_score_leave_nan_and_are_named(drawn: Drawn, data: st.DataObject) -> None:
    known = score_all(drawn)
    left = {call_id: scores for call_id, scores in known.items() if data.draw(st.booleans())}
    rows, forest = rows_of(drawn.records)
    for row in lay_scores(rows, forest, left):
        if "teacher" not in row.scores:
            continue
        check_true(row)
        score = row.scores["teacher"]
        unknown = (row.loss_mask == 1) & ~score.known
        assert unknown.any() == ("is not scored" in score.error)


def test_a_shared_context_is_scored_once_where_its_tokens_are_trained() -> None:
    """c2 and c3 both continue c1, which the first row trains: the second has no score of c1's tokens either."""
    talk = tell("c1: 1 2 | 3", "c2 < c1: 4 | 5", "c3 < c1: 6 | 7")
    rows, forest = rows_of(talk.calls)
    laid = lay_scores(rows, forest, score_all(Drawn(talk)))
    assert [row.token_ids.tolist() for row in laid] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    assert [row.scores["teacher"].known.tolist() for row in laid] == [
        [False, False, True, False, True],
        [False, False, False, False, True],
    ]


def test_a_score_stands_at_its_own_token_after_an_edited_history() -> None:
    talk = tell("c1: 1 2 | 3 4", "c2 / c1: 1 9 3 4 5 | 6")
    rows, forest = rows_of(talk.calls)
    _, edited = lay_scores(rows, forest, score_all(Drawn(talk)))
    assert edited.token_ids.tolist() == [1, 9, 3, 4, 5, 6]
    assert edited.scores["teacher"].logprobs.tolist()[5] == logprob_of([1, 9, 3, 4, 5, 6])
    assert np.isnan(edited.scores["teacher"].logprobs[:5]).all()


def test_what_a_row_cannot_take_is_said_and_leaves_nan() -> None:
    talk = tell("c1: 1 2 | 3", "c2 < c1: 4 | 5", "c3 < c2: 6 | 7 8", "c4 < c3: | 9")
    calls = {
        "c1": {"teacher": scored([1, 2], [3])},
        "c2": {"teacher": scored([1, 2, 3, 4], [5], policy="another")},
        "c3": {"teacher": scored([1, 2, 3, 4, 5, 6], [7])},
        "c4": {"teacher": unscored(1, "teacher", "raw", "the teacher's window is 8 tokens")},
    }
    rows, forest = rows_of(talk.calls)
    [row] = lay_scores(rows, forest, calls)
    score = row.scores["teacher"]
    assert np.flatnonzero(score.known).tolist() == [2]
    assert score.error == (
        "c2 is scored by policy 'another' in mode raw, others by 'teacher' in raw; c3 sampled 2 tokens, its score has 1; "
        "the teacher's window is 8 tokens"
    )


def test_scorers_of_different_k_stand_beside_each_other() -> None:
    talk = tell("c1: 1 2 | 3")
    plain = replace(scored([1, 2], [3]), top_ids=np.zeros((1, 0), np.int32), top_logprobs=np.zeros((1, 0), np.float32))
    rows, forest = rows_of(talk.calls)
    [row] = lay_scores(rows, forest, {"c1": {"plain": plain, "teacher": scored([1, 2], [3])}})
    assert {name: score.top_ids.shape for name, score in row.scores.items()} == {"plain": (3, 0), "teacher": (3, K)}


def test_a_row_without_scores_does_not_mention_them() -> None:
    rows, forest = rows_of(tell("c1: 1 2 | 3").calls)
    assert "scores" not in encode_row(rows[0])
    assert encode_row(lay_scores(rows, forest, {"elsewhere": {}})[0]) == encode_row(rows[0])


def test_a_row_on_the_wire_has_its_scores_with_null_for_what_is_unknown() -> None:
    rows, forest = rows_of(tell("c1: 1 2 | 3").calls)
    [row] = lay_scores(rows, forest, {"c1": {"teacher": scored([1, 2], [3])}})
    best = top_of([1, 2, 3])
    assert json.loads(json.dumps(encode_row(row)))["scores"] == {
        "teacher": {
            "logprobs": [None, None, logprob_of([1, 2, 3])],
            "top_ids": [[-1, -1], [-1, -1], [token for token, _ in best]],
            "top_logprobs": [[None, None], [None, None], [value for _, value in best]],
            "policy": "teacher",
            "weight_versions": [[3, 2, 3]],
            "mode": "raw",
        }
    }
    packed = encode_row(row, arrays="bytes")["scores"]["teacher"]
    assert packed["logprobs"] == {"shape": [3], "data": np.array([NAN, NAN, logprob_of([1, 2, 3])], "<f4").tobytes()}


scores = st.builds(
    lambda numbers, k, policy, mode, error: Score(
        policy,
        mode,
        np.array(numbers, np.float32),
        np.arange(len(numbers) * k, dtype=np.int32).reshape(len(numbers), k),
        np.full((len(numbers), k), -1.5, np.float32),
        (Span(7, 0, len(numbers)),) if numbers else (),
        error,
    ),
    st.lists(st.floats(-50, 0, width=32) | st.just(NAN), max_size=6),
    st.integers(0, 3),
    st.text(max_size=4),
    st.sampled_from(LOGPROB_MODES),
    st.text(max_size=9),
)


@given(scores)
def test_a_score_is_decoded_as_it_was_encoded(score: Score) -> None:
    read = decode_score(encode_score(score))
    for name in ("logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(read, name), getattr(score, name))
        assert (
            getattr(read, name).dtype == getattr(score, name).dtype and getattr(read, name).shape == getattr(score, name).shape
        )
    assert (read.policy, read.mode, read.weight_versions, read.error) == (
        score.policy,
        score.mode,
        score.weight_versions,
        score.error,
    )


@given(scores, st.data())
def test_a_damaged_score_is_refused_or_read_whole(score: Score, data: st.DataObject) -> None:
    blob = encode_score(score)
    with pytest.raises(DecodeError):
        decode_score(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(DecodeError):
        decode_score(blob + b"\0")
    for other in (b"", msgpack.packb(7), msgpack.packb([1] * 9), msgpack.packb({"a": 1})):
        with pytest.raises(DecodeError):
            decode_score(other)


def test_a_score_of_another_schema_is_refused_by_its_version() -> None:
    fields = msgpack.unpackb(encode_score(scored([1], [2])))
    with pytest.raises(DecodeError, match="schema version 9 is unknown to this build, which reads 1"):
        decode_score(msgpack.packb([9, *fields[1:]]))


def test_arrays_that_do_not_fit_make_no_score() -> None:
    with pytest.raises(ValueError, match="a score of 1 tokens has the best ids of 2"):
        Score("t", "raw", np.zeros(1, np.float32), np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32))
    with pytest.raises(ValueError, match="the shapes of a score differ"):
        Score("t", "raw", np.zeros(1, np.float32), np.zeros((1, 1), np.int32), np.zeros((1, 2), np.float32))


@pytest.mark.parametrize(("top_k", "most"), [(0, 4.2), (8, 68.2)])
def test_a_stored_token_takes_4_bytes_and_8_for_each_alternative(top_k: int, most: float) -> None:
    """Of a call of 200 tokens, with all that stands beside them."""
    best = np.full((200, top_k), -1, np.float32)
    score = Score("teacher", "raw", np.full(200, -1, np.float32), best.astype(np.int32), best, (Span(3, 0, 200),))
    assert 4 + 8 * top_k < len(encode_score(score)) / 200 < most
