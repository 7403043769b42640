"""A harness inside a runtime: installed where it is missing, given its files, run for as long as the agent's budget lasts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.attempt_logs import AttemptLogs
from rollout.failures import Failure, RolloutFailed
from rollout.harnesses.catalogue import load
from rollout.harnesses.definition import Harness, parsed
from rollout.harnesses.prepared import Endpoint, Prepared, temporary_directory
from rollout.runtimes.base import Executed, Runtime
from rollout.task import HarnessSpec, Task

INSTALL_SECONDS = 900.0
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def definition_of(spec: HarnessSpec) -> Harness:
    """The harness that the task names or defines. Raises `HarnessError`."""
    return load(spec.name) if spec.definition is None else parsed(spec.definition, spec.name)


@dataclass(frozen=True, slots=True)
class HarnessRun:
    """`earlier_failure`: why it could not be installed once for all runtimes that are alike, where that was tried."""

    harness: Harness
    task: Task
    runtime: Runtime
    logs: AttemptLogs
    earlier_failure: str = ""

    async def install(self) -> None:
        """Returns when the harness's command is there, and a place for temporary files. Raises `RolloutFailed`."""
        await self._make_temporary_directory()
        if self.harness.takes_command or await self._is_there():
            return
        if not self.task.harness.install or not self.harness.install:
            raise self._missing("and is not to be installed here")
        for line in self.harness.install:
            done = await self.runtime.exec(
                ("sh", "-c", line),
                env=self._surroundings(),
                timeout_seconds=INSTALL_SECONDS,
                logs=self.logs.of("install"),
                network="full",
            )
            if done.exit_code:
                raise self._missing(f"and {line!r} ended with exit code {done.exit_code}: {last_words(done)}")
        if not await self._is_there():
            raise self._missing("even after its installation")

    async def start(self, endpoint: Endpoint, model: str) -> Executed:
        """What it did, within the agent's budget. Raises `RolloutFailed` when it could not be started."""
        home, workdir = Path(self.runtime.home), Path(self.runtime.workdir)
        prepared = self.harness.prepared(
            endpoint, model, self.task.instruction, home, workdir=workdir, servers=self.task.harness.mcp_servers
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
            raise self._missing(f"or does not start: {last_words(done)}")
        return done

    async def _make_temporary_directory(self) -> None:
        place = str(temporary_directory(Path(self.runtime.home)))
        done = await self.runtime.exec(("mkdir", "-p", place), timeout_seconds=60.0)
        if done.exit_code:
            raise RolloutFailed(Failure.BAD_RUNTIME, f"{place} cannot be made: {last_words(done)}")

    async def _is_there(self) -> bool:
        line = f"command -v {shlex.quote(self.harness.argv[0])}"
        done = await self.runtime.exec(("sh", "-c", line), env=self._surroundings(), timeout_seconds=60.0)
        return done.exit_code == 0

    def _surroundings(self) -> dict[str, str]:
        home = Path(self.runtime.home)
        return {"HOME": str(home), "TMPDIR": str(temporary_directory(home)), **self.task.environment}

    def _environment(self, prepared: Prepared) -> Mapping[str, str]:
        env = {**self._surroundings(), **prepared.env, **self.task.harness.env}
        return {name: value for name, value in env.items() if name not in prepared.unset}

    def _missing(self, why: str) -> RolloutFailed:
        message = f"{self.harness.name}: there is no {self.harness.argv[0]!r} in the runtime, {why}"
        if self.earlier_failure:
            # What a rollout has may lack what an install needs, so that this is the one that tells more.
            message += f"; once for all runtimes it could not be installed either: {self.earlier_failure}"
        return RolloutFailed(Failure.HARNESS_MISSING, message, self.logs.place("install"))


def last_words(done: Executed, characters: int = 500) -> str:
    """The end of what a command said, of stderr where it said something there."""
    text = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")
    return text[-characters:] or "it said nothing"
