"""A service whose installed code is replaced while it runs, as pip does: what it has not loaded by then is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.verbatim_process import TRAINER, Serving

PACKAGES = ("cli", "contract", "proxy", "reconstruct", "rollout", "trainer_client")
TASK = {"task_id": "judged", "instruction": "Fix it.", "harness": "pi", "runtime": "local"}
EVALUATORS = {
    "command": {"command": "true"},
    "http": {"url": "http://127.0.0.1:9/judge"},
    "python": {"entry": "json:loads"},
    "pytest": {"report": "report.xml"},
}


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """The packages, copied as pip would."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / "install" / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "install"


def test_a_service_whose_install_is_replaced_serves_as_before(install: Path, tmp_path: Path) -> None:
    """A tree of other code took its place once: tasks were refused with `No module named 'rollout.runtimes.local'`."""
    moved = ["env", "-C", str(install)]
    with (
        ScriptedEngine("qwen3") as engine,
        Serving("--engine", engine.url, data_dir=tmp_path / "data", inside=moved, PYTHONPATH=str(install)) as running,
    ):
        shutil.rmtree(install)
        opened = running.request("POST", "/sessions", json={"session_id": "a", "group_id": "g"})
        assert opened.status_code == 201, opened.text
        session = opened.json()
        asked = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
        path = f"/s/{session['session_id']}/v1/chat/completions"
        assert running.request("POST", path, token=session["api_key"], json=asked).status_code == 200
        closed = running.request("POST", "/sessions/a/close", json={"status": "completed", "reward": 1.0})
        assert closed.status_code == 200, closed.text
        for page in ("/ui", "/ui/sessions/a", "/ui/groups", "/ui/groups/g", "/ui/tasks"):
            shown = running.request("GET", page)
            assert shown.status_code == 200, (page, shown.text)
        leased = running.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1, "wait_seconds": 30})
        assert leased.status_code == 200, leased.text
        for kind, options in EVALUATORS.items():
            task = {**TASK, "task_id": kind, "evaluator": {"kind": kind, "options": options}}
            made = running.request("POST", "/tasks", json=task)
            assert made.status_code == 201, made.text
        for kind in ("docker", "apptainer", "kubernetes"):
            made = running.request(
                "POST", "/tasks", json={**TASK, "task_id": kind, "runtime": {"kind": kind, "image": "debian"}}
            )
            assert made.status_code == 201, made.text
