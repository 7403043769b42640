"""Where `make harnesses` put the command-line agents. Nothing here installs anything."""

from __future__ import annotations

from pathlib import Path

from tests import ROOT

INSTALLED = ROOT / ".cache" / "harnesses"


def folder_of(command: str) -> Path:
    """The folder of executables that has this command. Raises FileNotFoundError that says how to get it."""
    folders = [INSTALLED / "npm" / "node_modules" / ".bin", *sorted(INSTALLED.glob("*/bin"))]
    for folder in folders:
        if (folder / command).exists():
            return folder
    raise FileNotFoundError(f"{command} is not installed below {INSTALLED}: run `make harnesses`")
