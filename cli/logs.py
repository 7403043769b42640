"""Logging of the served processes: everything to stderr, stdout is for what a person asked to see."""

from __future__ import annotations

import asyncio
import logging
import sys

from cli.refusal import Refusal

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str) -> None:
    """Send all logging of this process to stderr at `level`. Raises `Refusal` (exit code 2) for an unknown level."""
    if level.lower() not in LEVELS:
        raise Refusal(f"--log-level cannot be {level!r}: choose one of {', '.join(LEVELS)}", exit_code=2)
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    for name in ("uvicorn", "uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut_call)


def _is_no_cut_call(record: logging.LogRecord) -> bool:
    """False for the traceback of a call that the drain deadline cancelled: the call is recorded, nothing went wrong."""
    raised = record.exc_info[1] if record.exc_info else None
    return not isinstance(raised, asyncio.CancelledError)
