"""An install carried out in a runtime: whether its command is there, and its lines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rollout.runtimes.base import Install, Logs, Runtime, RuntimeFailed

INSTALL_SECONDS, LOOK_SECONDS = 900.0, 60.0
LEAST_MEMORY_MB = 2048
"""What an install gets at least: it is no rollout's."""


async def is_there(runtime: Runtime, install: Install, env: Mapping[str, str] | None = None) -> bool:
    line = f"command -v {shlex.quote(install.command)}"
    return (await runtime.exec(("sh", "-c", line), env=env, timeout_seconds=LOOK_SECONDS)).exit_code == 0


async def carry_out(
    runtime: Runtime, install: Install, logs: Logs, *, first: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> None:
    """Returns when every line was run, those of `first` before them, and the command is there. Raises `RuntimeFailed`."""
    for line in (*first, *install.lines):
        done = await runtime.exec(("sh", "-c", line), env=env, timeout_seconds=INSTALL_SECONDS, logs=logs)
        if done.exit_code:
            said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")
            raise RuntimeFailed(f"{line!r} ended with exit code {done.exit_code}: {said[-500:]}")
    if not await is_there(runtime, install, env):
        raise RuntimeFailed(f"there is no {install.command!r} where it was to be, after its installation")
