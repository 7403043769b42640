"""What `make` would run, target by target: it is asked, and runs nothing."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the Makefile reads, where nothing is installed."""
    for name in (
        "Makefile",
        "examples/Makefile",
        "pyproject.toml",
        "constraints.txt",
        "tests/peers.txt",
        "benchmarks/peers.txt",
        "tests/harnesses",
    ):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / name)
    return tmp_path


def dry_run(checkout: Path, *words: str) -> str:
    """As by a person: a make that runs the tests passes its own flags and variables on, such as `ALL=1`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ALL"))}
    line = ["make", "--dry-run", "ENGINE=vllm-cpu", *words]
    done = subprocess.run(line, cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


DEMOS = ("-f", "examples/Makefile")


def find_agents(printed: str) -> set[str]:
    """The folders of agents that it would make."""
    return set(re.findall(r"^touch \.cache/harnesses/(\S+)/installed$", printed, re.MULTILINE))


def find_pythons(printed: str) -> Iterator[str]:
    return (found[0] for found in re.finditer(r"(?<![\w.])\S*bin/python(?=\s)", printed))


@pytest.mark.parametrize("target", ["demo", "test", "check", "docs", "install"])
def test_nothing_is_installed_into_the_environment_of_the_person_who_runs_make(checkout: Path, target: str) -> None:
    """The quick start leaves a service running out of `.venv`: an install there would replace its code under it."""
    printed = dry_run(checkout, target)
    assert "pip install" in printed
    assert {python for python in find_pythons(printed) if not python.startswith((".cache/venv/", "/usr/"))} == set()
    assert not re.search(r"(?<![\w./])\.venv\b", printed)


def test_the_makefile_has_few_targets_and_help_lists_each(checkout: Path) -> None:
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None and len(targets[1].split()) <= 20
    shown = subprocess.run(["make", "help"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    assert set(targets[1].split()) - set(re.findall(r"^make ([a-z-]+)", shown, re.MULTILINE)) == {"help"}


def test_make_clean_leaves_the_environment_of_the_person_who_runs_make(checkout: Path) -> None:
    printed = dry_run(checkout, "clean")
    assert "rm -rf .cache " in printed and ".venv" not in printed


@pytest.mark.parametrize(
    ("words", "agents"),
    [
        ([], {"pi"}),
        (["ARGS=--agent pi --steps 2"], {"pi"}),
        (["ARGS=--steps 2 --agent mini-swe-agent"], {"mini-swe-agent"}),
        (["ARGS=--agent=mini-swe-agent", "MODEL=smollm2"], {"mini-swe-agent"}),
        (["ARGS=--agent no-such-agent"], set()),
    ],
)
def test_make_learn_installs_the_one_agent_that_learns(checkout: Path, words: list[str], agents: set[str]) -> None:
    assert find_agents(dry_run(checkout, *DEMOS, "learn", *words)) == agents


def test_make_learn_takes_pi_from_the_folder_of_all_agents_where_that_is_there(checkout: Path) -> None:
    stamp = checkout / ".cache/harnesses/npm/installed"
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    assert find_agents(dry_run(checkout, *DEMOS, "learn")) == set()


def test_make_study_installs_the_agent_that_is_its_default(checkout: Path) -> None:
    assert find_agents(dry_run(checkout, *DEMOS, "study")) == {"mini-swe-agent"}
