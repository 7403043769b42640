"""A runtime made ready: started, and the steps of a task carried out in it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from rollout.attempt_logs import AttemptLogs
from rollout.failures import Failure, RolloutFailed
from rollout.harness_run import last_words
from rollout.runtimes.base import Runtime
from rollout.task import Exec, PrepareStep, Upload

FETCH_SECONDS = 300.0
PAUSE_SECONDS = 1.0
"""Before a step is tried again; twice as long each further time."""


async def carry_out(steps: Sequence[PrepareStep], runtime: Runtime, env: Mapping[str, str], logs: AttemptLogs) -> None:
    """Returns when every step is done. Raises `RolloutFailed` for the first that cannot be."""
    for number, step in enumerate(steps):
        if isinstance(step, Upload):
            await put(step, runtime)
        else:
            await _exec(step, number, runtime, env, logs)


async def put(step: Upload, runtime: Runtime) -> None:
    """Raises `RolloutFailed` when there is nothing to be read at its source."""
    content = step.content if step.content is not None else await _read(step.source or "")
    if step.unpack:
        await runtime.unpack(step.path, content)
    else:
        await runtime.upload(step.path, content, mode=step.mode)


async def _exec(step: Exec, number: int, runtime: Runtime, env: Mapping[str, str], logs: AttemptLogs) -> None:
    pause = PAUSE_SECONDS
    for left in reversed(range(step.retries + 1)):
        done = await runtime.exec(
            ("sh", "-c", step.command),
            env=env,
            timeout_seconds=step.timeout_seconds,
            logs=logs.of(f"prepare-{number}"),
            network=step.network,
        )
        if done.exit_code == 0 and not done.timed_out:
            return
        if not left:
            what = f"ran longer than {step.timeout_seconds:g} s" if done.timed_out else f"ended with exit code {done.exit_code}"
            message = f"prepare step {number}, {step.command!r}, {what}: {last_words(done)}"
            raise RolloutFailed(Failure.PREPARE_FAILED, message, logs.place(f"prepare-{number}.err"))
        await asyncio.sleep(pause)
        pause *= 2


async def _read(source: str) -> bytes:
    try:
        if source.startswith(("http://", "https://")):
            async with httpx.AsyncClient(follow_redirects=True, timeout=FETCH_SECONDS) as client:
                return (await client.get(source)).raise_for_status().content
        return await asyncio.to_thread(Path(source).read_bytes)
    except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise RolloutFailed(Failure.PREPARE_FAILED, f"the upload {source} cannot be read: {error}") from error
