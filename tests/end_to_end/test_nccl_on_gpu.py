"""Weights over NCCL for real: a trainer on one GPU, a vLLM on another."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine.vllm_server import running_vllm
from tests.support.engine.weight_fixtures import Judge, generate
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.service.verbatim_process import environment

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

PROMPT = list(range(20, 60))
GPU_TOLERANCE = 0.05
"""The engine computes on a GPU in float32 with other kernels than the judge; TF32 products are this far off."""

TRAINER_PROGRAM = """
import sys, torch
from transformers import AutoModelForCausalLM
from trainer_client.client import TrainerClient
url, token, port, *checkpoints = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(checkpoints[0], dtype=torch.float32).cuda()
with TrainerClient(url, token) as client:
    publisher = client.nccl(model, master_address="127.0.0.1", master_port=int(port))
    for version, checkpoint in enumerate(checkpoints, 1):
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict())
        push = publisher.publish(version)
        assert push.applied and not push.failed, push
    publisher.close()
"""


def trained(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = environment(CUDA_VISIBLE_DEVICES="1")
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    """On the first GPU; the trainer gets the second, since NCCL refuses two members on one."""
    with running_vllm(tiny_model, tmp_path, "--dtype", "float32", env={"CUDA_VISIBLE_DEVICES": "0"}) as server:
        yield server.url


async def test_a_trainers_weights_arrive_over_nccl(engine: str, redis_url: str, tmp_path: Path) -> None:
    from examples.demo.tiny_model import make_tiny_model
    from examples.vllm_server import free_port

    assert shutil.which("nvidia-smi")
    checkpoints = [make_tiny_model(tmp_path / f"seed{seed}", seed=seed) for seed in (1, 2)]
    with RunningService(engine, redis_url) as service:
        arguments = [service.url, TRAINER, str(free_port()), *map(str, checkpoints)]
        command = [sys.executable, "-c", TRAINER_PROGRAM, *arguments]
        done = await asyncio.to_thread(trained, command)
        assert done.returncode == 0, done.stderr
        said = await generate(engine, PROMPT, 24)
    assert said.spans == [("2", 0, 24)]
    judge = Judge()
    assert judge.largest_error(checkpoints[1], said) < GPU_TOLERANCE
    assert judge.largest_error(checkpoints[0], said) > 0.1
