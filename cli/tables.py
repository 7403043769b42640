"""Tables that lose nothing: the ids and folders in them are there to be copied, or to be read by another program."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Column, Table

ANY_WIDTH = 1000
"""Characters of a line that no screen has to hold."""


def standard_output() -> Console:
    """As wide as the terminal; where it is none and COLUMNS says nothing, a row of a table is one line, however long."""
    return Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else ANY_WIDTH)


def whole_table(*columns: str | Column) -> Table:
    """What has no room in its column goes on in the line below it."""
    return Table(*(Column(column, overflow="fold") if isinstance(column, str) else column for column in columns))
