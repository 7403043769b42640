"""The release workflow, rehearsed: its steps run here as they are written, up to what asks the network or publishes."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone, which is what the sdist holds, with the environment of the build as `make dist` would have made it."""
    folder = tmp_path_factory.mktemp("release")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", folder], cwd=ROOT, check=True
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    clone = next(path for path in folder.iterdir() if path.is_dir())
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## [Unreleased]", f"## [{VERSION}]"))
    python = clone / ".cache/release/build/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (clone / ".cache/release/build/installed").touch()
    return clone


def run_step(checkout: Path, command: str, tag: str = f"v{VERSION}") -> subprocess.CompletedProcess[str]:
    path = f"{checkout}/.cache/release/build/bin:{os.environ['PATH']}"
    environment = {"PATH": path, "GITHUB_REF_NAME": tag, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(["bash", "-ec", command], cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def test_the_steps_before_publishing_run_as_they_are_written(checkout: Path) -> None:
    """The bill of materials needs a package index, so that one is only asked what it would do."""
    steps = {step["name"]: step["run"] for step in WORKFLOW["jobs"]["build"]["steps"] if "run" in step}
    assert list(steps) == ["Check the tag", "Build", "Check what was built", "List what is in it"]
    for name, command in steps.items():
        done = run_step(checkout, command.replace("make sbom", "make --dry-run sbom"))
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    built = {path.name for path in (checkout / "dist").iterdir()}
    assert built >= {f"verbatim_rl-{VERSION}.tar.gz", f"verbatim_rl_client-{VERSION}-py3-none-any.whl"}
    (checkout / "dist" / "notes.txt").touch()
    refused = run_step(checkout, steps["Check what was built"])
    assert refused.returncode == 1 and "notes.txt" in refused.stderr


def test_a_tag_of_another_version_stops_the_release(checkout: Path) -> None:
    done = run_step(checkout, 'python wheels/release.py tag "$GITHUB_REF_NAME"', tag="v9.9.9")
    assert done.returncode == 1 and f"tag v{VERSION}" in done.stderr


def test_a_version_without_a_section_in_the_changelog_stops_the_release(checkout: Path) -> None:
    changelog = checkout / "CHANGELOG.md"
    written = changelog.read_text()
    changelog.write_text(written.replace(f"[{VERSION}]", "[Unreleased]"))
    done = run_step(checkout, 'python wheels/release.py tag "$GITHUB_REF_NAME"')
    changelog.write_text(written)
    assert done.returncode == 1 and "CHANGELOG.md" in done.stderr


def test_only_a_pushed_tag_publishes_and_only_that_job_may_write() -> None:
    build, publish = WORKFLOW["jobs"]["build"], WORKFLOW["jobs"]["publish"]
    assert WORKFLOW["permissions"] == {"contents": "read"} and "permissions" not in build
    assert publish["needs"] == "build" and "github.event_name == 'push' && github.ref_type == 'tag'" in publish["if"]
    attest, upload = (
        next(i for i, step in enumerate(publish["steps"]) if word in str(step)) for word in ("attest-build", "release create")
    )
    assert attest < upload
