"""slime, miles, prime-rl, NeMo RL and SkyRL, whose packages cannot be installed here: against the recorded fields of their
classes. What SkyRL does with the lists is run."""

from __future__ import annotations

import os
from collections import UserDict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given

from reconstruct.trajectory import Trajectory
from tests.support.sessions.adapter_batches import (
    batch_of,
    batches,
    expected,
    few,
    read,
    taught,
    taught_batch,
    two_turns,
    without_versions,
)
from tests.support.sessions.trainer_libraries import checked, recorded, recorded_annotations
from tests.support.sessions.training_rows import trajectory
from trainer_client.adapters.microbatches import Packed, Padded, Rows
from trainer_client.adapters.nemo_rl import message_logs, rollout_batch, train_data
from trainer_client.adapters.prime_rl import training_samples
from trainer_client.adapters.skyrl import generator_output
from trainer_client.adapters.slime import post_process_rewards, samples
from trainer_client.adapters.split_rows import split_rows
from trainer_client.adapters.teachers import best_and_own
from trainer_client.advantages import dr_grpo, grpo
from trainer_client.batch import Batch
from trainer_client.errors import MixedLogprobModes, RowTooLong

SAMPLES = pytest.mark.parametrize("library", ["slime", "miles"])
UNTRAINED: dict[str, Any] = {"prompt": (1, 2, 3), "versions": ()}


def flat(nested: Any) -> list[Any]:
    return [item for part in nested for item in flat(part)] if isinstance(nested, list) else [nested]


def trained_tokens(batch: Batch) -> int:
    return sum(int(row.loss_mask.sum()) for row in batch.rows)


# The split itself


def test_the_response_begins_at_the_first_sampled_token_and_holds_the_tools_too() -> None:
    (row,) = split_rows(batch_of([two_turns()]))
    assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == ([1, 2], [101, 102, 7, 8, 103, 9])
    assert row.loss_mask.tolist() == [1, 1, 0, 0, 1, 0] and row.versions.tolist() == [5, 5, -1, -1, 6, -1]


def test_rows_whose_logprobs_are_of_different_modes_are_handed_to_no_trainer() -> None:
    """Its importance ratios would be taken against two different distributions."""
    batch = batch_of([two_turns(mode, mode=mode) for mode in ("raw", "masked")])
    with pytest.raises(MixedLogprobModes, match="VERBATIM_TRAIN_LOGPROB_MODES"):
        split_rows(batch)
    with pytest.raises(MixedLogprobModes):
        training_samples(batch, recorded("prime_rl.TrainingSample"), [0.0, 0.0], env_name="e")
    for cut in (Rows(), Padded(1), Packed(64)):
        with pytest.raises(MixedLogprobModes):
            cut(batch, None)


def test_a_row_that_trains_nothing_is_kept_with_an_untrained_response() -> None:
    (row,) = split_rows(batch_of([trajectory(**UNTRAINED)]))
    assert (row.prompt_ids.tolist(), row.response_ids.tolist(), row.loss_mask.tolist()) == ([1, 2], [3], [0])


def test_a_row_is_cut_at_its_end_and_only_on_request() -> None:
    batch = batch_of([two_turns()])
    with pytest.raises(RowTooLong, match="8 tokens, the limit is 5"):
        split_rows(batch, max_length=5)
    (row,) = split_rows(batch, max_length=5, truncate=True)
    assert row.response_ids.tolist() == [101, 102, 7] and row.cut_tokens == 1 and row.truncated


def test_a_row_of_one_token_has_no_prompt_and_response() -> None:
    with pytest.raises(ValueError, match="'t1' has 1 tokens"):
        split_rows(batch_of([trajectory(prompt=(1,), versions=())]))


# slime and miles


@SAMPLES
def test_a_sample_holds_the_row_with_its_mask_from_the_first_sampled_token_on(library: str) -> None:
    (((sample,),),) = samples(batch_of([two_turns(reward=2.0)]), recorded(f"{library}.Sample"))
    assert sample.tokens == [1, 2, 101, 102, 7, 8, 103, 9] and sample.response_length == 6
    assert sample.loss_mask == [1, 1, 0, 0, 1, 0]
    assert sample.rollout_log_probs == [-0.5, -1.0, 0, 0, -1.5, 0]
    assert (sample.weight_versions, sample.reward) == (["5", "6"], 2.0)
    assert (sample.metadata["weight_spans"], sample.metadata["staleness"]) == ([[5, 2, 4], [6, 6, 7]], 4)
    assert sample.status is type(sample).Status.COMPLETED


@SAMPLES
@few
@given(batch=batches())
def test_every_trained_token_is_in_one_sample_with_its_logprob(library: str, batch: Batch) -> None:
    made = flat(samples(batch, recorded(f"{library}.Sample")))
    assert sum(sum(sample.loss_mask) for sample in made) == trained_tokens(batch)
    for sample in made:
        row, start = batch.rows[sample.index], len(sample.tokens) - sample.response_length
        assert sample.metadata["trajectory_id"] == row.trajectory_id
        spans = [(span.version, span.start, span.end) for span in row.weight_versions]
        assert [tuple(span) for span in sample.metadata["weight_spans"]] == spans
        assert read(
            sample.tokens, [0] * start + sample.loss_mask, [0.0] * start + sample.rollout_log_probs
        ) == without_versions(expected(row))


@SAMPLES
@few
@given(batch=batches())
def test_rows_of_a_rollout_share_its_id_and_stand_in_one_list(library: str, batch: Batch) -> None:
    made = samples(batch, recorded(f"{library}.Sample"))
    assert len(made) == len(batch.groups)
    rollouts = [rollout for group in made for rollout in group]
    ids = [{sample.rollout_id for sample in rollout} for rollout in rollouts]
    assert all(len(found) == 1 for found in ids) and len(set().union(*ids)) == len(rollouts)
    assert len(rollouts) == len(set(batch.rollout_ids))


@SAMPLES
@few
@given(batch=batches())
def test_the_reward_hook_counts_a_rollout_once(library: str, batch: Batch) -> None:
    made = flat(samples(batch, recorded(f"{library}.Sample")))
    for with_deviation, estimator in [(True, grpo), (False, dr_grpo)]:
        args = SimpleNamespace(grpo_std_normalization=with_deviation, reward_key=None)
        raw, advantages = post_process_rewards(args, list(reversed(made)))
        wanted = batch.advantages(estimator)
        assert raw == [float(batch.columns.rewards[sample.index]) for sample in reversed(made)]
        assert advantages == [float(wanted[sample.index]) for sample in reversed(made)]


@SAMPLES
def test_advantages_take_the_place_of_the_reward(library: str) -> None:
    batch = batch_of([trajectory("a", reward=3.0), trajectory("b", reward=1.0)])
    made = flat(samples(batch, recorded(f"{library}.Sample"), advantages=batch.advantages(dr_grpo)))
    assert [(sample.reward, sample.metadata["raw_reward"]) for sample in made] == [(1.0, 3.0), (-1.0, 1.0)]


@SAMPLES
def test_a_cut_row_is_a_truncated_sample(library: str) -> None:
    ((made,),) = samples(batch_of([two_turns()]), recorded(f"{library}.Sample"), max_length=5, truncate=True)
    assert (made[0].tokens, made[0].status.name) == ([1, 2, 101, 102, 7], "TRUNCATED")
    assert made[0].metadata["cut_tokens"] == 1


# prime-rl


def test_a_training_sample_is_the_row_with_its_advantage_at_the_sampled_tokens() -> None:
    batch = batch_of([two_turns("a", reward=3.0), trajectory("b", reward=1.0)])
    sample = training_samples(
        batch, recorded("prime_rl.TrainingSample"), batch.advantages(dr_grpo), env_name="swe", temperature=0.7
    )[0]
    assert sample.token_ids == [1, 2, 101, 102, 7, 8, 103, 9]
    assert sample.mask == [False, False, True, True, False, False, True, False]
    assert sample.advantages == [0, 0, 1, 1, 0, 0, 1, 0] and sample.temperatures == [0.7] * 8


@few
@given(batch=batches())
def test_every_trained_token_is_in_one_training_sample(batch: Batch) -> None:
    advantages = batch.advantages(grpo)
    made = training_samples(batch, recorded("prime_rl.TrainingSample"), advantages, env_name="swe")
    trained = [(row, value) for row, value in zip(batch.rows, advantages, strict=True) if row.loss_mask.any()]
    assert len(made) == len(trained)
    for sample, (row, value) in zip(made, trained, strict=True):
        assert read(sample.token_ids, sample.mask, sample.logprobs) == without_versions(expected(row))
        assert sample.advantages == [float(value) if on else 0.0 for on in sample.mask]


def test_a_training_sample_survives_the_wire_of_prime_rl() -> None:
    # The real class is a msgspec struct that travels as an array: the order of the fields counts.
    fields = {name: kind for name, kind in recorded_annotations("prime_rl.TrainingSample").items() if "Tensor" not in kind}
    plain = [(name, Any if "Experts" in kind else eval(kind), None) for name, kind in fields.items()]
    struct: Any = msgspec.defstruct("TrainingSample", plain, array_like=True, omit_defaults=True)
    batch = batch_of([two_turns()])
    (sample,) = training_samples(batch, struct, [0.5], env_name="swe")
    back: Any = msgspec.msgpack.Decoder(list[struct]).decode(msgspec.msgpack.encode([sample]))[0]
    assert back == sample and back.logprobs == [0, 0, -0.5, -1.0, 0, 0, -1.5, 0]


# A teacher's scores


def teacher_at(row: Trajectory) -> list[float]:
    return [float(row.scores["teacher"].logprobs[at]) if row.loss_mask[at] else 0.0 for at in range(len(row.token_ids))]


@SAMPLES
@few
@given(batch=batches().map(taught_batch))
def test_a_sample_has_the_teachers_logprobs_of_its_response(library: str, batch: Batch) -> None:
    for sample in flat(samples(batch, recorded(f"{library}.Sample"), teacher="teacher")):
        assert sample.teacher_log_probs == teacher_at(batch.rows[sample.index])[-sample.response_length :]
    assert all(sample.teacher_log_probs is None for sample in flat(samples(batch, recorded(f"{library}.Sample"))))


@few
@given(batch=batches().map(taught_batch))
def test_a_training_sample_has_the_teachers_logprobs_at_the_tokens_themselves(batch: Batch) -> None:
    values = batch.advantages(grpo)
    kind = recorded("prime_rl.TrainingSample")
    made = training_samples(batch, kind, values, env_name="swe", teacher="teacher", ref_kl_weight=0.5)
    trained = [row for row in batch.rows if row.loss_mask.any()]
    for sample, row in zip(made, trained, strict=True):
        assert sample.ref_logprobs == teacher_at(row)
        assert sample.ref_kl_weights == (row.loss_mask * 0.5).tolist()


def test_a_trained_token_without_a_score_reaches_no_trainer() -> None:
    """Whatever stood there would be trained on."""
    row = taught(two_turns())
    lacking = row.scores["teacher"].logprobs.copy()
    lacking[6] = np.nan
    holed = replace(row, scores={"teacher": replace(row.scores["teacher"], logprobs=lacking, error="c2 is not scored")})
    for given_row, why in (
        (holed, "1 trained tokens .* token 6 .c2 is not scored"),
        (two_turns(), "there is no score 'teacher'"),
    ):
        batch = batch_of([given_row])
        with pytest.raises(ValueError, match=why):
            samples(batch, recorded("slime.Sample"), teacher="teacher")
        with pytest.raises(ValueError, match=why):
            training_samples(batch, recorded("prime_rl.TrainingSample"), [0.0], env_name="e", teacher="teacher")
    (sample,) = flat(samples(batch_of([holed]), recorded("slime.Sample"), max_length=6, truncate=True, teacher="teacher"))
    assert len(sample.teacher_log_probs) == 4, "what is left is scored"


def test_the_best_ids_of_a_token_have_the_token_itself_after_them_where_it_is_none_of_them() -> None:
    row = taught(two_turns())
    ids, logprobs = best_and_own(row, "teacher", 8, 2)
    own = row.scores["teacher"].logprobs
    assert ids.tolist() == [
        [-1, -1, -1],
        [-1, -1, -1],
        [101, 8003, -1],
        [7003, 8004, 102],
        [-1, -1, -1],
        [-1, -1, -1],
        [103, 8007, -1],
        [-1, -1, -1],
    ]
    assert logprobs[2].tolist() == [own[2], -10.0, -np.inf] and logprobs[3].tolist() == [-0.125, -10.0, own[3]]
    assert np.isneginf(logprobs[[0, 1, 4, 5, 7]]).all()
    wider, _ = best_and_own(row, "teacher", 8, 4)
    assert wider[3].tolist() == [7003, 8004, 102, -1, -1]


# NeMo RL


def test_a_message_log_has_one_message_per_sampled_stretch_and_one_between() -> None:
    (log,) = message_logs(batch_of([two_turns()]))
    assert [(message["role"], message["token_ids"].tolist()) for message in log] == [
        ("user", [1, 2]), ("assistant", [101, 102]), ("user", [7, 8]), ("assistant", [103]), ("user", [9]),
    ]  # fmt: skip
    assert ["generation_logprobs" in message for message in log] == [False, True, False, True, False]


@few
@given(batch=batches())
def test_message_logs_laid_end_to_end_are_the_rows(batch: Batch) -> None:
    made = rollout_batch(batch, UserDict)
    for log, row, length in zip(made["message_log"], batch.rows, made["length"].tolist(), strict=True):
        said = [
            (int(token_id), float(message["generation_logprobs"][at]) if message["role"] == "assistant" else None)
            for message in log
            for at, token_id in enumerate(message["token_ids"])
        ]
        assert said == without_versions(expected(row)) and len(said) == length
    assert made["total_reward"].tolist() == batch.columns.rewards.tolist()
    assert made["loss_multiplier"].tolist() == [float(row.loss_mask.any()) for row in batch.rows]
    assert made["group"].squeeze(1).tolist() == batch.columns.group_index.tolist()


@few
@given(batch=batches())
def test_the_data_of_a_step_trains_every_sampled_token_with_its_rows_advantage(batch: Batch) -> None:
    advantages = batch.advantages(grpo)
    made = train_data(batch, UserDict, pad_id=0, advantages=advantages, multiple_of=4)
    wanted = {name for name, kind in recorded_annotations("nemo_rl.ClippedPGLossDataDict").items() if kind == "torch.Tensor"}
    assert set(made) == wanted - {"prev_logprobs", "reference_policy_logprobs"} | {"input_lengths"}
    assert made["input_ids"].shape[1] % 4 == 0 and int(made["token_mask"].sum()) == trained_tokens(batch)
    for at, row in enumerate(batch.rows):
        length = int(made["input_lengths"][at])
        ids, mask, logprobs = (made[name][at] for name in ("input_ids", "token_mask", "generation_logprobs"))
        assert read(ids[:length], mask[:length], logprobs[:length]) == without_versions(expected(row))
        assert not mask[length:].any() and length == len(row.token_ids)
        assert made["advantages"][at].tolist() == [float(advantages[at]) if on else 0.0 for on in mask]


# SkyRL


def test_a_generator_output_has_all_keys_with_values_of_their_types() -> None:
    output = generator_output(batch_of([two_turns()]), recorded("skyrl.TrajectoryID"))
    checked("skyrl.GeneratorOutput", output)
    assert (output["prompt_token_ids"], output["response_ids"]) == ([[1, 2]], [[101, 102, 7, 8, 103, 9]])
    assert output["rollout_metrics"]["verbatim/staleness_max"] == 4


@few
@given(batch=batches())
def test_rows_of_a_rollout_stand_together_and_end_with_the_last_step(batch: Batch) -> None:
    output = checked("skyrl.GeneratorOutput", generator_output(batch, recorded("skyrl.TrajectoryID")))
    seen = [(name.instance_id, name.repetition_id) for name in output["trajectory_ids"]]
    changes = [at + 1 == len(seen) or seen[at + 1] != seen[at] for at in range(len(seen))]
    assert output["is_last_step"] == changes and sum(changes) == len(set(batch.rollout_ids)) == len(set(seen))


def test_rows_of_two_rollouts_that_lie_mixed_are_put_together() -> None:
    rows = [trajectory(name, session=name[0], versions=(1,) * size) for name, size in [("a1", 1), ("b1", 2), ("a2", 3)]]
    output = generator_output(batch_of(rows), recorded("skyrl.TrajectoryID"))
    assert [len(ids) for ids in output["response_ids"]] == [1, 3, 2] and output["is_last_step"] == [False, True, True]


def test_skyrl_is_not_given_two_rewards_for_one_rollout() -> None:
    rows = [trajectory("a", session="s", reward=1.0), trajectory("b", session="s", reward=0.0)]
    with pytest.raises(ValueError, match="rollout 's' has rows with rewards"):
        generator_output(batch_of(rows), recorded("skyrl.TrajectoryID"))


@few
@given(batch=batches())
def test_skyrl_makes_tensors_with_every_trained_token_of_a_batch(batch: Batch) -> None:
    if os.environ.get("CI") != "true":
        pytest.importorskip("skyrl", reason="skyrl is not installed: see tests/peers.txt")
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    output = generator_output(batch, recorded("skyrl.TrajectoryID"))
    last = [[0.0] * (len(ids) - 1) + [reward] for ids, reward in zip(output["response_ids"], output["rewards"], strict=True)]
    ids, attention, response, rewards, mask, logprobs, _ = convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0),
        output["prompt_token_ids"],
        output["response_ids"],
        last,
        output["loss_masks"],
        output["rollout_logprobs"],
    )
    assert int(mask.sum()) == trained_tokens(batch)
    np.testing.assert_array_equal(rewards.sum(dim=1), output["rewards"])
    width = mask.shape[1]
    for at, row in enumerate(batch.rows):
        there = attention[at].bool()
        said = read(ids[at, -width:][response[at].bool()], mask[at][response[at].bool()], logprobs[at][response[at].bool()])
        assert ids[at][there].tolist() == row.token_ids.tolist()
        assert said == without_versions(expected(row))[-len(said) :]


# All


@pytest.mark.parametrize(
    "adapter",
    [
        lambda batch: samples(batch, recorded("slime.Sample")),
        lambda batch: rollout_batch(batch, UserDict),
        lambda batch: generator_output(batch, recorded("skyrl.TrajectoryID")),
    ],
)
def test_a_row_without_a_reward_is_refused_by_name(adapter: Any) -> None:
    with pytest.raises(ValueError, match="trajectory 'b' has no reward"):
        adapter(batch_of([trajectory("a"), trajectory("b", reward=None)]))


@pytest.mark.parametrize("advantages", [[1.0], [1.0, float("nan")], [[1.0, 2.0]]])
def test_advantages_that_do_not_fit_the_rows_are_refused(advantages: Any) -> None:
    with pytest.raises(ValueError, match="advantage"):
        training_samples(
            batch_of([trajectory("a"), trajectory("b")]), recorded("prime_rl.TrainingSample"), advantages, env_name="x"
        )
