"""The real GRPOTrainer of TRL, on a CPU, on leased rows of a real service: what is trained, acknowledged and published."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState

from contract.errors import ClientClosed
from reconstruct.spans import Span
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.sessions.finished_groups import finish, groups
from tests.support.sessions.trainer_libraries import callback
from tests.support.sessions.training_rows import groups as batch_groups
from tests.support.sessions.training_rows import trajectory
from trainer_client.adapters.microbatches import Padded, Rows
from trainer_client.adapters.torch_dataset import LeasedRows
from trainer_client.advantages import grpo
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.errors import UnpublishableWeights, VersionConflict
from trainer_client.recompute import recompute

# A trainer's machine has no vLLM. Where there is one TRL imports it, which takes long, and warns of versions it does not know.
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "vllm", None)
    from trl import GRPOConfig

    from examples.trainers import trl_grpo
    from trainer_client.adapters.trl import LeasedGRPOTrainer, PublishWeights, rollouts_of

SETTINGS = {
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "optim": "sgd",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 1e9,
}


@pytest.fixture
def rows(service: RunningService) -> Iterator[LeasedRows]:
    with LeasedRows(service.url, TRAINER, Rows(), wait_seconds=0.5) as rows:
        yield rows


Build = Callable[..., Any]


@pytest.fixture
def build(folder: Path, rows: LeasedRows, tmp_path: Path) -> Build:
    """Makes a trainer on `rows`, or others."""

    def build(rows: LeasedRows = rows, *, publish: Any = None, callbacks: Any = None, **changes: Any) -> Any:
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder, padding_side="left"),
        )
        arguments = GRPOConfig(output_dir=str(tmp_path / "out"), **{**SETTINGS, **changes})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return LeasedGRPOTrainer(model, rows, arguments, publish=publish, callbacks=callbacks, processing_class=tokenizer)

    return build


@pytest.fixture
def publish(client: TrainerClient, tmp_path: Path) -> PublishWeights:
    return PublishWeights(client, tmp_path / "weights")


def recorded_rows(service: RunningService, session_ids: list[str]) -> list[dict[str, Any]]:
    return [service.request("GET", f"/sessions/{each}/trajectories").json()["trajectories"][0] for each in session_ids]


def rowed(recorded: dict[str, Any]) -> tuple[int, ...]:
    return tuple(recorded["token_ids"])


POINTS = ("on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


class Watch:
    """What the service says at points of a step, before the step's acknowledgement."""

    def __init__(self, service: RunningService) -> None:
        self.seen: list[tuple[str, dict[str, int], int]] = []
        self.callbacks = [callback(point, partial(self.look, service, point)) for point in POINTS]

    def look(self, service: RunningService, point: str) -> None:
        weights = service.request("GET", "/weights", TRAINER).json()
        self.seen.append((point, groups(service), weights["current"]["version"]))


def test_what_trl_is_given_of_a_row() -> None:
    """prompt 1 2, sampled 101 102, tool 7, sampled 103: the prompt ends at the first sampled token, the tool is masked."""
    row = trajectory(
        token_ids=np.array([1, 2, 101, 102, 7, 103], dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1], dtype=np.int8),
        logprobs=np.array([0, 0, -0.5, -1.0, 0, -1.5], dtype=np.float32),
        weight_versions=(Span(5, 2, 4), Span(6, 5, 6)),
        reward=None,
    )
    [part] = Rows()(Batch(batch_groups([row]), 6), [0.5])
    assert rollouts_of([part]) == {
        "prompt_ids": [[1, 2]],
        "completion_ids": [[101, 102, 7, 103]],
        "logprobs": [[-0.5, -1.0, 0.0, -1.5]],
        "env_mask": [[1, 1, 0, 1]],
        "reward": [None],
    }


def test_only_the_sampled_tokens_have_a_gradient(service: RunningService, build: Build) -> None:
    """The last hidden state at t acts on the loss only through the prediction of token t + 1."""
    wanted = recorded_rows(service, finish(service, "g", [1.0, 0.0]))
    trainer = build(per_device_train_batch_size=2)
    seen: list[tuple[Any, Any, Any]] = []

    def watch(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            output.last_hidden_state.retain_grad()
            seen.append((options["input_ids"], options["attention_mask"].bool(), output.last_hidden_state))

    trainer.model.model.register_forward_hook(watch, with_kwargs=True)
    trainer.train()
    [(ids, there, hidden)] = seen
    trained = hidden.grad.abs().sum(-1) > 0
    got = {tuple(ids[at][there[at]].tolist()): trained[at][there[at]].tolist() for at in range(2)}
    assert not trained[~there].any()
    assert got == {rowed(row): [mask == 1 for mask in row["loss_mask"][1:]] + [False] for row in wanted}


def test_the_loss_is_of_recorded_logprobs_and_whole_groups(folder: Path, service: RunningService, build: Build) -> None:
    """Two groups of three, which TRL's pairs of neighbours would cut apart. At ratio 1 the loss is -mean(advantage x p / p_engine)
    over the sampled tokens, p by transformers."""
    ids = finish(service, "g1", [1.0, 0.0, 0.0]) + finish(service, "g2", [3.0, 3.0, 0.0])
    reference = AutoModelForCausalLM.from_pretrained(folder)
    client = TrainerClient(service.url, TRAINER)
    batch = client.lease(max_groups=2)
    assert batch is not None and len(batch) == len(ids)
    off, weighed = [], []
    for row, advantage in zip(batch.rows, batch.advantages(grpo), strict=True):
        sampled = row.loss_mask == 1
        off += list(recompute(reference, row)[sampled] - row.logprobs[sampled])
        weighed += [advantage] * int(sampled.sum())
    batch.nack()
    client.close()
    trainer = build(per_device_train_batch_size=6)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(-np.mean(np.array(weighed) * np.exp(off)), abs=1e-4)
    assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(np.abs(off).mean(), abs=1e-4)
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(np.abs(off).max(), abs=1e-4)
    assert logged["rewards/stored_reward/mean"] == pytest.approx(7 / 6)
    assert "frac_reward_zero_std" not in logged
    assert sorted(trainer._logs["advantages"]) == pytest.approx(sorted(batch.advantages(grpo)))


def test_a_lease_is_acknowledged_after_the_step_and_after_its_weights_are_served(
    service: RunningService, client: TrainerClient, build: Build, publish: PublishWeights
) -> None:
    finish(service, "g", [1.0, 0.0, 1.0, 0.0])
    watch = Watch(service)
    trainer = build(publish=publish, callbacks=watch.callbacks)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    assert watch.seen == [(point, {"leased": 1}, 0) for point in POINTS]
    assert groups(service) == {"acked": 1}
    current = client.weights()["current"]
    assert (current["version"], publish.version) == (1, 1)
    published = load_file(Path(current["path"]) / "model.safetensors")
    assert published.keys() == trainer.model.state_dict().keys()
    assert all(torch.equal(weight, trainer.model.state_dict()[name]) for name, weight in published.items())
    assert not all(torch.equal(weight, before[name]) for name, weight in published.items())
    AutoModelForCausalLM.from_pretrained(current["path"])


def test_a_step_that_raises_gives_the_lease_back_and_publishes_nothing(
    service: RunningService, client: TrainerClient, build: Build, publish: PublishWeights
) -> None:
    finish(service, "g", [1.0, 0.0, 1.0, 0.0])
    trainer = build(publish=publish, callbacks=[callback("on_pre_optimizer_step", lambda: 1 // 0)])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert groups(service) == {"ready": 1}
    assert client.weights()["current"]["version"] == 0


def test_weights_that_are_not_published_leave_the_lease_unacknowledged(
    folder: Path, service: RunningService, client: TrainerClient, build: Build, publish: PublishWeights, tmp_path: Path
) -> None:
    finish(service, "g", [1.0, 0.0, 1.0, 0.0])
    trainer = build(publish=publish, callbacks=[callback("on_pre_optimizer_step", lambda: client.publish(folder, 1))])
    with pytest.raises(VersionConflict, match="there is another publisher"):
        trainer.train()
    assert groups(service) == {"ready": 1}
    assert not (tmp_path / "weights").exists()


def test_rows_of_several_steps_are_acknowledged_at_the_last(
    service: RunningService, client: TrainerClient, build: Build, publish: PublishWeights
) -> None:
    finish(service, "g", [1.0, 0.0, 1.0, 0.0])
    watch = Watch(service)
    steps = {"max_steps": 2, "per_device_train_batch_size": 2, "steps_per_generation": 2}
    build(publish=publish, callbacks=watch.callbacks, **steps).train()
    assert [(states, version) for _, states, version in watch.seen] == [({"leased": 1}, 0)] * 3 + [({"leased": 1}, 1)] * 3
    assert groups(service) == {"acked": 1}
    assert client.weights()["current"]["version"] == 2


def test_rows_that_do_not_fit_wait_for_the_next_batch(service: RunningService, rows: LeasedRows, build: Build) -> None:
    """Batches of two: rows 1 2 | 3 4 of a group of three and a group of two, of which the last is left."""
    finish(service, "g1", [1.0, 0.0, 1.0])
    finish(service, "g2", [1.0, 0.0])
    watch = Watch(service)
    build(callbacks=watch.callbacks, max_steps=2, per_device_train_batch_size=2).train()
    assert [states for _, states, _ in watch.seen] == [{"leased": 1, "ready": 1}] * 3 + [{"leased": 2}] * 3
    assert groups(service) == {"acked": 1, "ready": 1}


def test_rows_that_are_closed_end_the_training_with_an_error(service: RunningService, rows: LeasedRows, build: Build) -> None:
    finish(service, "g", [1.0, 0.0])
    trainer = build(max_steps=2, per_device_train_batch_size=2)
    trainer.add_callback(callback("on_step_end", rows.close))
    with pytest.raises(ClientClosed, match="closed during the training"):
        trainer.train()
    assert groups(service) == {"acked": 1}


def test_settings_that_cannot_be_right_are_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="use_vllm is set"):
        build(use_vllm=True)
    with pytest.raises(ValueError, match="max_steps is not set"):
        build(max_steps=-1)
    with pytest.raises(ValueError, match="split by `Rows`"):
        build(LeasedRows("http://127.0.0.1:1", "t", Padded(micro_rows=2)))
    with pytest.raises(ValueError, match="have advantages"):
        build(LeasedRows("http://127.0.0.1:1", "t", Rows(), advantages=None))


class Sharded(torch.nn.Module):
    """As DeepSpeed marks a weight of which each process holds a part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.weight.ds_id = 0  # type: ignore[attr-defined]


class Adapted(torch.nn.Linear):
    """As peft marks a model with adapters."""

    peft_config: Any = ()


def test_weights_that_are_not_whole_are_refused_before_the_training(client: TrainerClient, tmp_path: Path) -> None:
    publish, settings = PublishWeights(client, tmp_path), GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(UnpublishableWeights, match="sharded over processes"):
        publish.on_train_begin(settings, TrainerState(), None, model=Sharded())
    with pytest.raises(UnpublishableWeights, match="has adapters"):
        publish.on_train_begin(settings, TrainerState(), None, model=Adapted(1, 1))


def test_weights_may_be_published_in_another_type_and_less_often(folder: Path, client: TrainerClient, tmp_path: Path) -> None:
    """Steps 1 to 5, every second is published, and the last; the newest two are kept."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    publish = PublishWeights(client, tmp_path, every_steps=2, keep_last=2, dtype=torch.bfloat16)
    settings, state = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False), TrainerState()
    publish.on_train_begin(settings, state, None, model=model)
    versions = []
    for step in range(1, 6):
        state.global_step = step
        publish.on_step_end(settings, state, None, model=model)
        versions.append(publish.version)
    publish.on_train_end(settings, state, None, model=model)
    assert [*versions, publish.version] == [0, 1, 1, 2, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-2", "version-3"]
    published = load_file(tmp_path / "version-3" / "model.safetensors")
    assert {weight.dtype for weight in published.values()} == {torch.bfloat16}
    assert published.keys() == load_file(folder / "model.safetensors").keys()
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == model.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
def test_the_example_trains_and_publishes(
    folder: Path, service: RunningService, client: TrainerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(service, "g1", [1.0, 0.0])
    finish(service, "g2", [1.0, 0.0])
    monkeypatch.setenv("VERBATIM_URL", service.url)
    monkeypatch.setenv("VERBATIM_TRAINER_TOKEN", TRAINER)
    trl_grpo.train(str(folder), tmp_path / "weights", tmp_path / "out", steps=2, rows=2, accumulate=1)
    assert groups(service) == {"acked": 2}
    assert client.weights()["current"]["version"] == 2
