"""The steps of an attempt: prepare a runtime, install and run the harness, judge how its run ended, remove the runtime."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx

from contract.attempts import Failure
from contract.tasks import Exec, PrepareStep, Task, Upload
from rollout.attempts import RolloutFailed
from rollout.attempts_client import AttemptsClient, OpenSession
from rollout.harnesses.definition import Harness, find_unserved
from rollout.harnesses.limits import Limits, UnknownWindows
from rollout.harnesses.prepared import Prepared, SessionAccess, home_variables, temporary_directory
from rollout.judge import Judge
from rollout.logs import AttemptLogs
from rollout.runtimes.base import Executed, Install, Installed, NetworkRefused, ProxyAddress, Runtime, RuntimeKind
from rollout.stages import Stages

log = logging.getLogger(__name__)

FETCH_SECONDS = 300.0
RETRY_SECONDS = 1.0
"""Pause before a prepare step is retried; doubles each time."""
INSTALL_SECONDS = 900.0
NOT_EXECUTABLE, NOT_FOUND = 126, 127
SIGNALLED = 128
"""Exit codes above it are 128 + the signal that ended the command."""
BUDGET_EXHAUSTED = "budget_exhausted"
"""The service's code for a call that exceeds the session's budget."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What a node gives its rollouts. `prefix` is how the names of its runtimes begin (`node_prefix`). `url` is the service as harnesses on
    this node call it, and `proxy` its host and port, the only address a rollout reaches. `kinds` are the runtimes of this machine by name;
    `logs` is the folder of all attempts' logs."""

    name: str
    prefix: str
    url: str
    proxy: ProxyAddress
    attempts: AttemptsClient
    judge: Judge
    stages: Stages
    kinds: Mapping[str, RuntimeKind]
    logs: Path
    unknown_windows: UnknownWindows = field(default_factory=UnknownWindows)


async def carry_out(steps: Sequence[PrepareStep], runtime: Runtime, env: Mapping[str, str], logs: AttemptLogs) -> None:
    """Carry out every prepare step. Raises `RolloutFailed` for the first that fails."""
    for number, step in enumerate(steps):
        if isinstance(step, Upload):
            await _upload(step, step.path, runtime)
        else:
            await _exec(step, number, runtime, env, logs)


async def _upload(upload: Upload, path: str, runtime: Runtime) -> None:
    """Raises `RolloutFailed` if its source cannot be read."""
    content = upload.content if upload.content is not None else await _fetch(upload.source or "")
    if upload.unpack:
        await runtime.unpack(path, content)
    else:
        await runtime.upload(path, content, mode=upload.mode)


async def _fetch(source: str) -> bytes:
    try:
        if source.startswith(("http://", "https://")):
            async with httpx.AsyncClient(follow_redirects=True, timeout=FETCH_SECONDS) as client:
                return (await client.get(source)).raise_for_status().content
        return await asyncio.to_thread(Path(source).read_bytes)
    except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise RolloutFailed(Failure.PREPARE_FAILED, f"the upload {source} cannot be read: {error}") from error


async def _exec(step: Exec, number: int, runtime: Runtime, env: Mapping[str, str], logs: AttemptLogs) -> None:
    pause = RETRY_SECONDS
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
            message = f"prepare step {number}, {step.command!r}, {what}: {done.read_tail()}"
            raise RolloutFailed(Failure.PREPARE_FAILED, message, logs.place(f"prepare-{number}.err"))
        await asyncio.sleep(pause)
        pause *= 2


async def install_harness(
    kind: RuntimeKind, task: Task, harness: Harness, name: str, proxy: ProxyAddress, logs: AttemptLogs
) -> Installed:
    """The spec of a runtime with the harness in it, if the kind can install one once for many; otherwise the task's own, where
    `HarnessRun.install` installs it after the prepare steps. `name` is for a runtime that exists only during the install. Raises
    `RuntimeFailed`."""
    if harness.takes_command or not (task.harness.install and harness.install):
        return Installed(task.runtime)
    return await kind.install(task.runtime, Install(harness.argv[0], harness.install), name, proxy, logs.of("install"))


@dataclass(frozen=True, slots=True)
class HarnessRun:
    """A harness in a runtime. `earlier_failure` is why `install_harness` could not install it once for many runtimes."""

    harness: Harness
    task: Task
    runtime: Runtime
    logs: AttemptLogs
    earlier_failure: str = ""

    async def install(self) -> None:
        """Make a folder for temporary files, and install the harness if it is missing. Raises `RolloutFailed`."""
        folder = str(temporary_directory(Path(self.runtime.home)))
        done = await self.runtime.exec(("mkdir", "-p", folder), timeout_seconds=60.0)
        if done.exit_code:
            raise RolloutFailed(Failure.BAD_RUNTIME, f"{folder} cannot be made: {done.read_tail()}")
        if self.harness.takes_command or await self._is_installed():
            return
        if not self.task.harness.install or not self.harness.install:
            raise self._missing("and is not to be installed here")
        for line in self.harness.install:
            try:
                done = await self.runtime.exec(
                    ("sh", "-c", line),
                    env=self._base_environment(),
                    timeout_seconds=INSTALL_SECONDS,
                    logs=self.logs.of("install"),
                    network="full",
                )
            except NetworkRefused as error:
                raise self._missing(f"and cannot be installed there ({error}): use an image that has it") from error
            if done.exit_code:
                raise self._missing(f"and {line!r} ended with exit code {done.exit_code}: {done.read_tail()}")
        if not await self._is_installed():
            raise self._missing("even after its installation")

    async def put_skills(self) -> None:
        """Put the task's skills where the harness looks for them. Raises `RolloutFailed` if one cannot be read."""
        folder = PurePosixPath(self.runtime.home) / self.harness.skills
        for skill in self.task.harness.skills:
            await _upload(skill, str(folder / skill.path), self.runtime)

    async def run(self, service_url: str, opened: OpenSession, model: str, limits: Limits) -> Executed:
        """Run the harness against its session, within the agent's budget. Raises `RolloutFailed` if it could not be started."""
        # The service's own address may mean nothing inside the runtime.
        inside = self.runtime.map_url(service_url).rstrip("/")
        base_urls = {dialect: inside + urlsplit(given).path for dialect, given in opened.base_urls.items()}
        home = Path(self.runtime.home)
        prepared = self.harness.prepare(
            SessionAccess(base_urls, opened.api_key),
            model,
            self.task.instruction,
            home,
            workdir=Path(self.runtime.workdir),
            servers=self.task.harness.mcp_servers,
            limits=limits,
        )
        for path, text in prepared.files.items():
            await self.runtime.upload(str(home / path), text.encode(), mode=0o600)
        done = await self.runtime.exec(
            prepared.argv,
            env=self._environment(prepared),
            stdin=prepared.stdin,
            timeout_seconds=self.task.budgets.agent,
            logs=self.logs.of("agent"),
        )
        if done.exit_code in (NOT_EXECUTABLE, NOT_FOUND) and not done.timed_out and not self.harness.takes_command:
            raise self._missing(f"or does not start: {done.read_tail()}")
        return done

    async def _is_installed(self) -> bool:
        line = f"command -v {shlex.quote(self.harness.argv[0])}"
        done = await self.runtime.exec(("sh", "-c", line), env=self._base_environment(), timeout_seconds=60.0)
        return done.exit_code == 0

    def _base_environment(self) -> dict[str, str]:
        return {**home_variables(Path(self.runtime.home)), **self.task.environment}

    def _environment(self, prepared: Prepared) -> Mapping[str, str]:
        env = {**self._base_environment(), **prepared.env, **self.task.harness.env}
        return {name: value for name, value in env.items() if name not in prepared.unset}

    def _missing(self, why: str) -> RolloutFailed:
        message = f"{self.harness.name}: there is no {self.harness.argv[0]!r} in the runtime, {why}"
        if self.earlier_failure:
            # The rollout's runtime may lack what an install needs, so the earlier failure tells more.
            message += f"; once for all runtimes it could not be installed either: {self.earlier_failure}"
        return RolloutFailed(Failure.HARNESS_MISSING, message, self.logs.place("install"))


def check_run(
    harness: HarnessRun, done: Executed, calls: Sequence[Mapping[str, Any]], session: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Raises `RolloutFailed` if the run cannot be scored. Of the session its last call that the service or its engine failed counts, of
    which there may be no record, and when a recorded reply was last given to a fork."""
    unserved = session.get("unserved")
    name, look = harness.harness.name, harness.logs.place("agent.err")
    last = max(calls, key=lambda call: call["started_at"], default=None)
    if done.timed_out and calls:
        # Its last call may be unfinished because it was stopped.
        return
    if unserved is not None and unserved["code"] == BUDGET_EXHAUSTED and calls:
        # It spent its budget, and is scored for what it did with it.
        return
    # A failed call is not the agent's doing, whatever it made of it.
    if last is not None and last["status"] == "dangling":
        raise RolloutFailed(Failure.SERVICE_FAILED, f"the service died in the last call of {name}, {last['call_id']}", look)
    if (failed := find_unserved(calls, session)) is not None:
        message = f"the last call of {name}, {failed['call_id']}, was not served: {failed['code']}: {failed['message']}"
        raise RolloutFailed(Failure.SERVICE_FAILED, message, look)
    if done.exit_code > SIGNALLED and not done.timed_out:
        message = f"{name} was ended by signal {done.exit_code - SIGNALLED}: {done.read_tail()}"
        raise RolloutFailed(Failure.HARNESS_CRASHED, message, look)
    if not done.timed_out and not harness.harness.has_finished(done.exit_code, calls):
        raise RolloutFailed(Failure.HARNESS_FAILED, f"{name} ended with exit code {done.exit_code}: {done.read_tail()}", look)
    if not calls:
        raise RolloutFailed(Failure.NO_CALLS, f"{name} never called the model: {done.read_tail()}", look)


async def remove(runtime: Runtime) -> None:
    """Remove the runtime, even when cancelled meanwhile: the cancellation is raised afterwards. A failure is logged and left to the sweep
    at the node's next start, so that it does not change the rollout's outcome."""
    stopping = asyncio.create_task(_stop(runtime))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await asyncio.wait([stopping])
        raise


async def _stop(runtime: Runtime) -> None:
    try:
        await runtime.stop()
    except Exception:
        log.exception("a runtime could not be removed")
