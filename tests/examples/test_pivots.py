"""Where the comparison of GRPO with forks takes a rollout up again, and what its turns are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from examples.demo.trainer import credit_rollouts
from examples.pivots.compare import reward_at, spent_at
from examples.pivots.trainer import credit_branches, credit_states, credit_sure_turns, find_pivots, make_forks
from reconstruct.records import pack_ids, pack_logprobs
from reconstruct.trajectory import Trajectory
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.batch import Batch

IDS = [1, 7, 8, 7, 9, 7]
"""A prompt and three turns of one token each, with a tool's answer of one token after each."""
TRAINED = [1, 3, 5]


def row(name: str, sure: list[float], reward: float, pivot: int | None = None) -> Trajectory:
    """`sure`: the logprobs of its turns. With a `pivot` a fork, whose own tokens begin there."""
    mask, logprobs = np.zeros(len(IDS), dtype=np.int8), np.zeros(len(IDS))
    for at, logprob in zip(TRAINED, sure, strict=True):
        if pivot is None or at >= pivot:
            mask[at], logprobs[at] = 1, logprob
    fields: dict[str, Any] = {} if pivot is None else {"metadata": {"replay": {"session_id": "o", "pivot": pivot}}}
    calls = tuple(f"{name}-{number}" for number in range(len(TRAINED)))
    given: dict[str, Any] = {
        "token_ids": pack_ids(IDS),
        "loss_mask": mask,
        "logprobs": pack_logprobs(logprobs),
        "call_ids": calls,
    }
    return trajectory(name, reward=reward, weight_versions=(), **given, **fields)


ORIGINS = [row("a", [-0.1, -0.2, -0.9], 1.0), row("b", [-0.1, -0.8, -0.3], 0.0), row("c", [-0.9, -0.1, -0.1], 0.0)]


def test_a_rollout_is_taken_up_where_it_grew_least_certain() -> None:
    """The third was never less certain than in its first turn."""
    batch = Batch(groups(ORIGINS), weight_version=0)
    assert find_pivots(batch) == [(0, "a-2"), (1, "b-1")]
    (group,) = batch.groups
    body = {"task_id": "step-1-0", "num_samples": 3, "instruction": "go"}
    forks = make_forks(batch, {group.group_id: body}, samples=2)
    assert [fork["fork"]["until"] for fork in forks] == ["a-2", "b-1"]
    assert [fork["fork"]["session_id"] for fork in forks] == [ORIGINS[0].session_id, ORIGINS[1].session_id]
    assert {fork["num_samples"] for fork in forks} == {2} and {fork["instruction"] for fork in forks} == {"go"}
    assert len({fork["task_id"] for fork in forks}) == 2


def test_turns_get_the_advantages_of_their_states_and_rollouts_those_of_their_group() -> None:
    """The last turn of the first rollout is compared with its forks, of which half earned 1; all before it with the group's others."""
    forks = [row("f", [0, 0, -0.4], 1.0, 5), row("g", [0, 0, -0.4], 0.0, 5)]
    batch = Batch(groups(ORIGINS, forks), weight_version=0)
    (tree,) = batch.tree(1000, framework="torch", rows=[0])
    first, second, third = credit_states(batch)(tree).tolist()
    assert first == second == pytest.approx(third) and third > 0
    (tree,) = batch.tree(1000, framework="torch", rows=[3, 4])
    assert credit_states(batch)(tree).tolist() == pytest.approx([2 * third, -2 * third])
    (tree,) = batch.tree(1000, framework="torch", rows=[0, 1])
    better, worse = credit_rollouts(batch)(tree).reshape(2, 3).tolist()
    assert len({*better}) == len({*worse}) == 1 and better[0] > 0 > worse[0]


def test_turns_of_which_the_policy_was_sure_count_more() -> None:
    batch = Batch(groups(ORIGINS), weight_version=0)
    (tree,) = batch.tree(1000, framework="torch", rows=[0])
    grpo, weighed = credit_rollouts(batch)(tree).tolist(), credit_sure_turns(batch)(tree).tolist()
    assert weighed[0] > weighed[1] > weighed[2] > 0 and weighed[0] > grpo[0] > weighed[2]


def test_a_branch_that_got_more_than_the_others_of_its_state_counts_more() -> None:
    """All three took the same three turns, so no branch got more than another; then the first went its own way in its last turn."""
    batch = Batch(groups(ORIGINS), weight_version=0)
    (tree,) = batch.tree(1000, framework="torch", rows=[0])
    assert credit_branches(batch)(tree).tolist() == pytest.approx(credit_rollouts(batch)(tree).tolist())
    own_way = replace(ORIGINS[0], token_ids=pack_ids([*IDS[:-1], 6]))
    batch = Batch(groups([own_way, *ORIGINS[1:]]), weight_version=0)
    (tree,) = batch.tree(1000, framework="torch", rows=[0, 1])
    better, worse = (credit_branches(batch)(tree) - credit_rollouts(batch)(tree)).reshape(2, 3).tolist()
    assert better[-1] > 0 > worse[-1]


def test_a_steps_reward_counts_at_the_tokens_spent_before_it() -> None:
    steps = [{"reward": reward, "sampled_tokens": 10} for reward in (0.1, 0.2, 0.3, 0.4)]
    assert spent_at(steps) == [0, 10, 20, 30]
    assert reward_at(steps, 10) == 0.1 and reward_at(steps, 40) == pytest.approx(0.3)
