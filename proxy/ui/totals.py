"""A session's figures in one place."""

from __future__ import annotations

from typing import Any

from proxy.ui.looks import Look


def totals(look: Look) -> dict[str, Any]:
    """Tokens by what became of them, weight versions, and seconds."""
    lines, accounting = look.lines, look.built.accounting
    versions = sorted({version for line in lines for version in line.versions})
    started = min((line.started_at for line in lines), default=None)
    return {
        "sampled": accounting.sampled_tokens,
        "exported": accounting.exported_tokens,
        "quarantined": accounting.sampled_tokens - accounting.exported_tokens,
        "items": list(accounting.quarantined),
        "versions": versions,
        "engine_seconds": sum(line.engine_seconds for line in lines),
        "seconds": None if started is None else (look.state.closed_at or look.state.updated_at) - started,
    }
