"""OpenRLHF's Experience, made from leased rows and put through its own batching."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.support.sessions.adapter_batches import batch_of, batches, expected, few, read, two_turns, without_versions
from tests.support.sessions.training_rows import trajectory
from trainer_client.adapters.openrlhf import agent_output, experiences
from trainer_client.adapters.split_rows import split_rows
from trainer_client.advantages import dr_grpo, grpo
from trainer_client.batch import Batch

if os.environ.get("CI") != "true":
    pytest.importorskip("openrlhf", reason="openrlhf is not installed: see tests/peers.txt")
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)


def test_an_experience_says_which_tokens_were_actions() -> None:
    """Prompt 1 2, sampled 101 102, tool 7 8, sampled 103, glue 9; the entry before a token belongs to it."""
    (made,) = experiences(batch_of([two_turns(reward=2.0)]), Experience)
    assert made.sequences.tolist() == [[1, 2, 101, 102, 7, 8, 103, 9]] and made.attention_mask.tolist() == [[1] * 8]
    assert made.action_mask.tolist() == [[0, 1, 1, 0, 0, 1, 0]]
    assert made.rollout_log_probs.tolist() == [[0, -0.5, -1.0, 0, 0, -1.5, 0]]
    assert (made.rewards.tolist(), made.response_length.tolist(), made.total_length.tolist()) == ([2.0], [5], [8.0])
    assert (made.info["staleness"].tolist(), made.prompts, made.advantages) == ([4], ["task-1"], None)


@few
@given(batch=batches())
def test_the_rows_can_be_read_back_from_a_batch_that_openrlhf_made_and_split_again(batch: Batch) -> None:
    values = batch.advantages(grpo)
    made = experiences(batch, Experience, advantages=values)
    whole = make_experience_batch([item for one in made for item in split_experience_batch(one)])
    assert int(whole.action_mask.sum()) == sum(int(row.loss_mask.sum()) for row in batch.rows)
    for at, item in enumerate(remove_padding_in_sequences(split_experience_batch(whole))):
        length = int(batch.rows[at].token_ids.size)
        mask, logprobs = item.action_mask[: length - 1].tolist(), item.rollout_log_probs[: length - 1].tolist()
        said = read(item.sequences[:length].tolist(), [0, *mask], [0.0, *logprobs])
        assert said == without_versions(expected(batch.rows[at]))
        assert item.advantages[: length - 1].tolist() == [float(values[at]) if on else 0.0 for on in mask]
        np.testing.assert_array_equal(item.rewards, values[at])


def test_advantages_take_the_place_of_the_reward_and_the_score_stays() -> None:
    batch = batch_of([trajectory("a", reward=3.0), trajectory("b", reward=1.0)])
    made = experiences(batch, Experience, advantages=batch.advantages(dr_grpo))
    assert [(one.rewards.item(), one.scores.item()) for one in made] == [(1.0, 3.0), (-1.0, 1.0)]


def test_a_row_is_cut_at_its_end_on_request() -> None:
    (made,) = experiences(batch_of([two_turns()]), Experience, max_length=5, truncate=True)
    assert made.sequences.tolist() == [[1, 2, 101, 102, 7]] and made.truncated.tolist() == [True]
    assert made.action_mask.shape == made.rollout_log_probs.shape == (1, 4)


@few
@given(batch=batches())
def test_an_agents_output_names_the_sampled_stretches(batch: Batch) -> None:
    for split in split_rows(batch):
        output: dict[str, Any] = agent_output(split)
        mask = np.zeros(len(output["observation_tokens"]), dtype=int)
        for start, end in output["action_ranges"]:
            mask[start:end] = 1
        assert read(output["observation_tokens"], mask.tolist(), output["rollout_log_probs"]) == without_versions(
            expected(split.row)
        )
        assert output["reward"] == split.row.reward
