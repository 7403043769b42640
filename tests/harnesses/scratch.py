"""The repository that an agent is sent into, and what it is asked to do there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TASK = "Make number.py say what notes.txt asks for, and show that it does."

FILES = {
    "number.py": "value = 41\n",
    "notes.txt": "The value should be 42.\n",
    "README.md": "One file with one number.\n",
}


def make_repository(folder: Path) -> Path:
    """A git repository with one commit of FILES, whose name is the same in every folder: agents tell it to their models."""
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    _git(folder, "init", "--quiet", "--initial-branch=main")
    _git(folder, "config", "user.name", "Test")
    _git(folder, "config", "user.email", "test@localhost")
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "--message=A number")
    return folder


def _git(folder: Path, *words: str) -> None:
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-01T00:00:00Z")
    env = {**os.environ, **dates}
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, timeout=30, env=env)
