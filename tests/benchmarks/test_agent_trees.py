"""The benchmark of tree batches on recorded sessions: what it counts, on shapes small enough to count by hand."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.agent_sessions import describe_rows
from benchmarks.agent_trees import COUNTED, MEASURED_LENGTH, Sizes, count, measure, tables
from benchmarks.trees import make_group, make_model, measure_agent, read_shapes, shrink, split_calls

SHAPES = [{"shared": 0, "runs": [4, 2, 1, 1]}, {"shared": 3, "runs": [5, 2]}]
"""4 given, 2 sampled, 1 given, 1 sampled; and a branch of 5 given, of which 3 are the first row's, and 2 sampled."""


def test_shapes_are_read_off_rows() -> None:
    rows = [
        {"token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "loss_mask": [0, 0, 0, 0, 1, 1, 0, 1]},
        {"token_ids": [1, 2, 3, 9, 9, 7, 8], "loss_mask": [0, 0, 0, 0, 0, 1, 1]},
    ]
    assert list(describe_rows(rows)) == SHAPES
    assert list(describe_rows([{"token_ids": [1], "loss_mask": [1]}])) == [{"shared": 0, "runs": [0, 1]}]


def test_the_rows_of_a_group_have_the_recorded_shapes() -> None:
    group = make_group(SHAPES)
    assert (
        list(
            describe_rows(
                [{"token_ids": row.token_ids.tolist(), "loss_mask": row.loss_mask.tolist()} for row in group.rows[:2]]
            )
        )
        == SHAPES
    )
    assert [row.token_ids[:4].tolist() for row in group.rows[::2]] == [group.rows[0].token_ids[:4].tolist()] * 4
    calls = split_calls(group)
    assert [len(row.token_ids) for row in calls.rows] == [6, 8, 7] * 4
    assert sum(int(row.loss_mask.sum()) for row in calls.rows) == sum(int(row.loss_mask.sum()) for row in group.rows) == 20


def test_tokens_and_operations_are_counted_by_way() -> None:
    """Four rollouts. Of each, 15 tokens in merged rows and 21 in rows per call. As trees they share the first 4 ids, and the branches 3 of
    these: 4 + 4 * (4 + 4). With prompts once, the first row's 4 and the second's first 5 count on their own: the latter differ."""
    found = count(SHAPES)
    tokens = {way: found[way]["tokens"] for way in COUNTED}
    assert tokens["per call"] == 4 * 21 and tokens["padded"] == 12 * 8 and tokens["merged"] == 4 * 15
    assert tokens["trees"] == 4 + 4 * 8 and tokens["prompts once"] == 4 * 15 - 3 * 4
    # A trie that forks a token early repeats one per further branch: at the end of the prompt three, at 3 shared ids another four.
    assert tokens["trees"] < tokens["TRL's trees"] <= tokens["trees"] + 7
    pairs = 4 * (8 * 9 + 7 * 8) // 2
    assert found["merged"]["operations"] == Sizes().count_operations(60, pairs, 20)
    assert Sizes(layers=1, hidden=2, kv=1, inner=3, vocabulary=5).count_operations(1, 0, 0) == 3 * 2 * (2 * 4 + 2 * 2 + 3 * 6)


def test_every_way_has_the_same_loss_and_is_measured() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        model = make_model("cpu", torch.float32)
        assert set(measure(SHAPES, model, 1)) == {"per call", "merged", "trees"}
    finally:
        torch.set_num_threads(threads)


def test_every_way_has_the_same_gradient() -> None:
    model = make_model("cpu", torch.float64)
    found = measure_agent(model, SHAPES, ["per call", "merged", "trees"], 1)
    assert found["tokens"] == {"per call": 4 * 21, "merged": 4 * 15, "trees": 4 + 4 * 8}
    # Losses are of logprobs in float32.
    assert found["per call"]["gradient_apart"] < 1e-6 and found["trees"]["gradient_apart"] < 1e-6
    np.testing.assert_allclose([found[way]["loss"] for way in ("per call", "trees")], found["merged"]["loss"], rtol=1e-6)


def test_recorded_sessions_fit_the_measured_length() -> None:
    shapes = read_shapes()
    assert len(shapes) >= 8
    for rows in shapes.values():
        small = shrink(rows, MEASURED_LENGTH)
        assert max(sum(row["runs"]) for row in small) <= MEASURED_LENGTH + max(len(row["runs"]) for row in rows)
        assert all(np.all(np.array(row["runs"][1:]) > 0) for row in small)
        make_group(small)


def test_a_table_has_a_row_for_each_agent() -> None:
    ways = {way: {"tokens": 10, "operations": 2e12} for way in COUNTED} | {"trees": {"tokens": 5, "operations": 1e12}}
    found = {
        "first_prompt": 1234,
        "calls": 12,
        "rows": 4,
        "ways": ways,
        "seconds": {"per call": 4.0, "merged": 3.0, "trees": 2.0},
    }
    tokens, operations, seconds = tables({"siblings": 4, "agents": {"pi 1": found}})
    assert tokens.rows == (("pi 1", "1,234", "12", "4", *["10"] * 5, "5", "2x", "2x"),)
    assert operations.rows == (("pi 1", *["2"] * 5, "1", "2x", "2x"),)
    assert seconds.rows == (("pi 1", "4", "3", "2", "2x", "1.5x"),)
