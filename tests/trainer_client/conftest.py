"""What a trainer works with: a service whose engine serves a tiny model, which it loads and pushes, and models that see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.tiny_model import make_tiny_model
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.sessions.finished_groups import service_of
from tests.support.sessions.pictures import FAMILIES, Sighted, open_eyes
from trainer_client.client import TrainerClient


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden_size=64)


@pytest.fixture
def service(folder: Path, redis_url: str) -> Iterator[RunningService]:
    with service_of(folder, redis_url) as running:
        yield running


@pytest.fixture
def client(service: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(service.url, TRAINER) as client:
        yield client


@pytest.fixture(scope="module", params=FAMILIES)
def sighted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sighted:
    return open_eyes(request.param, tmp_path_factory.mktemp("vision"))
