"""The real AsyncGRPOTrainer of TRL on leased rows of a real service: what is trained, acknowledged and published."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from contract.errors import ClientClosed
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.sessions.adapter_batches import batch_of, taught_batch, two_turns
from tests.support.sessions.finished_groups import finish, groups
from tests.support.sessions.trainer_libraries import callback
from tests.support.sessions.training_rows import trajectory
from tests.support.sessions.trl_on_a_cpu import SETTINGS, without_a_gpu
from trainer_client.adapters.microbatches import Padded, Rows
from trainer_client.adapters.teachers import best_and_own, distillation_samples
from trainer_client.adapters.torch_dataset import LeasedRows
from trainer_client.advantages import grpo
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.distillation import forward_kl
from trainer_client.errors import VersionConflict
from trainer_client.recompute import recompute

# As in test_trl.py: a trainer's machine has no vLLM.
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "vllm", None)
    patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_distillation import async_distillation_trainer
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from trainer_client.adapters.trl_async import LeasedAsyncGRPOTrainer, PublishTransfer


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    with without_a_gpu():
        yield


class Leased(LeasedRows):
    """Keeps what was leased, in its order."""

    def __init__(self, service: RunningService, **options: Any) -> None:
        self.batches: list[Batch] = []
        super().__init__(service.url, TRAINER, Rows(**options), advantages=self.keep, wait_seconds=0.5)

    def keep(self, batch: Batch) -> Any:
        self.batches.append(batch)
        return batch.advantages(grpo)


Build = Callable[..., Any]


@pytest.fixture
def build(folder: Path, client: TrainerClient, tmp_path: Path) -> Build:
    """Makes a trainer on rows, which publishes what it learned."""

    def build(rows: LeasedRows, *, callbacks: Any = None, **changes: Any) -> Any:
        arguments = AsyncGRPOConfig(output_dir=str(tmp_path / "out"), **{**SETTINGS, **changes})
        weights = PublishTransfer(client, tmp_path / "weights")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return LeasedAsyncGRPOTrainer(str(folder), rows, arguments, weights=weights, callbacks=callbacks)

    return build


def expected(folder: Path, batches: list[Batch], rows: float) -> dict[str, Any]:
    """What a step on the first `rows` rows logs: the loss is -mean(advantage x p / p_engine) over the sampled tokens, p by
    transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    leased = [pair for batch in batches for pair in zip(batch.rows, batch.advantages(grpo), strict=True)]
    ratios, weighed = [], []
    for row, advantage in leased[: int(rows)]:
        sampled = row.loss_mask == 1
        off = np.exp(recompute(model, row)[sampled] - row.logprobs[sampled])
        ratios += list(off)
        weighed += list(advantage * off)
    return {"loss": pytest.approx(-np.mean(weighed), abs=1e-4), "ratio": pytest.approx(np.mean(ratios), rel=1e-4)}


def test_a_step_trains_the_recorded_logprobs_publishes_and_then_acknowledges(
    folder: Path, service: RunningService, client: TrainerClient, build: Build
) -> None:
    """Micro-batches of a pair; TRL takes one more than it trains, and the last group is given back."""
    for name in ("g1", "g2", "g3"):
        finish(service, name, [1.0, 0.0])
    seen: list[tuple[dict[str, int], int]] = []

    def look() -> None:
        seen.append((groups(service), client.weights()["current"]["version"]))

    with Leased(service) as rows:
        trainer = build(rows, callbacks=[callback("on_step_end", look)], max_steps=2)
        trainer.train()
    assert seen == [({"leased": 2, "ready": 1}, 0), ({"acked": 1, "leased": 2}, 1)]
    assert groups(service) == {"acked": 2, "ready": 1}
    current = client.weights()["current"]
    assert current["version"] == 2
    published = load_file(Path(current["path"]) / "model.safetensors")
    trained = dict(trainer.model.named_parameters())
    assert published.keys() == trained.keys()
    assert all(torch.equal(weight, trained[name]) for name, weight in published.items())
    first, second = trainer.state.log_history[:2]
    assert {name: first[name] for name in ("loss", "ratio")} == expected(folder, rows.batches, 2)
    assert (first["reward"], first["sample/staleness_max"], second["batch/groups_per_step"]) == (0.5, 0, 1)


def test_rows_are_packed_into_the_budget_with_shared_beginnings_once(
    folder: Path, service: RunningService, build: Build
) -> None:
    """Five rows fit into the budget of the longest five; the tenth row, or one before, does not."""
    finish(service, "g1", [1.0, 0.0, 0.0])
    finish(service, "g2", [3.0, 0.0])
    finish(service, "g3", [1.0] + [0.0] * 14)
    with TrainerClient(service.url, TRAINER) as looker, looker.lease(max_groups=3) as batch:
        longest = max(len(row.token_ids) for row in batch.rows)
        batch.nack()
    with Leased(service, max_length=5 * longest) as rows:
        trainer = build(rows)
        assert trainer.args.token_budget == 5 * longest
        trainer.train()
    logged = trainer.state.log_history[0]
    trained = logged["batch/samples_per_step"]
    assert {name: logged[name] for name in ("loss", "ratio")} == expected(folder, rows.batches, trained)
    assert trained >= 5 and logged["batch/packing_ratio"] > 1


def test_rows_as_old_as_is_allowed_are_trained(
    folder: Path, service: RunningService, client: TrainerClient, build: Build
) -> None:
    """Six versions old; TRL alone drops rows older than four."""
    finish(service, "g1", [1.0, 0.0])
    for version in range(1, 7):
        client.publish(folder, version)
    for name in ("g2", "g3"):
        finish(service, name, [1.0, 0.0])
    with Leased(service) as rows:
        trainer = build(rows)
        trainer.train()
    assert trainer.state.log_history[0]["sample/staleness_max"] == 6
    assert [batch.groups[0].group_id for batch in rows.batches] == ["g1", "g2"]
    assert groups(service) == {"acked": 1, "ready": 2}


def test_an_error_gives_back_and_publishes_nothing(service: RunningService, client: TrainerClient, build: Build) -> None:
    finish(service, "g1", [1.0, 0.0])
    finish(service, "g2", [1.0, 0.0])
    with Leased(service) as rows:
        with pytest.raises(ZeroDivisionError):
            build(rows, callbacks=[callback("on_pre_optimizer_step", lambda: 1 // 0)]).train()
        assert groups(service) == {"ready": 2}  # before the rows are closed
    assert client.weights()["current"]["version"] == 0


def test_weights_of_another_publisher_end_the_training(
    folder: Path, service: RunningService, client: TrainerClient, build: Build
) -> None:
    finish(service, "g1", [1.0, 0.0])
    finish(service, "g2", [1.0, 0.0])
    with Leased(service) as rows, pytest.raises(VersionConflict, match="there is another publisher"):
        build(rows, callbacks=[callback("on_pre_optimizer_step", lambda: client.publish(folder, 1))]).train()
    assert groups(service) == {"ready": 2}


def test_rows_that_are_closed_end_the_training_with_an_error(service: RunningService, build: Build) -> None:
    for name in ("g1", "g2"):
        finish(service, name, [1.0, 0.0])
    rows = Leased(service)
    with pytest.raises(ClientClosed, match="closed during the training"):
        build(rows, callbacks=[callback("on_log", rows.close)], max_steps=3).train()
    assert groups(service) == {"acked": 1, "ready": 1}


def test_settings_that_cannot_be_right_are_refused(build: Build) -> None:
    def make(cut: Any, **changes: Any) -> None:
        build(LeasedRows("http://127.0.0.1:1", "t", cut), **changes)

    with pytest.raises(ValueError, match="max_steps is not set"):
        make(Rows(), max_steps=-1)
    with pytest.raises(ValueError, match="split by `Rows`"):
        make(Padded(micro_rows=2))
    with pytest.raises(ValueError, match="rows may have any number of tokens and token_budget is 100"):
        make(Rows(), token_budget=100)
    with pytest.raises(ValueError, match="rows may have 101 tokens and token_budget is 100"):
        make(Rows(max_length=101), token_budget=100)


def test_samples_for_asynchronous_distillation_are_those_that_trl_makes() -> None:
    batch = taught_batch(batch_of([two_turns("a"), trajectory("b", versions=())], [two_turns("c")]))
    made = distillation_samples(batch, async_distillation_trainer.RolloutSample, "teacher", top_k=2)
    assert [(sample.prompt_id, sample.model_version, sample.teacher_id) for sample in made] == [
        (0, 5, "teacher"),
        (1, 5, "teacher"),
    ]
    (row,) = (row for row in batch.rows if row.trajectory_id == "a")
    ids, logprobs = best_and_own(row, "teacher", 8, 2)
    np.testing.assert_array_equal(made[0].teacher_topk_ids, ids)
    np.testing.assert_array_equal(made[0].teacher_topk_logprobs, logprobs)
    assert made[0].completion_mask.tolist() == row.loss_mask.tolist() and made[0].input_ids.dtype == np.int64


@pytest.mark.parametrize("tail", [False, True])
def test_trls_own_divergences_from_a_teacher_are_ours(tail: bool) -> None:
    """In float64, with what is left of both distributions as one more id and without."""
    draw = np.random.default_rng(0)
    teacher, student = (torch.from_numpy(draw.normal(size=(5, 9))).log_softmax(-1)[:, :4] for _ in range(2))
    mask = torch.ones_like(teacher, dtype=torch.bool)
    theirs = [teacher, student]
    support = mask
    if tail:
        theirs = [async_distillation_trainer._add_tail_bucket(each, mask)[0] for each in theirs]
        support = torch.ones_like(theirs[0], dtype=torch.bool)
    forward = async_distillation_trainer._jsd_divergence(theirs[1], theirs[0], 0, support).sum(-1)
    ours = forward_kl(teacher.numpy(), student.numpy(), np.ones(5), tail=tail)
    np.testing.assert_allclose(forward.numpy(), ours, rtol=1e-12)
