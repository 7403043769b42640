"""Which code was measured. Results carry it, and a table is made only from results of the code that is in the checkout.

The digest decides, not the commit: it survives a rebase, sees uncommitted changes, and stays the same when a commit changes only tests or
documents.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("contract", "proxy", "reconstruct", "trainer_client", "cli")
SUFFIXES = (".py", ".lua")


def describe_code(root: Path = ROOT) -> dict[str, Any]:
    """`commit`: the last that changed the measured folders, "unknown" without git; whether they are `dirty` against it; and the digest of
    their `code`."""
    commit = _git(root, "log", "-1", "--format=%h", "--abbrev=12", "--", *FOLDERS)
    changes = _git(root, "status", "--porcelain", "--", *FOLDERS)
    return {"commit": commit or "unknown", "dirty": bool(changes), "code": digest(root)}


def digest(root: Path = ROOT) -> str:
    """Of the paths and contents of the code that the benchmarks measure."""
    files = (path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)
    seen = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        seen.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return seen.hexdigest()[:16]


def is_current(machine: Mapping[str, Any], root: Path = ROOT) -> bool:
    """Whether a result with this description was measured with the code in the checkout."""
    return machine.get("code") == digest(root)


def name_commit(machine: Mapping[str, Any]) -> str:
    """For a reader; results from before commits were recorded name none."""
    if "commit" not in machine:
        return "an unknown commit"
    return f"commit {machine['commit']}" + (" with uncommitted changes" if machine["dirty"] else "")


def _git(root: Path, *argv: str) -> str:
    """Its output, empty if there is no git or no repository."""
    try:
        ran = subprocess.run(["git", "-C", str(root), *argv], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
