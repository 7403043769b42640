"""Open files: every stream holds one connection to its harness and one to its engine, and the usual limit of 1024 ends at five
hundred of them."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Allow this process, and those it starts, as many open files as the system lets it have without asking anybody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS names a hard limit that it then refuses: what was allowed before stays.
    with contextlib.suppress(ValueError, OSError):
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
