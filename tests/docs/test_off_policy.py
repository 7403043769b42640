"""The snippets of docs/trainers.md on off-policy data run as they stand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests import ROOT
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.advantages import grpo
from trainer_client.batch import Batch
from trainer_client.importance import batch_statistics

PAGE = (ROOT / "docs" / "trainers.md").read_text().partition("\n## Off-policy data\n")[2].partition("\n## ")[0]


def test_the_snippets_run() -> None:
    rows = [trajectory("a", reward=1.0), trajectory("b", reward=0.0)]
    batch = Batch(groups(rows), weight_version=5)
    names: dict[str, Any] = {"batch": batch, "grpo": grpo, "trainer_logprobs": batch.padded().inference_logprobs}
    for snippet in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(snippet, names)
    assert names["statistics"]["importance/tokens"] == 4
    for weights in (names["cut"], names["dropped"], names["by_row"]):
        np.testing.assert_array_equal(weights.weights, names["data"].loss_mask)


def test_every_statistic_is_explained() -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", PAGE.partition("| statistic | |")[2].partition("\n\n")[0]))
    rows = [trajectory("a")]
    batch = Batch(groups(rows), weight_version=5)
    found = batch_statistics(batch, batch.padded(), batch.padded().inference_logprobs, prefix="")
    assert {name for name in found if "/" not in name} <= named
