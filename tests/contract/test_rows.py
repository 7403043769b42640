"""A row and its accounting are one thing where they are written, documented and read."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from contract.batches import LeasedSession
from proxy.api.calls import ScoreView, TrajectoryView
from reconstruct.media import Media
from reconstruct.scores import Score
from reconstruct.spans import Span
from reconstruct.trajectory import Accounting, Quarantined, RowDetails, Trajectory, encode_accounting, encode_row
from tests.support.sessions.training_rows import trajectory
from trainer_client.wire import decode_group

DETAILS = RowDetails(
    top_token_ids=np.full((4, 1), 5, np.int32),
    top_logprobs=np.full((4, 1), -1.0, np.float32),
    prompt_logprobs=np.full(4, -2.0, np.float32),
    routed_experts=np.zeros((4, 1, 1), np.int16),
)
SCORE = Score(
    policy="teacher",
    mode="raw",
    logprobs=np.array([np.nan, np.nan, -1.5, np.nan], np.float32),
    top_ids=np.array([[-1], [-1], [9], [-1]], np.int32),
    top_logprobs=np.array([[np.nan], [np.nan], [-0.5], [np.nan]], np.float32),
    weight_versions=(Span(3, 2, 3),),
    error="c2 is not scored",
)
ROW = trajectory(
    details=DETAILS,
    policy="coder",
    role_source="rule",
    media=(Media("d" * 64, "image", 0, 2),),
    row_weight=1.0,
    scores={"teacher": SCORE},
)
LOST = Accounting(3, 2, (Quarantined("c1", 1, "unsound"),), dangling_calls=1, complete=False, replayed_tokens=4)


def test_a_row_is_documented_with_the_fields_that_it_has() -> None:
    wire = encode_row(ROW)
    assert wire.keys() == TrajectoryView.model_fields.keys()
    assert wire["scores"]["teacher"].keys() == ScoreView.model_fields.keys()


def test_a_trainer_reads_every_field_of_a_row() -> None:
    (read,) = decode_group({"group_id": "g1", "trajectories": [encode_row(ROW)]}).trajectories
    for name in (each.name for each in fields(Trajectory) if each.name not in ("details", "scores")):
        np.testing.assert_array_equal(getattr(read, name), getattr(ROW, name), name)
    for name in (each.name for each in fields(RowDetails)):
        np.testing.assert_array_equal(getattr(read.details, name), getattr(DETAILS, name), name)
    for name in (each.name for each in fields(Score)):
        np.testing.assert_array_equal(getattr(read.scores["teacher"], name), getattr(SCORE, name), name)


def test_an_accounting_is_documented_and_read_with_the_fields_that_it_has() -> None:
    sent = {"session_id": "s", **encode_accounting(LOST)}
    assert sent.keys() == {each.name for each in fields(LeasedSession)}
    (read,) = decode_group({"group_id": "g1", "trajectories": [], "sessions": [sent]}).sessions
    assert {name: getattr(read, name) for name in sent} == {
        "session_id": "s",
        **{each.name: getattr(LOST, each.name) for each in fields(Accounting)},
    }
