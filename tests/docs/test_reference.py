"""docs/reference is what the code says, and what people ask first is one click from the index."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.service.verbatim_process import environment

FOLDER = ROOT / "docs" / "reference"


def test_the_reference_is_as_the_code_is_now() -> None:
    done = subprocess.run(
        [sys.executable, "docs/site/reference.py", "--check"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], ""), "run `make docs`, and commit what it writes"


def test_every_object_of_the_http_api_that_is_named_is_explained() -> None:
    page = (FOLDER / "http.md").read_text()
    explained = {name.lower() for name in re.findall(r"^### (.+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= explained
    assert "`POST /batches/lease` · trainer" in page


def test_every_page_leads_to_files_that_are_committed() -> None:
    """Five pages of the reference were made for the site alone: where the repository is read, links to them led nowhere."""
    named = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    there = {*named, *(posixpath.dirname(name) for name in named)}
    lost = []
    for page in (name for name in named if name.endswith(".md")):
        for link in re.findall(r"\]\(([^)\s#]+)", re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)):
            target = link[1:] if link.startswith("/") else posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            if "://" not in link and target.removesuffix("/") not in there:
                lost.append((page, link))
    assert lost == []


QUESTIONS = {
    "which versions": ("engines.md#versions-that-were-run", "### Versions that were run"),
    "LoRA": ("lora.md", "--enable-lora"),
    "eight nodes": ("deploy.md#eight-machines", "examples/clusters/slurm.sbatch"),
    "distil": ("distil.md", "verbatim generate"),
    "compare runs": ("observability.md#the-run-page", "### The run page"),
    "why not leased": ("troubleshooting.md#the-trainer-gets-nothing", "## The trainer gets nothing"),
    "why quarantined": ("concepts.md#a-training-row", "| quarantined as | why |"),
    "upgrade": ("deploy.md#upgrades", "## Upgrades"),
    "add my agent": ("harnesses.md#add-one", "## Add one"),
    "what does it cost": ("comparison.md#cost", "## Cost"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_index_leads_to_the_answer(question: str) -> None:
    target, answer = QUESTIONS[question]
    assert f"]({target})" in (ROOT / "docs" / "index.md").read_text()
    assert answer in (ROOT / "docs" / target.partition("#")[0]).read_text()
    assert "(docs/index.md" in (ROOT / "README.md").read_text()
