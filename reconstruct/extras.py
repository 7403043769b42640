"""How the optional parts of the project are installed: from a clone, since no package index has it."""

from __future__ import annotations


def how_to_install(extras: str) -> str:
    """The end of a message about something missing: the command. `extras`: their names, with commas."""
    return f"in a clone of Verbatim, pip install '.[{extras}]'"
