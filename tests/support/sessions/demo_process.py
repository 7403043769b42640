"""A demo as a process of its own, and what it leaves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.support.service.verbatim_process import environment


def judged(module: str, out: Path, *words: str, **variables: str) -> dict[str, Any]:
    """The verdict of a demo that ran to its end, in an environment with `variables`, and passed every check of its own. An interrupted
    demo gets a SIGTERM, so that it ends the engines it started."""
    command = [sys.executable, "-m", module, "--out", str(out), *words]
    env = environment(**variables)
    demo = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = demo.communicate()
    finally:
        demo.terminate()
        demo.wait()
    assert demo.returncode == 0, output
    for done, of in re.findall(r"([0-9,]+) of ([0-9,]+) (?:rollouts|rows)\b", output):
        assert done == of, output
    verdict: dict[str, Any] = json.loads((out / "verdict.json").read_text())
    assert verdict["passed"]
    return verdict
