"""The README and the documents beside it: what they name exists, their links lead somewhere, and the snippets of pages run."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import trainer_client
from examples.vllm_server import vllm_command
from tests import ROOT
from tests.support.documents import cases
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.verbatim_process import ADMIN, TRAINER, Serving, wait_until
from trainer_client import TrainerClient

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")
"""Those that are no pages of the site, whose links a test of the site checks."""


def text(name: str) -> str:
    return (ROOT / name).read_text()


def snippet(page: str, containing: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return str(found)


def test_the_tests_that_the_promises_name_exist() -> None:
    section = text("docs/index.md").partition("## What holds")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (P\d) \|", section, re.MULTILINE) == [f"P{number}" for number in range(1, 9)]
    named = set(re.findall(r"`([\w/]*test_\w+\.py)`", section))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).is_file()] == []


def test_each_case_has_tests_that_bear_its_number() -> None:
    assert len(cases.check(text("tests/cases.txt"), cases.find_tests())) > 60


@pytest.mark.parametrize(
    ("listed", "tests"),
    [("1. A case", {}), ("1. A case", {1: ["a"], 2: ["b"]}), ("1. A case\n1. Another", {1: ["a"]})],
)
def test_a_case_without_tests_and_a_mark_without_a_case_are_refused(listed: str, tests: dict[int, list[str]]) -> None:
    with pytest.raises(ValueError, match="missing, or there are two"):
        cases.check(listed, tests)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_paths_that_a_document_names_exist(name: str) -> None:
    """Ends of paths in the section on extension points stand for a folder's own files, and tests are named by where they are."""
    folders = "proxy|cli|reconstruct|rollout|trainer_client|examples|benchmarks|helm|deploy|docs|tests|wheels"
    named = set(re.findall(rf"`((?:{folders})/[\w/.-]*)`", text(name)))
    assert named or name in ("README.md", "AGENTS.md", "SECURITY.md")
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def anchors(path: Path) -> set[str]:
    """What links to headings of the document end in."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_links_of_a_document_lead_to_files_and_headings(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text(name)):
        if ":" in link:
            continue
        file, _, heading = link.partition("#")
        target = ROOT / file if file else ROOT / name
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


@pytest.mark.parametrize(("name", "lines"), [("README.md", 150), ("ARCHITECTURE.md", 80)])
def test_a_document_that_everybody_reads_is_short(name: str, lines: int) -> None:
    assert len(text(name).splitlines()) <= lines


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_vllm_command_has_the_flags_that_verbatim_uses_itself(device: Any) -> None:
    """Values apart: the page names a model of its own."""
    argv, variables = vllm_command("model", 8000, device=device)
    section = text("docs/quickstart.md").partition("## With a real model")[2].partition("\n## ")[0]
    assert [flag for flag in argv if flag.startswith("--") and flag not in section] == []
    assert [name for name in variables if name not in section] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_make_targets_it_names_exist(name: str) -> None:
    for makefile, target in re.findall(r"(?:^ *|`)make (?:-f (\S+) )?([a-z-]+)", text(name), re.MULTILINE):
        assert re.search(rf"^{target}:", text(makefile or "Makefile"), re.MULTILINE), target


def test_pages_and_examples_import_what_is_public_of_the_trainers_side() -> None:
    """Whoever copies them depends on it; other modules of `trainer_client` may move."""
    sources = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.py")]
    found = {
        (path.name, name) for path in sources for name in re.findall(r"from (trainer_client[\w.]*) import", path.read_text())
    }
    assert {name for _, name in found} > {"trainer_client", "trainer_client.advantages"}
    public = re.compile(r"trainer_client(\.advantages|\.distillation|\.(adapters|integrations)\.\w+)?")
    assert [each for each in sorted(found) if not public.fullmatch(each[1])] == []
    assert [name for name in trainer_client.__all__ if not hasattr(trainer_client, name)] == []


def pushed_version(client: TrainerClient) -> int:
    return int(client.weights()["current"]["version"])


def test_rollouts_of_ones_own_run_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    with ScriptedEngine() as engine, Serving("--engine", engine.url, data_dir=tmp_path / "data") as service:
        monkeypatch.setenv("VERBATIM_URL", service.url)
        monkeypatch.setenv("VERBATIM_ADMIN_TOKEN", ADMIN)
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
        exec(snippet("docs/integrations.md", "capital-of-france"), {"print": lambda *said: seen.extend(said)})
    assert seen[0] == "completed" and len(seen[1]) > 1


def test_a_harness_of_ones_own_and_then_a_trainers_loop_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            exec(snippet("docs/harnesses.md", part), names)
        trainer = snippet("docs/trainers.md", "client.publish(").replace("/shared/weights", str(tmp_path / "weights"))
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
