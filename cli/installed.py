"""What a command needs beside what every command has."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from cli.refusal import Refusal


def check_installed(command: str, modules: Sequence[str], extras: str) -> None:
    """Raises `Refusal` where a module is missing; it says with which extras of the package it comes."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise Refusal(f"verbatim {command} needs {', '.join(missing)}: pip install 'verbatim-rl[{extras}]'")
