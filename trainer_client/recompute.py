"""Recompute the logprobs of rows with the model and compare them with the recorded ones.

In float32 they differ by less than 1e-4 (vLLM against transformers: about 2e-6). Only raw logprobs are compared: no others are log_softmax
of a model's logits (see `reconstruct.records.LOGPROB_MODES`).

Row by row (`compare`), or on trees (`compare_trees`), where every prefix that rows share is computed once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.records import LOGPROB_MODES, RAW
from reconstruct.trajectory import Trajectory
from trainer_client.arrays import require_no_images
from trainer_client.batch import Batch
from trainer_client.media import MediaFiles
from trainer_client.tree import TreeBatch
from trainer_client.vision import Vision, join_sequence
from trainer_client.wire import modes_by_token, versions_by_token

if TYPE_CHECKING:
    import torch


_RAW = LOGPROB_MODES.index(RAW)


@dataclass(frozen=True, slots=True)
class Difference:
    """|stored - recomputed| over `tokens` tokens. `trajectory_id` and `position` are those of the largest."""

    tokens: int = 0
    largest: float = 0.0
    mean: float = 0.0
    trajectory_id: str = ""
    position: int = -1

    def __add__(self, other: Difference) -> Difference:
        tokens = self.tokens + other.tokens
        # A NaN must win: it is not greater than anything and would pass for a small difference.
        worst = self if self.largest >= other.largest or np.isnan(self.largest) else other
        mean = (self.mean * self.tokens + other.mean * other.tokens) / tokens if tokens else 0.0
        return Difference(tokens, worst.largest, mean, worst.trajectory_id, worst.position)


def load_model(path: str | os.PathLike[str], *, dtype: Any = "float32") -> tuple[Any, Vision | None]:
    """The checkpoint in evaluation mode, and for one that sees images what it takes to show them. Raises OSError or ValueError for what
    transformers cannot load."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path)
    if getattr(config, "vision_config", None) is None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), None
    return AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval(), Vision.load(path)


def recompute(
    model: Any, row: Trajectory, *, vision: Vision | None = None, media: MediaFiles | None = None
) -> NDArray[np.float32]:
    """log p(token i | tokens and images before i) for every position of the row, shape (n,); 0.0 for the first.

    `model` is a causal language model of transformers, in evaluation mode; for a row with images one that sees, with its `vision` and the
    row's `media`. Raises UnseenImages, VisionMismatch.
    """
    import torch

    ids = torch.as_tensor(np.array(row.token_ids), dtype=torch.long, device=model.device)[None]
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **_look(model, row, vision, media)).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate(([np.float32(0)], chosen.cpu().numpy()))


def _look(model: Any, row: Trajectory, vision: Vision | None, media: MediaFiles | None) -> dict[str, Any]:
    """What the model is given besides the ids."""
    import torch

    if vision is None:
        require_no_images([row], "give `vision` and `media`")
        return {}
    if not row.media:
        return {}
    (seen,) = vision.read([row], [len(row.token_ids)], media or MediaFiles({}))
    inputs = _tensors(model, join_sequence([seen]))
    if seen.rope_positions is not None:
        inputs["position_ids"] = torch.as_tensor(seen.rope_positions[:, None], device=model.device)
    return inputs


def _tensors(model: Any, images: Mapping[str, Any]) -> dict[str, Any]:
    """On the model's device, pixels in its dtype."""
    import torch

    tensors = {name: torch.as_tensor(array, device=model.device) for name, array in images.items()}
    return {name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def compare(
    model: Any,
    rows: Iterable[Trajectory],
    *,
    version: int | None = None,
    vision: Vision | None = None,
    media: MediaFiles | None = None,
) -> Difference:
    """The difference between the rows' stored logprobs and `model`'s over trained tokens with raw ones; with `version`, only over the
    tokens sampled under those weights. `vision`, `media` and errors as for `recompute`."""
    total = Difference()
    for row in rows:
        wanted = modes_by_token(row) == _RAW
        if version is not None:
            wanted &= versions_by_token(row) == version
        if wanted.any():
            total += _difference(row, np.abs(recompute(model, row, vision=vision, media=media) - row.logprobs), wanted)
    return total


def compare_trees(
    model: Any, batch: Batch, token_budget: int, *, version: int | None = None, vision: Vision | None = None
) -> Difference:
    """What `compare` says of the batch's rows, from trees of at most `token_budget` distinct tokens. For models that mix tokens by
    attention alone, each layer over the whole context: see `trainer_client.tree`."""
    total = Difference()
    for tree in batch.tree(token_budget, vision=vision, mix_modes=True):
        wanted = tree.logprob_modes == _RAW
        if version is not None:
            wanted &= tree.weight_versions == version
        if wanted.any():
            distance = np.abs(recompute_tree(model, tree) - tree.inference_logprobs)
            at = int(np.argmax(np.where(wanted, distance, -1.0)))
            row = batch.rows[int(tree.row_index[tree.segment_index[at]])]
            place = int(tree.position_ids[tree.trained_index[at]])
            total += Difference(
                int(wanted.sum()), float(distance[at]), float(distance[wanted].mean()), row.trajectory_id, place
            )
    return total


def recompute_tree(model: Any, tree: TreeBatch) -> NDArray[np.float32]:
    """log p of every trained token of a tree in numpy arrays, shape (trained,). `model` as for `recompute`."""
    import torch

    data = tree.in_framework("torch").to(model.device)
    sources, place = torch.unique(data.logit_index, return_inverse=True)
    with torch.no_grad():
        logits = model(
            data.token_ids[None],
            attention_mask=data.attention_mask(model.dtype),
            position_ids=data.position_ids[None] if data.rope_position_ids is None else data.rope_position_ids[:, None],
            logits_to_keep=sources,
            **_tensors(model, data.vision_inputs),
        ).logits[0]
    logprobs = torch.log_softmax(logits.float(), dim=-1)[place, data.token_ids[data.trained_index]]
    found: NDArray[np.float32] = logprobs.cpu().numpy()
    return found


def _difference(row: Trajectory, distance: NDArray[np.float32], wanted: NDArray[np.bool_]) -> Difference:
    at = int(np.argmax(np.where(wanted, distance, -1.0)))
    return Difference(int(wanted.sum()), float(distance[at]), float(distance[wanted].mean()), row.trajectory_id, at)
