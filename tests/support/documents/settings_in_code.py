"""The environment variables that the project's own code reads."""

from __future__ import annotations

import re
from functools import cache

from proxy.settings import Settings, list_variables
from proxy.tasks.sweeper import RolloutSettings
from rollout.runtimes.settings import VARIABLES
from tests import ROOT

_READ = re.compile(r"""(?:environ(?:\.get)?[(\[]|env\.get\(|envvar=|\(env,)\s*"([A-Z][A-Z0-9_]+)\"""")
"""Looked up in the environment, named for a flag, or handed with the environment to a function that looks it up."""


@cache
def variables() -> frozenset[str]:
    """Of every process of the project."""
    fields = {name for settings in (Settings, RolloutSettings) for each in list_variables(settings).values() for name in each}
    files = [file for room in ("cli", "rollout", "trainer_client", "proxy") for file in (ROOT / room).rglob("*.py")]
    return frozenset(fields | {*VARIABLES.values()} | {name for file in files for name in _READ.findall(file.read_text())})
