"""Logging of the served processes: everything to stderr, stdout is for what a person asked to see."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from datetime import UTC, datetime

from cli.refusal import Refusal

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("human", "json")
LONGEST_TEXT = 8192
"""Characters of a message or a traceback in JSON: what collects logs drops or splits longer lines."""

_KEY = re.compile(r"vb-[0-9a-f]{40}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class OneLine(logging.Formatter):
    """A record's message on one line, whatever a caller put into a path or a name, and without session keys."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return _KEY.sub("vb-...", super().format(record))


class JsonLine(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, what it carries as `fields`, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:LONGEST_TEXT],
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            # Its end says what happened.
            told["exception"] = self.formatException(record.exc_info)[-LONGEST_TEXT:]
        present = {name: value for name, value in told.items() if value is not None}
        return _KEY.sub("vb-...", json.dumps(present, default=str))


def configure(level: str, form: str = "human") -> None:
    """Send all logging of this process to stderr at `level`. Raises `Refusal` (exit code 2) for an unknown level or form."""
    if level.lower() not in LEVELS:
        raise Refusal(f"--log-level cannot be {level!r}: choose one of {', '.join(LEVELS)}", exit_code=2)
    if form not in FORMATS:
        raise Refusal(f"--log-format cannot be {form!r}: choose one of {', '.join(FORMATS)}", exit_code=2)
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        force=True,
    )
    human = OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLine() if form == "json" else human)
    for name in ("uvicorn", "uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut_call)


def _is_no_cut_call(record: logging.LogRecord) -> bool:
    """False for the traceback of a call that the drain deadline cancelled: the call is recorded, nothing went wrong."""
    raised = record.exc_info[1] if record.exc_info else None
    return not isinstance(raised, asyncio.CancelledError)
