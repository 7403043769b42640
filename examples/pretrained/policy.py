"""Policy: a pretrained model that learns from trees of rows, in which every shared prefix is computed once.

Supervised on demonstrations, and by the demo's clipped objective on rewarded rollouts or on a teacher's scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from examples.demo.recompute import load_checkpoint
from examples.demo.trainer import Recipe, accumulate, predict
from trainer_client import Batch, Difference, TreeBatch, compare_trees
from trainer_client.distillation import reverse_kl, toward_teacher


class Policy:
    """The model, in float32, and its optimizer, on the GPU where there is one."""

    def __init__(self, model_dir: Path, recipe: Recipe) -> None:
        self._recipe = recipe
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device)
        parameters = self.model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return dict(self.model.state_dict())

    def save_model(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def save_optimizer(self, path: Path) -> None:
        torch.save(self._optimizer.state_dict(), path)

    def load(self, weights: Path, optimizer: Path) -> None:
        """Take up what was put aside: a folder of safetensors, and a file of `save_optimizer`."""
        self.model.load_state_dict(load_checkpoint(weights))
        self._optimizer.load_state_dict(torch.load(optimizer, map_location=self.model.device, weights_only=True))

    def recompute(self, batch: Batch) -> Difference:
        """Stored and recomputed logprobs of all trained tokens of the batch."""
        return compare_trees(self.model, batch, self._find_budget(batch))

    def imitate(self, batch: Batch) -> float:
        """One optimizer step on all sampled tokens of the batch, each as important as the other; their mean loss."""
        trees = self._make_trees(batch)
        tokens, total = sum(len(tree.trained_index) for tree in trees), 0.0
        self._optimizer.zero_grad()
        for tree in trees:
            logprobs, place = predict(self.model, tree)
            loss = -logprobs[place, tree.token_ids[tree.trained_index]].sum() / tokens
            loss.backward()
            total += loss.item()
        self._step()
        return total

    def reinforce(self, batch: Batch, advantages: NDArray[np.float32]) -> dict[str, float]:
        """One optimizer step on the batch; means over the tokens that teach. A group whose rollouts earned the same teaches nothing.

        One step and not several: each would follow the few exercises in it, and undo what others had taught.
        """
        members = [np.flatnonzero(batch.columns.group_index == group) for group in range(len(batch.groups))]
        groups = [rows for rows in members if np.any(advantages[rows])]
        if not groups:
            return {"learned_groups": 0, "learned_tokens": 0, "loss": 0.0, "clipped": 0.0, "off_policy": 0.0}
        trees = self._make_trees(batch, advantages=advantages, rows=np.concatenate(groups).tolist())
        return {"learned_groups": len(groups), **self._learn(trees, [tree.advantages[tree.segment_index] for tree in trees])}

    def distil(self, batch: Batch, scorer: str, mixing: np.random.Generator | None = None) -> dict[str, float]:
        """One optimizer step toward the scorer's distribution alone, whatever was earned. `reverse_kl`: the student's from the scorer's, in
        nats per token. With `mixing` each token gets the number of another one."""
        trees = self._make_trees(batch)
        sampled = np.concatenate([tree.inference_logprobs.numpy(force=True) for tree in trees])
        scores = np.concatenate([tree.scores[scorer].logprobs.numpy(force=True) for tree in trees])
        told = scores if mixing is None else mixing.permutation(scores)
        every = np.ones(len(sampled), bool)
        advantages = toward_teacher(np.zeros_like(sampled), told, sampled, every, 1.0)
        parts = torch.from_numpy(advantages).to(self.model.device).split([len(tree.trained_index) for tree in trees])
        return {
            "learned_groups": len(batch.groups),
            "scored_tokens": int(np.isfinite(scores).sum()),
            "reverse_kl": float(np.nanmean(reverse_kl(sampled, scores, every))),
            **self._learn(trees, parts),
        }

    def _learn(self, trees: Sequence[TreeBatch], advantages: Sequence[torch.Tensor]) -> dict[str, float]:
        """One optimizer step; `advantages` has one of each tree's trained tokens."""
        tokens = sum(len(tree.trained_index) for tree in trees)
        self._optimizer.zero_grad()
        sums: Counter[str] = Counter()
        for tree, given in zip(trees, advantages, strict=True):
            sums.update(accumulate(self.model, tree, tokens, self._recipe, given))
        self._step()
        return {"learned_tokens": tokens, **{name: value / tokens for name, value in sums.items()}}

    def _make_trees(self, batch: Batch, **selected: Any) -> list[TreeBatch]:
        trees = batch.tree(self._find_budget(batch), framework="torch", **selected)
        return [tree.to(self.model.device) for tree in trees]

    def _find_budget(self, batch: Batch) -> int:
        """Distinct tokens of a sequence: a row that is longer, because a tool said much, gets one of its own length."""
        return max(self._recipe.token_budget, *(len(row.token_ids) for row in batch.rows))

    def _step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.max_gradient)
        self._optimizer.step()
