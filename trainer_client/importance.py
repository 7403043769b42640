"""Off-policy statistics and importance weights, from the engine's logprobs and the trainer's.

Everything is computed from the log ratio per sampled token

    log r = trainer's log p(token | before) - engine's log q(token | before)

in float64, so that nothing overflows before the last step. Both must be logprobs of the same distribution: the same temperature,
and the same truncation if the engine reports processed logprobs (docs/trainers.md).

    data = batch.padded(framework="torch")
    statistics = batch_statistics(batch, data, trainer_logprobs)        # of the shape of data.token_ids; ready to log
    weights = truncated_weights(trainer_logprobs, data.inference_logprobs, data.loss_mask).weights
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer_client.arrays import PackedBatch, PaddedBatch
from trainer_client.tree import TreeBatch

if TYPE_CHECKING:
    from trainer_client.batch import Batch

Floats = NDArray[np.float64]
Level = Literal["token", "row", "row_mean"]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Arrays of the mask's shape: `kept` bool, the tokens to train on; `weights` float32, 0 for all others.

    Divide a mean over tokens by the number of kept ones."""

    weights: NDArray[np.float32]
    kept: NDArray[np.bool_]


def log_ratios(trainer_logprobs: Any, inference_logprobs: Any, mask: Any) -> Floats:
    """log r of the masked tokens in array order, float64 of shape (tokens under the mask,); -inf if the trainer's probability is 0.

    Takes numpy arrays or torch tensors of one shape. Raises ValueError for any other logprob that is not finite and for unequal shapes.
    """
    trainer, inference, under = _to_float64(trainer_logprobs), _to_float64(inference_logprobs), _to_float64(mask) != 0
    if not trainer.shape == inference.shape == under.shape:
        raise ValueError(f"shapes differ: {trainer.shape}, {inference.shape}, {under.shape}")
    ours, theirs = trainer[under], inference[under]
    broken = ~(np.isfinite(ours) | np.isneginf(ours)) | ~np.isfinite(theirs)
    if broken.any():
        at = int(np.argmax(broken))
        raise ValueError(f"token {at} under the mask has logprobs {ours[at]} (trainer) and {theirs[at]} (engine)")
    return np.asarray(ours - theirs, dtype=np.float64)


def ratio_statistics(log_ratio: Any, *, low: float = 0.8, high: float = 1.2, advantages: Any = None) -> dict[str, float]:
    """Floats to log, over log ratios of shape (tokens,); only `tokens` when there are none.

    `ratio_mean`, `ratio_min`, `ratio_max`. `kl_k1`, `kl_k2`, `kl_k3`: estimates of KL(engine || trainer) per token: -log r, which is
    unbiased and may be negative; (log r)² / 2, biased with little variance; r - 1 - log r, unbiased and never negative. Source:
    Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html. `effective_sample_size`: (Σr)² / (n Σr²), the
    share of the tokens that the weighted ones are worth, above 0 to 1 (Kish, "Survey Sampling", 1965). `clipped_low`,
    `clipped_high`: shares of the tokens with r below `low` or above `high`; with `advantages` of shape (tokens,), only those whose
    gradient PPO's clipping stops (Schulman et al., arXiv:1707.06347): below with a negative advantage, above with a positive one.
    """
    ratios = np.asarray(log_ratio, dtype=np.float64)
    if not ratios.size:
        return {"tokens": 0.0}
    under, over = ratios < np.log(low), ratios > np.log(high)
    if advantages is not None:
        signs = np.asarray(advantages, dtype=np.float64)
        under, over = under & (signs < 0), over & (signs > 0)
    with np.errstate(over="ignore"):  # a ratio beyond float64 is inf, and is shown as such
        return {
            "tokens": float(ratios.size),
            "ratio_mean": float(np.exp(_log_sum(ratios) - np.log(ratios.size))),
            "ratio_min": float(np.exp(ratios.min())),
            "ratio_max": float(np.exp(ratios.max())),
            "kl_k1": float(-ratios.mean()),
            "kl_k2": float((ratios**2).mean() / 2),
            "kl_k3": float((np.expm1(ratios) - ratios).mean()),
            "effective_sample_size": _effective_share(ratios),
            "clipped_low": float(under.mean()),
            "clipped_high": float(over.mean()),
        }


def statistics_by(log_ratio: Any, keys: Sequence[Hashable] | NDArray[Any], **options: Any) -> dict[str, float]:
    """`ratio_statistics` of the tokens of each key, named `<key>/<statistic>`, keys in order. `keys` has one per token; `options`
    are those of `ratio_statistics`."""
    ratios, labels = np.asarray(log_ratio, dtype=np.float64), np.asarray(keys)
    advantages = options.pop("advantages", None)
    found: dict[str, float] = {}
    for key in np.unique(labels):
        mine = labels == key
        signs = None if advantages is None else np.asarray(advantages)[mine]
        each = ratio_statistics(ratios[mine], advantages=signs, **options)
        found |= {f"{key}/{name}": value for name, value in each.items()}
    return found


def batch_statistics(
    batch: Batch,
    data: PaddedBatch | PackedBatch | TreeBatch,
    trainer_logprobs: Any,
    *,
    prefix: str = "importance/",
    **options: Any,
) -> dict[str, float]:
    """`ratio_statistics` of the sampled tokens of `data`, an array form of `batch`: of all of them, by role (`role/main/…`), and by
    how many versions they are behind their model's (`staleness/2/…`). `trainer_logprobs` has the shape of `data.loss_mask`. Clipped
    shares use the signs of the advantages in `data`, if any."""
    mask = _to_float64(data.loss_mask) != 0
    rows = row_of_token(data)[mask]
    ratios = log_ratios(trainer_logprobs, data.inference_logprobs, data.loss_mask)
    if data.advantages is not None and "advantages" not in options:
        options["advantages"] = _to_float64(data.advantages)[rows]
    indexes = _to_float64(data.row_index).astype(np.int64)
    behind = batch.row_versions[indexes][rows] - _to_float64(data.weight_versions)[mask].astype(np.int64)
    roles = np.array([batch.rows[int(index)].role for index in indexes], dtype=object)[rows].astype(str)
    found = ratio_statistics(ratios, **options)
    found |= {f"staleness/{name}": value for name, value in statistics_by(ratios, behind, **options).items()}
    found |= {f"role/{name}": value for name, value in statistics_by(ratios, roles, **options).items()}
    return {f"{prefix}{name}": value for name, value in found.items()}


def row_of_token(data: PaddedBatch | PackedBatch | TreeBatch) -> NDArray[np.int64]:
    """The row of `data`, from 0, of each position; of the shape of `data.loss_mask`."""
    if not isinstance(data, PaddedBatch):
        return _to_float64(data.segment_index).astype(np.int64)
    rows, width = np.shape(data.token_ids)
    return np.repeat(np.arange(rows, dtype=np.int64)[:, None], width, axis=1)


def truncated_weights(
    trainer_logprobs: Any, inference_logprobs: Any, mask: Any, *, cap: float = 2.0, level: Level = "token", rows: Any = None
) -> Weights:
    """min(r, cap): a token that the trainer finds much more likely than the engine did counts at most `cap` times.

    `level`: r of the token; of its whole row (the product); or the row's geometric mean per token. For the last two `rows` says
    which row each place belongs to (`row_of_token`). Source: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025 (TIS; also "On the Rollout-Training Mismatch in Modern RL Systems", NeurIPS 2025 workshop
    on Efficient Reasoning); levels: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Inference-Training Mismatch", 2025.
    """
    if not cap > 0:
        raise ValueError(f"the cap is {cap}, not above 0")
    under = _to_float64(mask) != 0
    log_ratio = _at_level(log_ratios(trainer_logprobs, inference_logprobs, mask), under, level, rows)
    return _scatter(np.exp(np.minimum(log_ratio, np.log(cap))), np.ones(log_ratio.shape, dtype=np.bool_), under)


def masked_weights(
    trainer_logprobs: Any,
    inference_logprobs: Any,
    mask: Any,
    *,
    low: float = 0.5,
    high: float = 5.0,
    level: Level = "token",
    rows: Any = None,
) -> Weights:
    """r within [low, high], otherwise 0: tokens on which the two disagree by more are left out.

    At the token's level this is IcePop's M(r). Source: Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for
    Trillion-Scale Thinking Model", arXiv:2510.18855; for a row's ratio it is the masked variant (MIS) of Liu et al., see
    `truncated_weights`. `level` and `rows` as there.
    """
    if not 0 <= low <= high:
        raise ValueError(f"the bounds are {low} and {high}")
    under = _to_float64(mask) != 0
    log_ratio = _at_level(log_ratios(trainer_logprobs, inference_logprobs, mask), under, level, rows)
    with np.errstate(divide="ignore"):
        kept = (log_ratio >= np.log(low)) & (log_ratio <= np.log(high))
    return _scatter(np.exp(np.where(kept, log_ratio, -np.inf)), kept, under)


def _at_level(log_ratio: Floats, under: NDArray[np.bool_], level: Level, rows: Any) -> Floats:
    if level == "token":
        return log_ratio
    if level not in ("row", "row_mean"):
        raise ValueError(f"level is {level!r}, not 'token', 'row' or 'row_mean'")
    if rows is None:
        raise ValueError(f"level {level!r} needs `rows`")
    _, row = np.unique(_to_float64(rows)[under], return_inverse=True)
    sums = np.bincount(row, weights=log_ratio) if row.size else np.zeros(0)
    return np.asarray((sums / np.bincount(row) if level == "row_mean" else sums)[row], dtype=np.float64)


def _scatter(weights: Floats, kept: NDArray[np.bool_], under: NDArray[np.bool_]) -> Weights:
    table, stays = np.zeros(under.shape, dtype=np.float32), np.zeros(under.shape, dtype=np.bool_)
    table[under], stays[under] = weights, kept
    return Weights(table, stays)


def _log_sum(logs: Floats) -> float:
    """log Σ exp(logs); -inf if all are."""
    greatest = float(logs.max())
    return greatest if np.isneginf(greatest) else greatest + float(np.log(np.exp(logs - greatest).sum()))


def _effective_share(logs: Floats) -> float:
    if np.isneginf(logs.max()):
        return 0.0
    share = np.exp(2 * _log_sum(logs) - _log_sum(2 * logs) - np.log(logs.size))
    return float(min(1.0, share))  # equal weights come out at 1 and a rounding


def _to_float64(values: Any) -> Floats:
    """As a numpy array; a torch tensor may be on any device and is detached."""
    plain = values.detach().double().cpu().numpy() if hasattr(values, "detach") else values
    return np.asarray(plain, dtype=np.float64)
