"""Policy: a pretrained model that learns from trees of rows, in which every shared prefix is computed once.

Supervised on demonstrations, and by the demo's clipped objective on rewarded rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from examples.demo.recompute import load_checkpoint
from examples.demo.trainer import Recipe, accumulate, predict
from trainer_client import Batch, Difference, TreeBatch, compare_trees


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
        tokens = sum(len(tree.trained_index) for tree in trees)
        self._optimizer.zero_grad()
        sums: Counter[str] = Counter()
        for tree in trees:
            sums.update(accumulate(self.model, tree, tokens, self._recipe, tree.advantages[tree.segment_index]))
        self._step()
        return {
            "learned_groups": len(groups),
            "learned_tokens": tokens,
            **{name: value / tokens for name, value in sums.items()},
        }

    def _make_trees(self, batch: Batch, **selected: Any) -> list[TreeBatch]:
        trees = batch.tree(self._find_budget(batch), framework="torch", **selected)
        return [tree.to(self.model.device) for tree in trees]

    def _find_budget(self, batch: Batch) -> int:
        """Distinct tokens of a sequence: a row that is longer, because a tool said much, gets one of its own length."""
        return max(self._recipe.token_budget, *(len(row.token_ids) for row in batch.rows))

    def _step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.max_gradient)
        self._optimizer.step()
