"""A demo as a process of its own, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.service.verbatim_process import ROOT, environment


def judged(module: str, out: Path, *words: str, **variables: str) -> dict[str, Any]:
    """The verdict of a demo that ran to its end and found every check to hold, in an environment with `variables`. One that is broken
    off is told so, for it ends the engines it started."""
    command = [sys.executable, "-m", module, "--out", str(out), *words]
    env = environment(**variables)
    demo = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = demo.communicate()
    finally:
        demo.terminate()
        demo.wait()
    assert demo.returncode == 0, output
    verdict: dict[str, Any] = json.loads((out / "verdict.json").read_text())
    assert verdict["passed"]
    return verdict
