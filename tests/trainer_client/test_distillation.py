"""Distillation from scores: the numbers of the papers, at the tokens that were sampled and scored, and nothing anywhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_client.distillation import forward_kl, reverse_kl, toward_teacher

NAN = float("nan")
LOGPROBS = st.lists(st.floats(-20.0, 0.0, width=32), min_size=1, max_size=20)


def test_an_advantage_grows_by_what_the_teacher_likes_the_token_better() -> None:
    got = toward_teacher([1.0, 1.0, 1.0, 1.0], [-1.0, -3.0, NAN, -1.0], [-2.0, -2.0, -2.0, -2.0], [1, 1, 1, 0], 0.5)
    assert got.tolist() == [1.5, 0.5, 1.0, 1.0]


@given(LOGPROBS)
def test_a_teacher_that_agrees_changes_nothing(logprobs: list[float]) -> None:
    mask = [1] * len(logprobs)
    assert toward_teacher(np.zeros(len(logprobs)), logprobs, logprobs, mask, 1.0).tolist() == [0.0] * len(logprobs)
    for estimate in ("k1", "k2", "k3"):
        assert reverse_kl(logprobs, logprobs, mask, estimate=estimate).tolist() == [0.0] * len(logprobs)


def test_the_estimates_of_reverse_kl_agree_in_expectation() -> None:
    student, teacher = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])
    exact = float(np.sum(np.exp(student) * (student - teacher)))
    mask = np.ones(3)
    for estimate in ("k1", "k3"):
        found = reverse_kl(student, teacher, mask, estimate=estimate)
        assert float(np.sum(np.exp(student) * found)) == pytest.approx(exact, abs=1e-12)


@given(LOGPROBS, LOGPROBS)
def test_k2_and_k3_are_never_negative(student: list[float], teacher: list[float]) -> None:
    length = min(len(student), len(teacher))
    for estimate in ("k2", "k3"):
        assert (reverse_kl(student[:length], teacher[:length], [1] * length, estimate=estimate) >= -1e-12).all()


def test_what_was_not_sampled_or_not_scored_has_no_divergence() -> None:
    got = reverse_kl([-1.0, -1.0, -1.0], [-2.0, NAN, -2.0], [1, 1, 0])
    assert got[0] == 1.0 and np.isnan(got[1:]).all()


def test_forward_kl_over_the_whole_vocabulary_is_exact() -> None:
    teacher, student = np.log([[0.2, 0.5, 0.3]]), np.log([[0.5, 0.3, 0.2]])
    exact = float(np.sum(np.exp(teacher) * (teacher - student)))
    assert forward_kl(teacher, student, [1])[0] == pytest.approx(exact, abs=1e-12)
    assert forward_kl(teacher, student, [1], tail=True)[0] == pytest.approx(exact, abs=1e-9)


def test_forward_kl_of_the_best_ids_with_their_tail_is_at_most_the_whole() -> None:
    teacher, student = np.log([0.6, 0.3, 0.07, 0.03]), np.log([0.3, 0.4, 0.1, 0.2])
    exact = float(np.sum(np.exp(teacher) * (teacher - student)))
    lumped = forward_kl(teacher[:2], student[:2], 1, tail=True)
    expected = 0.6 * np.log(0.6 / 0.3) + 0.3 * np.log(0.3 / 0.4) + 0.1 * np.log(0.1 / 0.3)
    assert float(lumped) == pytest.approx(float(expected), abs=1e-12)
    assert 0 <= float(lumped) <= exact


def test_places_without_an_id_do_not_count() -> None:
    got = forward_kl([[-0.5, NAN], [NAN, NAN]], [[-1.0, NAN], [NAN, NAN]], [1, 1])
    assert got[0] == pytest.approx(np.exp(-0.5) * 0.5) and np.isnan(got[1])


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="the teacher's best have shape"):
        forward_kl([[-1.0]], [[-1.0, -2.0]], [1])
    with pytest.raises(ValueError, match="not k1, k2 or k3"):
        reverse_kl([-1.0], [-1.0], [1], estimate="k4")  # type: ignore[arg-type]
