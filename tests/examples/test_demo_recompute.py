"""Recomputing logprobs: every sampled token under its own weight version, and a wrong one is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.demo.recompute import largest_difference, rows_by_version
from examples.demo.tiny_model import make_tiny_model
from trainer_client.publish import write_weights

IDS = [5, 6, 7, 11, 12, 13, 14]
MASK = [0, 0, 0, 1, 1, 0, 1]


@pytest.fixture
def models(tmp_path: Path) -> Any:
    """Version 0 in `model`, version 1 with other weights in `weights/version-1`."""
    first = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model", layers=1, hidden_size=64))
    second = AutoModelForCausalLM.from_pretrained(
        make_tiny_model(tmp_path / "other", layers=1, hidden_size=64, seed=1, initializer_range=0.1)
    )
    write_weights(second.state_dict(), tmp_path / "weights", 1)
    return first, second


@torch.no_grad()
def logprobs(model: Any) -> list[float]:
    scores = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    return [0.0, *scores.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()]


def mixed_row(models: Any) -> dict[str, Any]:
    """Two tokens of version 0, then one of version 1 after an observation."""
    old, new = (logprobs(model) for model in models)
    stored = [0.0, 0.0, 0.0, old[3], old[4], 0.0, new[6]]
    return {"token_ids": IDS, "loss_mask": MASK, "logprobs": stored, "weight_versions": [[0, 3, 5], [1, 6, 7]]}


def short_row(models: Any) -> dict[str, Any]:
    stored = [0.0, 0.0, 0.0, logprobs(models[0])[3]]
    return {"token_ids": IDS[:4], "loss_mask": [0, 0, 0, 1], "logprobs": stored, "weight_versions": [[0, 3, 4]]}


def difference(rows: list[dict[str, Any]], folder: Path) -> tuple[float, int]:
    return largest_difference(rows, str(folder / "model"), folder / "weights", dtype=torch.float32)


def test_each_token_is_recomputed_under_the_weights_of_its_span(models: Any, tmp_path: Path) -> None:
    largest, tokens = difference([mixed_row(models), short_row(models)], tmp_path)
    assert tokens == 4
    assert largest < 1e-5


def test_a_token_that_names_the_wrong_weights_is_noticed(models: Any, tmp_path: Path) -> None:
    row = mixed_row(models) | {"weight_versions": [[0, 3, 5], [0, 6, 7]]}
    assert difference([row], tmp_path)[0] > 0.01


def test_a_context_that_is_not_the_true_one_is_noticed(models: Any, tmp_path: Path) -> None:
    row = mixed_row(models) | {"token_ids": [5, 6, 8, 11, 12, 13, 14]}
    assert difference([row], tmp_path)[0] > 1e-4


def test_a_logprob_that_is_not_a_number_is_no_small_difference(models: Any, tmp_path: Path) -> None:
    row = short_row(models) | {"logprobs": [0.0, 0.0, 0.0, float("nan")]}
    assert not difference([row], tmp_path)[0] < 1e-4


def test_a_row_belongs_to_each_of_its_versions() -> None:
    both, one = {"weight_versions": [[2, 0, 1], [3, 1, 2], [2, 2, 3]]}, {"weight_versions": [[3, 0, 4]]}
    assert rows_by_version([both, one]) == {2: [both], 3: [both, one]}
