"""Logging of the serving processes: everything to stderr; stdout is for requested output."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

from cli.refusal import CommandError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("human", "json")
LONGEST_TEXT = 8192
"""Characters of a message or a traceback in JSON: log collectors drop or split longer lines."""

_KEY = re.compile(r"(v[bpt])-[0-9a-f]{40}")
"""Of a session or a project, and a project's token."""


def escape(text: str) -> str:
    """The text with every character escaped that shows nothing, or changes how others are shown: line ends, control characters, marks of
    the writing direction, joiners, surrogates."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text)


class OneLine(logging.Formatter):
    """Formats a record on one line, with what is not printable escaped and session keys masked. A traceback has its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escape(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escape, super().formatException(ei).split("\n")))

    def format(self, record: logging.LogRecord) -> str:
        return _KEY.sub(r"\1-...", super().format(record))


class JsonLine(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, its `fields`, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:LONGEST_TEXT],
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            # The end of a traceback says what happened.
            values["exception"] = self.formatException(record.exc_info)[-LONGEST_TEXT:]
        present = {name: value for name, value in values.items() if value is not None}
        return _KEY.sub(r"\1-...", json.dumps(present, default=str))


def configure(level: str, form: str = "human") -> None:
    """Send all logging of this process to stderr at `level`. Raises `CommandError` (exit code 2) for an unknown level or form."""
    if level.lower() not in LEVELS:
        raise CommandError(f"--log-level {level!r} is invalid: choose one of {', '.join(LEVELS)}", exit_code=2)
    if form not in FORMATS:
        raise CommandError(f"VERBATIM_LOG_FORMAT {form!r} is invalid: choose one of {', '.join(FORMATS)}", exit_code=2)
    logging.basicConfig(stream=sys.stderr, level=level.upper(), force=True)
    human = OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLine() if form == "json" else human)
    for name in ("uvicorn", "uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_not_a_cut_call)


def _is_not_a_cut_call(record: logging.LogRecord) -> bool:
    """False for the traceback of a call cancelled at the drain deadline: the call is recorded, nothing went wrong."""
    raised = record.exc_info[1] if record.exc_info else None
    return not isinstance(raised, asyncio.CancelledError)
