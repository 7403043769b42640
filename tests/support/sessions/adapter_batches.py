"""Random batches for the trainers' adapters: groups of rollouts of rows with several sampled stretches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from reconstruct.records import RAW, pack_ids, pack_logprobs
from reconstruct.scores import Score
from reconstruct.spans import Span
from reconstruct.trajectory import Trajectory, weigh_rows
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.batch import Batch
from trainer_client.wire import Group

# A batch is big, and most of its variety is in its rows.
few = settings(max_examples=30)

# What a trainer must find at a token: (id, logprob, version) where it is trained, (id, None, None) elsewhere.
Token = tuple[int, float | None, int | None]


def batch_of(*members: Sequence[Trajectory], version: int = 9) -> Batch:
    """One group per argument; the weights are counted per rollout."""
    return Batch(groups(*members), version)


def expected(row: Trajectory, length: int | None = None) -> list[Token]:
    version_at = {at: span.version for span in row.weight_versions for at in range(span.start, span.end)}
    kept = len(row.token_ids) if length is None else length
    return [
        (int(row.token_ids[at]), float(row.logprobs[at]), version_at[at])
        if row.loss_mask[at]
        else (int(row.token_ids[at]), None, None)
        for at in range(kept)
    ]


def without_versions(tokens: Sequence[Token]) -> list[tuple[int, float | None]]:
    return [(token_id, logprob) for token_id, logprob, _ in tokens]


def read(ids: Sequence[int], mask: Sequence[Any], logprobs: Sequence[float]) -> list[tuple[int, float | None]]:
    """What a trainer learns from three lists of one length."""
    return [
        (int(token_id), float(logprob) if trained else None)
        for token_id, trained, logprob in zip(ids, mask, logprobs, strict=True)
    ]


def two_turns(name: str = "t", **changes: Any) -> Trajectory:
    """Prompt 1 2, sampled 101 102 (version 5), tool 7 8, sampled 103 (version 6), end of the turn 9."""
    return trajectory(
        name,
        token_ids=pack_ids([1, 2, 101, 102, 7, 8, 103, 9]),
        loss_mask=np.array([0, 0, 1, 1, 0, 0, 1, 0], dtype=np.int8),
        logprobs=pack_logprobs([0, 0, -0.5, -1.0, 0, 0, -1.5, 0]),
        weight_versions=(Span(5, 2, 4), Span(6, 6, 7)),
        **changes,
    )


@st.composite
def rows(draw: st.DrawFn, name: str, session: str, reward: float) -> Trajectory:
    mask = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))]
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
    versions = draw(st.lists(st.integers(0, 9), min_size=len(mask), max_size=len(mask)))
    said = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(mask), max_size=len(mask)))
    return trajectory(
        name,
        session=session,
        token_ids=pack_ids(ids),
        loss_mask=np.array(mask, dtype=np.int8),
        logprobs=pack_logprobs([logprob if trained else 0.0 for logprob, trained in zip(said, mask, strict=True)]),
        weight_versions=_spans(mask, versions),
        reward=reward,
        truncated=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn, *, rows_per_rollout: int = 3) -> Batch:
    """One to three groups of one to three rollouts of one to `rows_per_rollout` rows, which share the rollout's reward."""
    found = []
    for group in range(draw(st.integers(1, 3))):
        members: list[Trajectory] = []
        for rollout in range(draw(st.integers(1, 3))):
            reward, session = float(draw(st.integers(-4, 4))), f"s{group}.{rollout}"
            count = draw(st.integers(1, rows_per_rollout))
            members += [draw(rows(f"t{group}.{rollout}.{at}", session, reward)) for at in range(count)]
        found.append(Group(f"g{group}", tuple(weigh_rows(members))))
    return Batch(found, 9)


def _spans(mask: Sequence[int], versions: Sequence[int]) -> tuple[Span, ...]:
    marked = [(version if trained else -1, at) for at, (trained, version) in enumerate(zip(mask, versions, strict=True))]
    runs = [(version, [at for _, at in run]) for version, run in groupby(marked, key=lambda pair: pair[0])]
    return tuple(Span(version, places[0], places[-1] + 1) for version, places in runs if version >= 0)


def taught(row: Trajectory, top_k: int = 2) -> Trajectory:
    """The row with the score of a teacher: of each trained token a tenth more than its logprob, and as best ids the token's own and then
    others, or only others where the position is odd."""
    places, length = np.flatnonzero(row.loss_mask), len(row.token_ids)
    logprobs = np.full(length, np.nan, np.float32)
    logprobs[places] = row.logprobs[places] * np.float32(0.9)
    ids, best = np.full((length, top_k), -1, np.int32), np.full((length, top_k), np.nan, np.float32)
    for at in places.tolist():
        first = int(row.token_ids[at]) if at % 2 == 0 else 7_000 + at
        ids[at] = [first, *(8_000 + at + other for other in range(1, top_k))]
        best[at] = [float(logprobs[at]) if at % 2 == 0 else -0.125, *(-9.0 - other for other in range(1, top_k))]
    return replace(row, scores={"teacher": Score("teacher", RAW, logprobs, ids, best)})


def taught_batch(batch: Batch) -> Batch:
    return Batch(
        [replace(group, trajectories=tuple(map(taught, group.trajectories))) for group in batch.groups], batch.weight_version
    )
