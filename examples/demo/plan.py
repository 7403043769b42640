"""Plan: one run of the demo, where its files go, and what is expected of it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.verdict import Expectation

TEACHER = "teacher"
"""A policy, and the scorer that asks it."""


def _gpu_answers() -> bool:
    import torch

    # Not nvidia-smi: on a machine with a GPU, an environment with the CPU builds of torch and vLLM runs on the CPU.
    return bool(torch.cuda.is_available())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. `model` None: a tiny model is made and warmed up; otherwise a path or a Hugging Face name. `asynchronous`: the
    agents go on while the trainer trains, otherwise they work in rounds. `max_staleness`: versions that a group may lie behind
    when it is trained on. `shuffled`: each rollout is trained on with the reward of another of its group. `ends`: how many steps at the
    start and at the end are averaged to tell the rise. `held_out_log`: where the trainer leaves the rewards of held-out exercises, before
    and after, by kind. `flat`: by how much the reward may change with a control. `agent`: the module of the agent's process.
    `delta`: bfloat16 weights are pushed, as what changed, and the engines have a mirror. `engine_flags`: more of them for vLLM. `teacher`:
    weights, in an engine of their own, that score the sessions which name TEACHER."""

    model: str | None = None
    out: Path
    steps: int
    seed: int
    push: bool = True
    groups: int
    rollouts: int
    learning_rate: float
    thinking: bool = True
    replicas: int = 1
    asynchronous: bool = False
    max_staleness: int = 0
    shuffled: bool = False
    ends: tuple[int, int] = (4, 4)
    held_out_log: Path | None = None
    flat: float = 0.12
    agent: str = "examples.demo.agent"
    delta: bool = False
    engine_flags: tuple[str, ...] = ()
    teacher: str | None = None
    gpu: bool = field(default_factory=_gpu_answers)

    @property
    def model_dir(self) -> str:
        return self.model or str(self.out / "model")

    @property
    def engines(self) -> Sequence[tuple[str, str]]:
        """The policy and the weights of each engine; "" is the policy that learns."""
        return [("", self.model_dir)] * self.replicas + ([(TEACHER, self.teacher)] if self.teacher else [])

    @property
    def weights_dir(self) -> Path:
        return self.out / "weights"

    @property
    def mirror_dir(self) -> Path:
        return self.out / "mirror"

    @property
    def data_dir(self) -> Path:
        """The service's records, once it has ended."""
        return self.out / "data"

    @property
    def viewer(self) -> str:
        """The command that opens the records in a browser: a service without engines."""
        command = [
            str(Path(sys.executable).with_name("verbatim")),
            "serve",
            "--open",
            "--port",
            "0",
            "--data-dir",
            str(self.data_dir),
        ]
        return f"VERBATIM_ENGINE='[]' {shlex.join(os.path.relpath(word) if os.path.isabs(word) else word for word in command)}"

    @property
    def trainer_log(self) -> Path:
        return self.out / "trainer-steps.jsonl"

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    @property
    def job(self) -> dict[str, Any]:
        """What every job of the agent says."""
        extra = {} if self.thinking else {"chat_template_kwargs": {"enable_thinking": False}}
        longest = 40 if self.model is None else 1000 if self.thinking else 200
        return {"model": "policy", "max_tokens": longest, "extra_body": extra}

    @property
    def expected(self) -> Expectation:
        # bfloat16 keeps 8 bits: two correct programs differ visibly in the logprobs of unlikely tokens.
        return Expectation(
            push=self.push,
            rise=0.25 if self.push and not self.shuffled else self.flat,
            difference=0.5 if self.gpu else 1e-4,
            replicas=self.replicas,
            asynchronous=self.asynchronous,
            max_staleness=self.max_staleness,
            shuffled=self.shuffled,
        )

    @property
    def service_env(self) -> dict[str, str]:
        """What makes the service know the teacher, and hold the agents back; in rounds nobody runs ahead."""
        scorers = {"VERBATIM_SCORERS": json.dumps({TEACHER: {"policy": TEACHER}})} if self.teacher else {}
        if not self.asynchronous:
            return scorers
        if self.push:
            limit = {"staleness": self.max_staleness, "groups_per_version": self.groups}
        else:
            # The weights never get newer: a bound on versions would let no group in once the first ones were trained.
            limit = {"undelivered_groups": self.groups * (self.max_staleness + 1)}
        return {**scorers, "VERBATIM_ADMISSION": json.dumps({**limit, "hold_seconds": 2})}

    def empty_out(self) -> None:
        """Make `out`, with nothing left in it of an earlier run; what the demo did not write stays."""
        # A model that was given may well lie in there: `--model demo-out/model` goes on from an earlier run's.
        made = ["weights", "mirror", "logs", "data"] + (["model"] if self.model is None else [])
        for name in made:
            shutil.rmtree(self.out / name, ignore_errors=True)
        for name in (self.trainer_log.name, "verdict.json", "reward.png"):
            (self.out / name).unlink(missing_ok=True)
        (self.out / "logs").mkdir(parents=True)
