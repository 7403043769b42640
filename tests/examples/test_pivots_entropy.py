"""The entropy of turns, on logprobs a reader can check, and advantages by it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.pivots.entropy import mean_entropy, modulate, turn_entropy
from examples.pivots.turns import turns_of
from reconstruct.records import pack_ids, pack_logprobs
from reconstruct.trajectory import RowDetails, Trajectory
from tests.support.sessions.training_rows import trajectory


def talk(details: RowDetails | None = None) -> Trajectory:
    """0 | 11 12 | 0 | 13: two turns, with logprobs -1, -3 and -4."""
    return trajectory(
        "a",
        token_ids=pack_ids([0, 11, 12, 0, 13]),
        loss_mask=np.array([0, 1, 1, 0, 1], dtype=np.int8),
        logprobs=pack_logprobs([0, -1, -3, 0, -4]),
        weight_versions=(),
        details=details,
    )


def test_the_entropy_of_a_turn_is_the_mean_surprise_of_its_tokens() -> None:
    rows = [talk()]
    assert turn_entropy(rows, turns_of(rows)).tolist() == [2, 4]
    assert turn_entropy(rows, turns_of(rows), first=1).tolist() == [1, 4]


def test_the_entropy_of_calls_comes_from_their_logprobs_alone() -> None:
    found = mean_entropy([[-1.0, -3.0], [], [-4.0]])
    np.testing.assert_array_equal(found, [2, np.nan, 4])


def test_the_most_probable_tokens_tell_an_entropy_of_their_own() -> None:
    """At token 11 two halves: log 2. At 12 one certain token: 0. At 13 a half and a quarter of which more was not reported."""
    half, quarter, gap = math.log(0.5), math.log(0.25), math.nan
    top = np.array([[gap] * 2, [half, half], [0, -math.inf], [gap] * 2, [half, quarter]], dtype=np.float32)
    rows = [talk(RowDetails(top_token_ids=np.zeros(top.shape, dtype=np.int32), top_logprobs=top))]
    found = turn_entropy(rows, turns_of(rows), estimate="top")
    assert found.tolist() == pytest.approx([math.log(2) / 2, math.log(2)])
    assert turn_entropy(rows, turns_of(rows), estimate="top", first=1).tolist() == pytest.approx([math.log(2)] * 2)


def test_what_was_not_recorded_is_not_guessed() -> None:
    rows = [talk()]
    with pytest.raises(ValueError, match="trajectory 'a' has no top_logprobs"):
        turn_entropy(rows, turns_of(rows), estimate="top")
    with pytest.raises(ValueError, match="estimate is 'all'"):
        turn_entropy(rows, turns_of(rows), estimate="all")  # type: ignore[arg-type]


def test_a_sure_reply_weighs_more_than_an_unsure_one() -> None:
    """Entropies 1 and 3 scale to 0 and 1: factors exp(-0) = 1 and exp(-log 3) = 1/3 over their mean, 2/3."""
    found = modulate([2.0, 2.0, 5.0], [1, 3, 7], [0, 0, 1], strength=math.log(3))
    assert found.tolist() == pytest.approx([3.0, 1.0, 5.0])
    assert modulate([2.0, -2.0], [4, 4], [0, 0]).tolist() == [2.0, -2.0]


def test_an_entropy_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="turn 1 has no finite entropy"):
        modulate([1.0, 1.0], [1.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match="shapes differ"):
        modulate([1.0, 1.0], [1.0], [0, 0])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 3)), min_size=1, max_size=20), st.floats(0, 5))
def test_the_factors_of_a_group_have_mean_1_and_follow_the_entropy(turns: list[tuple[float, int]], strength: float) -> None:
    entropy, group = np.array([each for each, _ in turns]), np.array([each for _, each in turns])
    factors = modulate(np.ones(len(turns)), entropy, group, strength=strength)
    for one in set(group.tolist()):
        mine = group == one
        assert factors[mine].mean() == pytest.approx(1, abs=1e-5)
        assert (np.diff(factors[mine][np.argsort(entropy[mine])]) <= 1e-6).all()
