"""Distillation from a teacher's scores of the exact ids that the student sampled: pure functions on numpy arrays of any shape.

Entry i of every array is about the i-th token given those before it, as in `Batch.padded`; `mask` says which tokens were sampled. Where a
teacher's number is not known (NaN) a token gets what it would get without a teacher.

    advantages = toward_teacher(per_token, padded.scores["teacher"].logprobs, padded.inference_logprobs, padded.loss_mask, 0.5)
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["forward_kl", "reverse_kl", "toward_teacher"]

Estimate = Literal["k1", "k2", "k3"]


def toward_teacher(
    advantages: ArrayLike, teacher_logprobs: ArrayLike, logprobs: ArrayLike, mask: ArrayLike, coefficient: float
) -> NDArray[np.float32]:
    """advantages + coefficient * (teacher_logprobs - logprobs) at sampled tokens with a known score; the advantages elsewhere. `logprobs`
    are those that the tokens were sampled with.

    The expectation of the addition under the student is minus the reverse KL divergence. Source: Lu and Thinking Machines Lab,
    "On-Policy Distillation", 2025; Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
    arXiv:2306.13649, section 3.
    """
    given, difference = np.asarray(advantages, np.float32), -_difference(teacher_logprobs, logprobs)
    scored = np.asarray(mask, bool) & np.isfinite(difference)
    added: NDArray[np.float32] = np.where(scored, coefficient * difference, 0.0).astype(np.float32)
    return given + added


def reverse_kl(
    logprobs: ArrayLike, teacher_logprobs: ArrayLike, mask: ArrayLike, *, estimate: Estimate = "k1"
) -> NDArray[np.float64]:
    """Per sampled token an estimate of KL(student || teacher), in nats; NaN at other tokens and where no score is known.

    With d = logprobs - teacher_logprobs: k1 is d, k2 is d²/2, k3 is exp(-d) - 1 + d. Source: Schulman, "Approximating KL Divergence",
    2020.
    """
    difference = _difference(teacher_logprobs, logprobs)
    if estimate == "k1":
        found = difference
    elif estimate == "k2":
        found = difference**2 / 2
    elif estimate == "k3":
        found = np.expm1(-difference) + difference
    else:
        raise ValueError(f"estimate is {estimate!r}, not k1, k2 or k3")
    return np.where(np.asarray(mask, bool), found, np.nan)


def forward_kl(
    teacher_top_logprobs: ArrayLike, logprobs_of_top: ArrayLike, mask: ArrayLike, *, tail: bool = False
) -> NDArray[np.float64]:
    """Per sampled token KL(teacher || student) over the teacher's k best ids, in nats; NaN at other tokens and where none is known.

    Both arrays are (..., k): the teacher's logprobs of its k best, and the student's of the same ids. Without `tail` the sum runs over
    these ids alone, as trainers take it; with it what is left of both distributions counts as one more id, which is a lower bound of the
    whole divergence. Source: Agarwal et al., arXiv:2306.13649, equation 3.
    """
    teacher, student = np.asarray(teacher_top_logprobs, np.float64), np.asarray(logprobs_of_top, np.float64)
    if teacher.shape != student.shape:
        raise ValueError(f"the teacher's best have shape {teacher.shape}, the student's logprobs of them {student.shape}")
    known = np.isfinite(teacher) & np.isfinite(student)
    weights = np.where(known, np.exp(np.where(known, teacher, 0.0)), 0.0)
    found = np.sum(weights * np.where(known, teacher - student, 0.0), axis=-1)
    if tail:
        student_weights = np.where(known, np.exp(np.where(known, student, 0.0)), 0.0)
        found = found + _cross(1.0 - weights.sum(-1), 1.0 - student_weights.sum(-1))
    return np.where(np.asarray(mask, bool) & known.any(-1), found, np.nan)


def _difference(teacher_logprobs: ArrayLike, logprobs: ArrayLike) -> NDArray[Any]:
    return np.asarray(logprobs, np.float64) - np.asarray(teacher_logprobs, np.float64)


def _cross(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """left * log(left / right) of what is left of two distributions, 0 where the teacher's is used up."""
    smallest = np.finfo(np.float64).tiny
    return np.where(left > 0, left * np.log(np.maximum(left, smallest) / np.maximum(right, smallest)), 0.0)
