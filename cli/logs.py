"""Logging of the served processes: everything to stderr, stdout is for what a person asked to see."""

from __future__ import annotations

import asyncio
import logging
import re
import sys

from cli.refusal import Refusal

LEVELS = ("debug", "info", "warning", "error")


_KEY = re.compile(r"vb-[0-9a-f]{40}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class OneLine(logging.Formatter):
    """A record's message on one line, whatever a caller put into a path or a name, and without session keys."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return _KEY.sub("vb-...", super().format(record))


def configure(level: str) -> None:
    """Send all logging of this process to stderr at `level`. Raises `Refusal` (exit code 2) for an unknown level."""
    if level.lower() not in LEVELS:
        raise Refusal(f"--log-level cannot be {level!r}: choose one of {', '.join(LEVELS)}", exit_code=2)
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("uvicorn", "uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut_call)


def _is_no_cut_call(record: logging.LogRecord) -> bool:
    """False for the traceback of a call that the drain deadline cancelled: the call is recorded, nothing went wrong."""
    raised = record.exc_info[1] if record.exc_info else None
    return not isinstance(raised, asyncio.CancelledError)
