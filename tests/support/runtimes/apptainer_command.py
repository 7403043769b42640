"""A stand-in for apptainer (`apptainer_program`) on the machine, and runtimes by it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from contract.tasks import RuntimeSpec
from rollout.runtimes.container.apptainer import ApptainerKind
from rollout.runtimes.settings import RuntimeSettings
from tests import ROOT
from tests.support.machine import unavailable
from tests.support.runtimes.bwrap_container import LACKING
from tests.support.runtimes.runtime_places import GRACE_SECONDS, Place

_PROGRAM = Path(__file__).with_name("apptainer_program.py")


def command(folder: Path) -> Path:
    """The program. What it was called with is in `calls` beside it."""
    (folder / "state").mkdir(parents=True)
    line = shlex.join([sys.executable, "-S", str(_PROGRAM), str(folder / "state")])
    program = folder / "apptainer"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {line} "$@"\n')
    program.chmod(0o755)
    return program


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def in_instances(folder: Path, **settings: Any) -> Place:
    if os.geteuid() != 0 or LACKING:
        unavailable(f"instances need root and {' '.join(LACKING)}")
    program = command(folder / "bin")
    given = RuntimeSettings(
        apptainer_command=str(program), apptainer_dir=folder / "instances", **{"apptainer_root": "allowed", **settings}
    )
    kind = ApptainerKind(given, grace_seconds=GRACE_SECONDS)
    return Place(kind, RuntimeSpec(kind="apptainer", image="debian.sif", memory_mb=256))
