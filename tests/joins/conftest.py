"""Frameworks that rollouts are joined from, each in an environment of its own: `make test-joins` makes them. In such an environment is what
the client's wheel holds, and of this folder what the framework imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.documents.docs_blocks import blocks_of
from tests.support.service.running_service import ADMIN

SECONDS = 600
"""Of a whole job."""


@pytest.fixture(scope="session")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the client's wheel holds, entry points included."""
    built, installed = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("client")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run(command, cwd=ROOT / "wheels/client", check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    shutil.unpack_archive(wheel, installed, "zip")
    return installed


def find_shown(containing: str) -> str:
    """The one block of docs/integrations.md with these words."""
    (found,) = [block.text for block in blocks_of(ROOT / "docs/integrations.md") if containing in block.text]
    return found


@dataclass(frozen=True)
class Framework:
    """Runs a framework's programs in one folder, beside the client's wheel, with a service. The operator's own key to a vendor is there,
    too: no agent may be given it."""

    name: str
    folder: Path
    client: Path
    url: str

    def follow(self, containing: str, **variables: str) -> str:
        """Run the block of docs/integrations.md with these words, but its `export VERBATIM_URL`. Returns the output."""
        lines = [line for line in find_shown(containing).splitlines() if not line.startswith("export VERBATIM_URL")]
        return self.run("bash", "-euc", "\n".join(lines), **variables).stdout

    def run(self, program: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        programs = ROOT / ".cache/joins" / self.name / "bin"
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": f"{self.client}:{ROOT / 'tests/joins'}",
            "VERBATIM_URL": self.url,
            "VERBATIM_ADMIN_TOKEN": ADMIN,
            "OPENAI_API_KEY": "sk-the-operators-own",
            **variables,
        }
        environment["PATH"] = f"{programs}:{environment['PATH']}"
        done = subprocess.run(
            [shutil.which(program, path=environment["PATH"]) or program, *map(str, words)],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done
