"""LoRA adapters in a real vLLM: each is a policy beside the base model, and every token says which version of it sampled it.

The judge is transformers: every recorded logprob is recomputed in float32, from the base model with the adapter's product added.
"""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.vllm_server import running_vllm
from tests.support.engine.weight_fixtures import Judge, Said
from tests.support.service.running_service import RunningService

pytestmark = pytest.mark.engine

OUTLASTING = 30_000
"""Tokens of a reply that no push outlasts."""
NAMES = ("policy", "learner", "critic")
Truth = Mapping[str, tuple[int, Path | None]]
"""By model, the version and the adapter that sample for it."""


def test_adapters_are_pushed_beside_each_other_and_full_weights_go_under_them(tmp_path: Path, redis_url: str) -> None:
    """What is in flight when an adapter is pushed goes on, under the weights that it began with: its own calls, another adapter's and
    the base model's. One adapter does nothing yet, as training starts."""
    from examples.demo.tiny_model import make_tiny_model

    models = [make_tiny_model(tmp_path / f"model{seed}", seed=seed) for seed in range(2)]
    adapters = [make_adapter(tmp_path / f"adapter{seed}", seed) for seed in range(3)]
    modules = ["--lora-modules", f"learner={adapters[0]}", f"critic={adapters[1]}"]
    # On a CPU vLLM 0.32 gives the base model's tokens, beside those of adapters, what is in the last place: here always nothing.
    flags = ["--enable-lora", "--max-loras", "5", "--max-lora-rank", "8", *modules, "--max-model-len", "32768"]
    with (
        running_vllm(models[0], tmp_path, *flags, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as server,
        RunningService(server.url, redis_url) as service,
        ThreadPoolExecutor() as pool,
    ):
        calls = Calls(service, pool)
        began: Truth = {"policy": (0, None), "learner": (0, adapters[0]), "critic": (0, adapters[1])}
        flying = [calls.begin(name) for name in NAMES]
        assert push(service, "learner", 1, adapters[2])["applied"]
        short = {name: calls.say(name, 8) for name in NAMES}
        assert not any(each.done() for each in flying), "no call was cut"
        abort_all(server.url)
        long = {name: each.result() for name, each in zip(NAMES, flying, strict=True)}
        refused = push(service, "learner", 2, "/nowhere")
        assert (refused["applied"], "No adapter found for /nowhere" in refused["error"]) == (False, True)
        assert push(service, "", 1, models[1])["applied"]
        under = {name: calls.say(name, 8) for name in NAMES}
        judge = Adapted(calls.recorded(), tmp_path)
        judge.check(long, began, models[0])
        judge.check(short, {**began, "learner": (1, adapters[2])}, models[0])
        judge.check(under, {**began, "policy": (1, None), "learner": (1, adapters[2])}, models[1])
        rows, accounting = calls.session.trajectories()
        assert {row["policy"] for row in rows} == {"", "learner", "critic"}
        assert accounting["quarantined"] == []
        based = {row["policy"]: {version for version, _, _ in row["metadata"].get("base_versions", ())} for row in rows}
        assert based[""] == set() and {0, 1} >= based["learner"] > set()


class Calls:
    """The calls of one session, each by its question."""

    def __init__(self, service: RunningService, pool: ThreadPoolExecutor) -> None:
        self.session = service.session()
        self._pool = pool
        self._number = 0

    def say(self, model: str, tokens: int, begun: threading.Event | None = None) -> str:
        """A reply of that length; returns the question."""
        self._number += 1
        question = f"question {self._number} of many that were asked"
        asked: Any = [{"role": "user", "content": question}]
        create = self.session.client.chat.completions.create
        stream = create(
            model=model,
            messages=asked,
            max_tokens=tokens,
            temperature=1,
            seed=self._number,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            if begun is not None and chunk.choices and chunk.choices[0].delta.content:
                begun.set()
        return question

    def begin(self, model: str) -> Future[str]:
        """The same, in flight: it has said something."""
        begun = threading.Event()
        reply = self._pool.submit(self.say, model, OUTLASTING, begun)
        while not begun.wait(0.1):
            assert not reply.done(), reply.result()
        return reply

    def recorded(self) -> Mapping[str, Mapping[str, Any]]:
        return {call["messages"][-1]["content"]: call for call in self.session.calls}


class Adapted:
    """Holds the recorded calls against the models that sampled them."""

    def __init__(self, recorded: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
        self._recorded, self._folder, self._judge = recorded, folder, Judge()

    def check(self, questions: Mapping[str, str], truth: Truth, base: Path) -> None:
        for model, question in questions.items():
            version, adapter = truth[model]
            call = self._recorded[question]
            ids = call["completion_ids"]
            assert call["weight_versions"] == [[version, 0, len(ids)]], (model, call["weight_versions"])
            said = Said(call["prompt_ids"], ids, call["logprobs"], [], call["finish_reason"])
            error = self._judge.largest_error(base if adapter is None else self._merge(base, adapter), said)
            assert error < 1e-4, (model, version, error)

    def _merge(self, base: Path, adapter: Path) -> Path:
        target = self._folder / f"{base.name}-{adapter.name}"
        return target if target.exists() else merged(base, adapter, target)


def push(service: RunningService, model: str, version: int, path: Path | str) -> dict[str, Any]:
    body = {"version": version, "path": str(path), "kind": "lora" if model else "full", "model": model}
    answer: dict[str, Any] = service.request("POST", "/weights", json=body).json()
    return answer


def abort_all(url: str) -> None:
    request = urllib.request.Request(f"{url}/abort_requests", b"{}", {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def make_adapter(target: Path, seed: int) -> Path:
    """Rank 4 on q_proj and v_proj, as PEFT writes it; seed 0 has B = 0, as training starts."""
    import torch
    from safetensors.torch import save_file

    target.mkdir()
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for module, width in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, 128, generator=noise) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, 4, generator=noise) * min(seed, 1) * 0.5
    save_file(tensors, target / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "policy"}
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def merged(base: Path, adapter: Path, target: Path) -> Path:
    """W + (alpha / r) B A: the same model without an adapter."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, target)
    weights, low_rank = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in low_rank:
        if name.endswith("lora_A.weight"):
            place = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            weights[place] += 2 * low_rank[name.replace("lora_A", "lora_B")] @ low_rank[name]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
