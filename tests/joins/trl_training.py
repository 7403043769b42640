"""TRL's own asynchronous trainer over agents at the service, on a CPU. Prints what each optimizer step trained as JSON.

What only a GPU has is stood in for as in the tests of the adapter. TRL asks whether vLLM is installed, and asks it nothing."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from tests.joins.trl_rollouts import run_agent
from tests.support.sessions.trl_on_a_cpu import SETTINGS, without_a_gpu
from trainer_client import TrainerClient
from trainer_client.integrations.openenv import VerbatimSessionFactory

STEPS, MEMBERS = 2, 2
READY_SECONDS = 550
"""In which TRL's process for rollouts has imported torch, on a busy machine."""
SEQUENCES = 4
"""That TRL makes of a rollout of the task `chains`."""


def grade(task: Any, session: Any) -> float:
    """No two rollouts are worth the same."""
    return int(session.session_id[:8], 16) / 2**32


def make_worker(model: str) -> Any:
    from trl.chat_template_utils import qwen3_template
    from trl.experimental.async_grpo import async_rollout_worker
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

    tokenizer = AutoTokenizer.from_pretrained(model)
    # Agents' replies are parsed by the service; TRL refuses a chat template that it has no parser for all the same.
    tokenizer.response_template = qwen3_template
    async_rollout_worker.is_vllm_available = lambda: True
    return HarnessRolloutWorker(
        harness_session_factory=partial(VerbatimSessionFactory, run=run_agent, judge=grade, group_size=MEMBERS),
        model_name="policy",
        dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "chains"}]]}),
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=MEMBERS,
        max_inflight_tasks=MEMBERS,
        child_ready_timeout=READY_SECONDS,
    )


def train(model: str, out: Path) -> list[dict[str, float]]:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    size = MEMBERS * SEQUENCES
    changes = {"max_steps": STEPS, "per_device_train_batch_size": size, "token_budget": 0, "logging_steps": 1}
    with TrainerClient(os.environ["VERBATIM_URL"], os.environ["VERBATIM_ADMIN_TOKEN"]) as client, without_a_gpu():
        from trainer_client.adapters.trl_async import PublishTransfer

        trainer = AsyncGRPOTrainer(
            model=model,
            args=AsyncGRPOConfig(output_dir=str(out), **{**SETTINGS, **changes}),
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            rollout_worker=make_worker(model),
            weight_transfer=PublishTransfer(client, out / "weights"),
        )
        trainer.train()
    return [each for each in trainer.state.log_history if "batch/trained_tokens_per_step" in each]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(train(sys.argv[1], Path(sys.argv[2]))) + "\n")
