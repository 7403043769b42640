"""The TRL example in several processes of one trainer, on leased rows of a real service."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.tiny_model import make_tiny_model
from tests.support.engine.forked_vllm import run_beside_vllm
from tests.support.engine.vllm_server import require_vllm
from tests.support.service.redis_server import free_port
from tests.support.service.running_service import TRAINER
from tests.support.service.verbatim_process import environment
from tests.support.sessions.finished_groups import finish, groups, service_of
from trainer_client.client import TrainerClient

# They use nothing of vLLM, but are forked off the process that has imported it, and torch and transformers with it.
pytestmark = pytest.mark.engine


@pytest.mark.timeout(900)  # importing TRL takes minutes on a busy machine
def test_several_processes_lease_each_for_itself_and_one_publishes(tmp_path: Path, redis_url: str) -> None:
    """Two processes, two steps of two rows each: eight rows."""
    require_vllm()
    model = make_tiny_model(tmp_path / "model", layers=1, hidden_size=64)
    with service_of(model, redis_url) as service, TrainerClient(service.url, TRAINER) as client:
        for at in range(4):
            finish(service, f"g{at}", [1.0, 0.0])
        program = ("tests.support.sessions.trl_process", str(model), str(tmp_path), str(free_port()))
        env = environment(VERBATIM_URL=service.url, VERBATIM_TRAINER_TOKEN=TRAINER)
        done = run_beside_vllm("-m", *program, env=env, timeout_seconds=840)
        assert done.returncode == 0, done.stderr
        assert groups(service) == {"acked": 4}
        assert client.weights()["current"]["version"] == 2
