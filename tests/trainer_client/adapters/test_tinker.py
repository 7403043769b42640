"""Leased rows as tinker's data. Beside the real package they are tested in tests/joins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.adapters.tinker import datums
from trainer_client.batch import Batch

TINKER = SimpleNamespace(
    Datum=lambda **fields: SimpleNamespace(**fields),
    ModelInput=SimpleNamespace(from_ints=list),
    TensorData=SimpleNamespace(from_numpy=lambda array: array),
)
"""What of it is called."""


def lists(datum: Any) -> dict[str, list[float]]:
    return {name: array.tolist() for name, array in datum.loss_fn_inputs.items()}


def test_a_datum_is_its_row_shifted_by_one_and_a_row_that_trains_nothing_is_none() -> None:
    """1 2 -> 101 102 of a row with the advantage 0.5, and a row of context alone."""
    context = trajectory("t2", versions=(), loss_mask=np.zeros(2, np.int8))
    (datum,) = datums(Batch(groups([trajectory(), context]), 5), TINKER, [0.5, 9.0])
    assert datum.model_input == [1, 2, 101]
    assert lists(datum) == {
        "target_tokens": [2, 101, 102],
        "logprobs": [0.0, -0.5, -1.0],
        "advantages": [0.0, 0.5, 0.5],
        "mask": [0.0, 1.0, 1.0],
    }
    assert [array.dtype for array in datum.loss_fn_inputs.values()] == [np.int64, np.float32, np.float32, np.float32]


def test_a_token_that_no_input_precedes_is_refused() -> None:
    with pytest.raises(ValueError, match="t1 begins with a sampled token"):
        datums(Batch(groups([trajectory(prompt=())]), 5), TINKER, [1.0])
