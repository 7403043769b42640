"""Rows as trees: every shared prefix once, and nothing of the training step changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import flex_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from reconstruct.records import pack_ids, pack_logprobs
from reconstruct.trajectory import RowDetails, Trajectory
from tests.support.sessions.training_rows import groups, spans, trajectory
from trainer_client.advantages import dr_grpo
from trainer_client.batch import Batch
from trainer_client.errors import MixedLogprobModes, RowTooLong
from trainer_client.importance import batch_statistics, masked_weights, row_of_token, truncated_weights
from trainer_client.tree import TreeBatch
from trainer_client.wire import Group

BUDGET = 10_000
TOLERANCE = 1e-10
LLAMA = LlamaConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
)


def row(name: str, ids: list[int], trained: list[int], *, reward: float = 1.0, **changes: Any) -> Trajectory:
    """`trained`: the positions under the mask, each with a logprob and a version that are its own."""
    mask = np.zeros(len(ids), dtype=np.int8)
    mask[trained] = 1
    logprobs = [-0.01 * (at + len(name) + sum(map(ord, name)) % 7) if mask[at] else 0.0 for at in range(len(ids))]
    versions = tuple(span for at in trained for span in spans(at, [at % 3]))
    given = {"token_ids": pack_ids(ids), "loss_mask": mask, "logprobs": pack_logprobs(logprobs), "weight_versions": versions}
    return trajectory(name, reward=reward, **{**given, **changes})


def one(batch: Batch, **options: Any) -> TreeBatch:
    (data,) = batch.tree(BUDGET, **options)
    return data


def pictured() -> Batch:
    """The trees of the module's docstring: b trains 4, a trains 5 and 6.

    7 ─ 8 ─┬─ 9 ─ 4
           └─ 5 ─ 6
    """
    return Batch(groups([row("a", [7, 8, 5, 6], [2, 3], reward=0.0), row("b", [7, 8, 9, 4], [3])]), weight_version=7)


@pytest.mark.case(83)
def test_a_shared_prefix_is_there_once() -> None:
    data = one(pictured())
    assert data.token_ids.tolist() == [7, 8, 5, 6, 9, 4]
    assert data.position_ids.tolist() == [0, 1, 2, 3, 2, 3]
    assert data.subtree_end.tolist() == [6, 6, 4, 4, 6, 6]
    assert data.dense_mask().astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
    assert data.flat_tokens == 8


def test_trained_tokens_know_their_row_their_place_and_what_predicts_them() -> None:
    data = one(pictured(), advantages=pictured().advantages(dr_grpo))
    assert (data.trained_index.tolist(), data.logit_index.tolist()) == ([2, 3, 5], [1, 2, 4])
    assert data.segment_index.tolist() == [0, 0, 1] and data.row_index.tolist() == [0, 1]
    assert data.weight_versions.tolist() == [2, 0, 0] and data.loss_mask.tolist() == [True] * 3
    assert data.advantages.tolist() == [-0.5, 0.5]


def test_a_token_that_two_rows_train_has_an_entry_of_each() -> None:
    """Two rollouts began alike: one token, two advantages, two logprobs of their own."""
    batch = Batch(groups([row("a", [7, 8, 9], [1, 2]), row("bb", [7, 8, 5], [1, 2], reward=0.0)]), weight_version=7)
    data = one(batch)
    assert data.token_ids.tolist() == [7, 8, 5, 9]
    assert data.trained_index.tolist() == [1, 2, 1, 3] and data.row_index.tolist() == [1, 0]
    assert data.inference_logprobs[0] != data.inference_logprobs[2]


def test_a_row_that_ends_within_another_adds_nothing() -> None:
    batch = Batch(groups([row("a", [7, 8, 9, 4], [3]), row("b", [7, 8], [1])]), weight_version=7)
    data = one(batch)
    assert data.token_ids.tolist() == [7, 8, 9, 4] and data.subtree_end.tolist() == [4, 4, 4, 4]
    assert data.trained_index.tolist() == [1, 3] and data.row_index.tolist() == [1, 0]


def test_rows_without_a_common_token_are_trees_of_their_own() -> None:
    data = one(Batch(groups([row("a", [7, 8], [1]), row("b", [3, 8], [1])]), weight_version=7))
    assert data.subtree_end.tolist() == [2, 2, 4, 4] and data.position_ids.tolist() == [0, 1, 0, 1]


def test_a_batch_without_rows_is_no_tree() -> None:
    """A group arrives without rows where none has the wanted roles."""
    empty = Batch([Group("g", ())], weight_version=7)
    assert empty.tree(BUDGET, advantages=empty.advantages(dr_grpo)) == []
    assert pictured().tree(BUDGET, rows=[]) == []


def test_a_budget_counts_shared_tokens_once() -> None:
    """a and b are 5 tokens together, c is 3: two sequences of at most 5."""
    batch = Batch(
        groups([row("a", [1, 2, 3, 4], [3]), row("b", [1, 2, 3, 5], [3]), row("c", [6, 7, 8], [2])]), weight_version=7
    )
    assert [data.row_index.tolist() for data in batch.tree(5)] == [[0, 1], [2]]
    assert [len(data.token_ids) for data in batch.tree(4)] == [4, 4, 3]
    with pytest.raises(RowTooLong):
        batch.tree(3)
    assert [data.cut_tokens.tolist() for data in batch.tree(3, truncate=True)] == [[1, 1], [0]]


def test_nothing_is_shared_that_went_to_other_experts() -> None:
    """Where the routing is replayed, the same ids have other hidden states."""
    experts = np.zeros((3, 2, 1), dtype=np.int16)
    other = experts.copy()
    other[1] = 1
    rows = [
        row(name, [7, 8, last], [2], details=RowDetails(None, None, None, table))
        for name, last, table in (("a", 3, experts), ("b", 4, other), ("c", 5, experts))
    ]
    data = one(Batch(groups(rows), weight_version=7))
    assert data.token_ids.tolist() == [7, 8, 3, 8, 4, 8, 5]
    assert data.routed_experts is not None and data.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_rows_of_different_logprob_modes_are_refused() -> None:
    rows = [row("a", [7, 8], [1], mode="raw"), row("b", [7, 9], [1], mode="processed")]
    with pytest.raises(MixedLogprobModes):
        Batch(groups(rows), weight_version=7).tree(BUDGET)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows that grow out of one another: each goes on from a prefix of an earlier one, or begins anew."""
    rows: list[Trajectory] = []
    for at in range(draw(st.integers(1, 7))):
        ids = draw(st.lists(st.integers(0, 15), min_size=1, max_size=6))
        if bool(rows) and draw(st.booleans()):
            base = draw(st.sampled_from(rows)).token_ids.tolist()
            ids = base[: draw(st.integers(1, len(base)))] + ids
        trained = sorted(draw(st.sets(st.integers(1, len(ids) - 1)))) if len(ids) > 1 else []
        rows.append(row(f"r{at}", ids, trained, reward=float(draw(st.integers(0, 3)))))
    split = draw(st.integers(0, len(rows) - 1))
    return Batch(groups(*[part for part in (rows[:split], rows[split:]) if part]), weight_version=7)


def paths(data: TreeBatch) -> list[NDArray[np.int64]]:
    """Per token, the indexes of all it attends to: its ancestors and itself."""
    return [np.flatnonzero(line) for line in data.dense_mask()]


@given(batches(), st.integers(0, 12))
def test_every_trained_token_stands_behind_the_ids_of_its_row(batch: Batch, room: int) -> None:
    budget = max(len(each.token_ids) for each in batch.rows) + room
    found: list[tuple[int, int, float, int]] = []
    for data in batch.tree(budget):
        assert len(data.token_ids) <= budget
        behind = paths(data)
        for at, before, segment, logprob, version in zip(
            data.trained_index, data.logit_index, data.segment_index, data.inference_logprobs, data.weight_versions, strict=True
        ):
            index = int(data.row_index[segment])
            place = int(data.position_ids[at])
            assert data.token_ids[behind[at]].tolist() == batch.rows[index].token_ids[: place + 1].tolist()
            assert data.position_ids[behind[at]].tolist() == list(range(place + 1)) and behind[at][-2] == before
            found.append((index, place, float(logprob), int(version)))
    flat = batch.padded()
    wanted = [
        (index, place, float(flat.inference_logprobs[index, place]), int(flat.weight_versions[index, place]))
        for index, place in np.argwhere(flat.loss_mask).tolist()
    ]
    assert sorted(found) == sorted(wanted)


@pytest.mark.case(83)
@given(batches())
def test_no_prefix_is_there_twice(batch: Batch) -> None:
    data = one(batch)
    prefixes = {tuple(each.token_ids[:end].tolist()) for each in batch.rows for end in range(1, len(each.token_ids) + 1)}
    assert len(data.token_ids) == len(prefixes) and data.flat_tokens == sum(len(each.token_ids) for each in batch.rows)


@given(batches(), st.sampled_from([1, 2, 3, 8]))
def test_the_blocks_are_those_of_the_dense_mask(batch: Batch, size: int) -> None:
    data = one(batch)
    blocks = data.block_mask(block_size=size)
    count = -(-len(data.token_ids) // size)
    dense = np.zeros((count * size, count * size), dtype=bool)
    dense[: len(data.token_ids), : len(data.token_ids)] = data.dense_mask()
    attended = dense.reshape(count, size, count, size).any(axis=(1, 3))
    assert (blocks.to_dense()[0, 0].numpy().astype(bool) == attended).all()
    index, zero = torch.arange(len(data.token_ids)), torch.tensor(0)
    assert blocks.mask_mod(zero, zero, index[:, None], index[None, :]).tolist() == data.dense_mask().tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_attends_as_the_dense_mask_says() -> None:
    data = one(pictured(), framework="torch")
    query, key, value = torch.randn(
        3, 1, 2, len(data.token_ids), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=data.dense_mask())
    assert torch.allclose(flex_attention(query, key, value, block_mask=data.block_mask(block_size=2)), dense, atol=1e-12)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """In float64 throughout: transformers' own norms, and its eager attention, go through float32."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LLAMA)
    model.set_attn_implementation("sdpa")
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):
                setattr(module, name, torch.nn.RMSNorm(LLAMA.hidden_size, eps=child.variance_epsilon))
    return model.double()


def objective(logprobs: Any, data: Any, rows: Any) -> Any:
    """PPO's clipped objective under weights of the row, which no two tokens share: what lands on another token shows."""
    ratio = torch.exp(logprobs - data.inference_logprobs.double())
    advantage = data.advantages.double()[rows]
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(clipped * data.row_weight.double()[rows] * (1 + data.weight_versions.double())).sum()


def gradients(model: LlamaForCausalLM, loss: Any) -> list[Any]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.case(82)
@settings(max_examples=25, deadline=None)
@given(batch=batches(), seed=st.integers(0, 9), room=st.integers(0, 12))
def test_loss_and_every_gradient_are_those_of_flat_rows(model: LlamaForCausalLM, batch: Batch, seed: int, room: int) -> None:
    advantages = np.random.default_rng(seed).normal(size=len(batch.rows)).astype(np.float32)
    flat = batch.padded(framework="torch", advantages=advantages)
    table = torch.log_softmax(model(flat.token_ids, attention_mask=flat.attention_mask).logits[:, :-1], dim=-1)
    chosen = table.gather(2, flat.token_ids[:, 1:, None])[..., 0]
    mask = flat.loss_mask[:, 1:]

    class Flat:
        inference_logprobs = flat.inference_logprobs[:, 1:][mask]
        weight_versions = flat.weight_versions[:, 1:][mask]
        advantages, row_weight = flat.advantages, flat.row_weight

    wanted = objective(chosen[mask], Flat, mask.nonzero()[:, 0])
    budget = max(len(each.token_ids) for each in batch.rows) + room
    total = sum(
        objective(data.trained_logprobs(outputs.logits), data, data.segment_index)
        for data in batch.tree(budget, framework="torch", advantages=advantages)
        for outputs in [
            model(data.token_ids[None], attention_mask=data.attention_mask(torch.float64), position_ids=data.position_ids[None])
        ]
    )
    assert abs((total - wanted).item()) <= TOLERANCE
    if not any(each.loss_mask.any() for each in batch.rows):
        return
    for ours, theirs in zip(gradients(model, total), gradients(model, wanted), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.case(82)
@given(batches(), st.integers(0, 9), st.sampled_from(["token", "row", "row_mean"]), st.integers(0, 12))
def test_corrections_and_weights_lie_on_the_tokens_that_they_are_of(batch: Batch, seed: int, level: Any, room: int) -> None:
    """Every trained token has a ratio of its own, and every row an advantage: a weight on another token, or of another row, shows."""
    numbers = np.random.default_rng(seed)
    advantages = numbers.normal(size=len(batch.rows)).astype(np.float32)
    flat = batch.padded(advantages=advantages)
    ours = np.where(flat.loss_mask, flat.inference_logprobs + numbers.normal(size=flat.loss_mask.shape), 0)

    def weigh(data: Any, trainer_logprobs: Any) -> Any:
        given: tuple[Any, ...] = (trainer_logprobs, data.inference_logprobs, data.loss_mask)
        rows = row_of_token(data)
        weights = truncated_weights(*given, cap=1.5, level=level, rows=rows).weights
        kept = masked_weights(*given, low=0.5, high=2.0, level=level, rows=rows).kept
        return np.stack([weights, kept, data.advantages[rows], data.row_weight[rows], data.weight_versions])

    wanted = weigh(flat, ours)
    seen = np.zeros(flat.loss_mask.shape, dtype=int)
    for data in batch.tree(max(len(each.token_ids) for each in batch.rows) + room, advantages=advantages):
        rows, places = data.row_index[data.segment_index], data.position_ids[data.trained_index]
        np.testing.assert_allclose(weigh(data, ours[rows, places]), wanted[:, rows, places], rtol=1e-5)
        np.add.at(seen, (rows, places), 1)
    assert (seen == flat.loss_mask).all()


def test_statistics_and_corrections_take_trees_as_they_take_rows() -> None:
    batch = pictured()
    data, flat = one(batch), batch.packed(BUDGET)[0]
    ours = np.asarray(data.inference_logprobs) + 0.3
    theirs = np.where(flat.loss_mask, flat.inference_logprobs + np.float32(0.3), 0)
    assert batch_statistics(batch, data, ours) == pytest.approx(batch_statistics(batch, flat, theirs))
    weights = truncated_weights(ours, data.inference_logprobs, data.loss_mask, cap=1.1)
    assert weights.weights == pytest.approx(np.full(3, 1.1))
