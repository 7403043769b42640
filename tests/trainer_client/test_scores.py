"""Scores on the trainer's side: read whole from every encoding, and laid at their own tokens in every form of a batch."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconstruct.scores import Score
from reconstruct.spans import Span
from reconstruct.trajectory import Trajectory, encode_row
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.arrays import PackedBatch
from trainer_client.batch import Batch
from trainer_client.errors import InvalidAnswer
from trainer_client.tree import TreeBatch
from trainer_client.wire import decode_trajectory

NAN = float("nan")


def score(sampled_from: int, logprobs: list[float], top_k: int = 2, **changes: Any) -> Score:
    """Of a row whose tokens from `sampled_from` on are sampled; the best ids of a token are 10 and 11 times its position."""
    length = sampled_from + len(logprobs)
    numbers = np.full(length, np.nan, np.float32)
    numbers[sampled_from:] = logprobs
    known = ~np.isnan(numbers)
    best = np.where(known[:, None], np.arange(length)[:, None] * (10 + np.arange(top_k)), -1).astype(np.int32)
    values = np.where(known[:, None], numbers[:, None] - np.arange(top_k), np.nan).astype(np.float32)
    given: dict[str, Any] = {"policy": "teacher", "mode": "raw", "weight_versions": (Span(3, sampled_from, length),)}
    return Score(logprobs=numbers, top_ids=best, top_logprobs=values, **{**given, **changes})


@pytest.mark.parametrize("form", ["json", "msgpack", "packed"])
def test_a_score_reads_back_from_every_encoding(form: str) -> None:
    row = trajectory(scores={"teacher": score(2, [-1.0, NAN], error="its last token is not scored")})
    wire = encode_row(row, arrays="bytes" if form == "packed" else "list")
    sent = json.loads(json.dumps(wire)) if form == "json" else msgpack.unpackb(msgpack.packb(wire))
    read, given = decode_trajectory(sent).scores["teacher"], row.scores["teacher"]
    for name in Score.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(read, name), getattr(given, name), name)
    assert [str(array.dtype) for array in (read.logprobs, read.top_ids, read.top_logprobs)] == ["float32", "int32", "float32"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (score(1, [-1.0, -1.0, -1.0]), "token 1: a token that was not sampled has a score 'teacher'"),
        (score(2, [-1.0]), "the score 'teacher' has 3 tokens, the row 4"),
    ],
)
def test_a_score_at_another_token_than_its_own_is_refused(wrong: Score, told: str) -> None:
    with pytest.raises(InvalidAnswer, match=told):
        decode_trajectory(encode_row(trajectory(scores={"teacher": wrong})))


def test_scores_stand_at_their_tokens_in_a_padded_batch() -> None:
    """The second row has no score of the teacher's, and a wider one of another scorer's."""
    rows = [
        trajectory("a", scores={"teacher": score(2, [-1.0, -2.0], top_k=1)}),
        trajectory("b", prompt=(1,), versions=(5,), scores={"raw": score(1, [-3.0], top_k=2)}),
    ]
    for side, places in (("right", [[2, 3], [1]]), ("left", [[2, 3], [3]])):
        padded = Batch(groups(rows), 5).padded(side=side)  # type: ignore[arg-type]
        expected = np.full((2, 4), np.nan, np.float32)
        expected[0, places[0]] = [-1.0, -2.0]
        np.testing.assert_array_equal(padded.scores["teacher"].logprobs, expected)
        assert padded.scores["teacher"].top_ids[0].tolist() == [[-1], [-1], [20], [30]]
        assert padded.scores["raw"].top_ids[1, places[1][0]].tolist() == [10, 11]
        assert np.isnan(padded.scores["raw"].top_logprobs[0]).all()


@st.composite
def scored_rows(draw: st.DrawFn) -> Trajectory:
    prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
    versions = draw(st.lists(st.integers(0, 5), max_size=4))
    name = draw(st.sampled_from("abc"))
    numbers = draw(st.lists(st.sampled_from([-1.0, -2.5, NAN]), min_size=len(versions), max_size=len(versions)))
    scores = {"teacher": score(len(prompt), numbers)} if draw(st.booleans()) else {}
    return trajectory(name, prompt=prompt, versions=sorted(versions), scores=scores)


@given(st.lists(scored_rows(), min_size=1, max_size=5))
def test_every_form_of_a_batch_has_the_scores_of_its_rows(rows: list[Trajectory]) -> None:
    batch = Batch(groups(rows), 5)
    padded = batch.padded()
    laid_out: list[PackedBatch | TreeBatch] = [*batch.packed(32), *batch.tree(64)]
    for data in laid_out:
        assert data.scores.keys() == {name for at in data.row_index.tolist() for name in batch.rows[at].scores}
        for name, laid in data.scores.items():
            for place, at in enumerate(data.row_index.tolist()):
                own = np.flatnonzero(data.segment_index == place)
                trained = own[data.loss_mask[own]]
                alike = padded.scores[name]
                where = np.flatnonzero(batch.rows[at].loss_mask)
                for field in ("logprobs", "top_ids", "top_logprobs"):
                    np.testing.assert_array_equal(getattr(laid, field)[trained], getattr(alike, field)[at, where])
                untrained = np.setdiff1d(own, trained)
                assert np.isnan(laid.logprobs[untrained]).all() and (laid.top_ids[untrained] == -1).all()
    for at, row in enumerate(batch.rows):
        if "teacher" in padded.scores:
            given = row.scores["teacher"].logprobs if row.scores else np.full(len(row.token_ids), np.nan)
            np.testing.assert_array_equal(padded.scores["teacher"].logprobs[at, : len(row.token_ids)], given)


def test_rows_without_scores_have_none_in_a_batch() -> None:
    batch = Batch(groups([trajectory()]), 5)
    assert batch.padded().scores == {} and batch.packed(9)[0].scores == {} and batch.tree(9)[0].scores == {}


def test_scores_become_tensors_with_the_other_fields() -> None:
    padded = Batch(groups([trajectory(scores={"teacher": score(2, [-1.0, -2.0])})]), 5).padded(framework="torch").to("cpu")
    laid = padded.scores["teacher"]
    assert laid.logprobs[0, 2:].tolist() == [-1.0, -2.0]
    assert (str(laid.top_ids.dtype), tuple(laid.top_logprobs.shape)) == ("torch.int32", (1, 4, 2))
