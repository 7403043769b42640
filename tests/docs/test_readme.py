"""The README: what it names is there, its flags are the flags, and its snippets run."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from proxy.engine.in_vllm.launch import vllm_command
from tests import ROOT
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.verbatim_process import ADMIN, TRAINER, Serving, wait_until
from trainer_client import TrainerClient

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of `language`, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def snippet(containing: str) -> str:
    (found,) = [block for block in blocks("python") if containing in block]
    return found


def test_the_tests_that_the_promises_name_exist() -> None:
    named = set(re.findall(r"`([\w/]*test_\w+\.py)`", README))
    assert named
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).is_file()] == []


def test_the_paths_that_the_text_names_exist() -> None:
    """Tests apart, which are named by where they are in tests/."""
    named = set(re.findall(r"`((?:proxy|cli|reconstruct|rollout|trainer_client|examples)/(?![\w/]*test_)[\w/.]*)`", README))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("code", blocks("python"))
def test_python_snippets_compile(code: str) -> None:
    compile(code, "README.md", "exec")


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_vllm_command_has_the_flags_that_verbatim_uses_itself(device: Any) -> None:
    """Values apart: the README names a model of its own."""
    argv, variables = vllm_command("model", 8000, device=device)
    section = README.partition("## Serve")[2].partition("## The harness")[0]
    assert [flag for flag in argv if flag.startswith("--") and flag not in section] == []
    assert [name for name in variables if name not in section] == []


def test_the_make_targets_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", README)) <= targets


def pushed_version(client: TrainerClient) -> int:
    return int(client.weights()["current"]["version"])


def test_the_snippets_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but for the folder of the weights; `train` and `model` are the reader's, here a step that changes nothing."""
    import torch

    seen: list[Any] = []
    names: dict[str, Any] = {
        "train": lambda model, data: seen.append(data),
        "model": torch.nn.Linear(2, 1),
        "print": lambda text: seen.append(text),
    }
    with ScriptedEngine() as engine, Serving("--engine", engine.url, data_dir=tmp_path / "data") as service:
        monkeypatch.setenv("VERBATIM_URL", service.url)
        monkeypatch.setenv("VERBATIM_ADMIN_TOKEN", ADMIN)
        monkeypatch.setenv("VERBATIM_TRAINER_TOKEN", TRAINER)
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
        for part in ('admin.post("/sessions"', "OpenAI(", "/close"):
            exec(snippet(part), names)
        trainer = snippet("TrainerClient").replace("/shared/weights", str(tmp_path / "weights"))
        with ThreadPoolExecutor(1) as pool:
            loop = pool.submit(exec, trainer, names)
            wait_until(
                lambda: loop.done() or (names.get("version") == 1 and pushed_version(names["client"]) == 1), 120, "a push"
            )
            names["client"].close()
            loop.result(120)
        names["agent"].close()
        names["admin"].close()
        said, data = seen
        assert isinstance(said, str)
        assert data.token_ids.shape == data.loss_mask.shape and int(data.loss_mask.sum()) > 0
        assert "completed" in service.request("GET", f"/sessions/{names['session']['session_id']}").text
        pushed = tmp_path / "weights" / "version-1"
        assert engine.weights.loaded["path"] == str(pushed)
        assert load_file(pushed / "model.safetensors").keys() == {"weight", "bias"}
