"""A runtime made ready: started, and the steps of a task carried out in it."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx

from rollout.attempts import AttemptId, Failure, RolloutFailed
from rollout.evaluators.base import Run
from rollout.harnesses.definition import Harness
from rollout.harnesses.prepared import Endpoint, Prepared, temporary_directory
from rollout.runtimes.base import Executed, Install, Installed, Logs, Route, Runtime, RuntimeKind
from rollout.sessions import Judge, OpenSession, Sessions, first_model
from rollout.stages import Stages
from rollout.store.base import WorkStore
from rollout.task import Exec, PrepareStep, Task, Upload

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
            message = f"prepare step {number}, {step.command!r}, {what}: {read_tail(done)}"
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


# Skills of a task, put where its harness looks for them.


async def put_skills(harness: HarnessRun) -> None:
    """Raises `RolloutFailed` for one that cannot be read."""
    folder = PurePosixPath(harness.runtime.home) / harness.harness.skills
    for skill in harness.task.harness.skills:
        await put(replace(skill, path=str(folder / skill.path)), harness.runtime)


# The runtime of a task with its harness in it, where the kind of runtime can install one once for many.


async def install_harness(
    kind: RuntimeKind, task: Task, harness: Harness, name: str, route: Route, logs: AttemptLogs
) -> Installed:
    """The task's spec, with the harness in it or not: `HarnessRun.install` looks, once the prepare steps are done. `name` is that of
    a runtime which is there for the install alone. Raises `RuntimeFailed`."""
    if harness.takes_command or not (task.harness.install and harness.install):
        return Installed(task.runtime)
    return await kind.install(task.runtime, Install(harness.argv[0], harness.install), name, route, logs.of("install"))


# The end of a runtime, which is brought about whatever happens to the rollout meanwhile.


log = logging.getLogger(__name__)


async def remove(runtime: Runtime) -> None:
    """Returns when the runtime is gone; a cancellation is passed on only then. One that cannot be removed is logged and left to the
    sweep of the node's next start: what the rollout came to stays as it is."""
    stopping = asyncio.create_task(_stopped(runtime))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await asyncio.wait([stopping])
        raise


async def _stopped(runtime: Runtime) -> None:
    try:
        await runtime.stop()
    except Exception:
        log.exception("a runtime could not be removed")


# The logs of one attempt, on the node that made it.


class AttemptLogs:
    """A folder with `<what>.out` and `<what>.err` for each thing that ran: prepare, install, agent, evaluate, ..."""

    def __init__(self, node: str, root: Path, attempt: AttemptId, prefix: str = "") -> None:
        self._node = node
        self._root = root
        self._attempt = attempt
        self._prefix = prefix
        self.folder = root / attempt.task_id / f"{attempt.index}.{attempt.attempt}"

    def make(self) -> None:
        """Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def of(self, what: str) -> Logs:
        return Logs(self.folder / f"{self._prefix}{what}.out", self.folder / f"{self._prefix}{what}.err")

    def named(self, prefix: str) -> AttemptLogs:
        """The same folder, with `<prefix>-` before the name of every log."""
        return AttemptLogs(self._node, self._root, self._attempt, f"{prefix}-")

    def place(self, what: str = "") -> str:
        """Where a person finds them: `<node>:<path>`."""
        return f"{self._node}:{self.folder / (self._prefix + what) if what else self.folder}"


# A harness inside a runtime: installed where it is missing, given its files, run for as long as the agent's budget lasts.


INSTALL_SECONDS = 900.0
NOT_EXECUTABLE, NOT_FOUND = 126, 127


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
                raise self._missing(f"and {line!r} ended with exit code {done.exit_code}: {read_tail(done)}")
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
            raise self._missing(f"or does not start: {read_tail(done)}")
        return done

    async def _make_temporary_directory(self) -> None:
        place = str(temporary_directory(Path(self.runtime.home)))
        done = await self.runtime.exec(("mkdir", "-p", place), timeout_seconds=60.0)
        if done.exit_code:
            raise RolloutFailed(Failure.BAD_RUNTIME, f"{place} cannot be made: {read_tail(done)}")

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


def read_tail(done: Executed, characters: int = 500) -> str:
    """The end of what a command said, of stderr where it said something there."""
    text = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")
    return text[-characters:] or "it said nothing"


# The run of an agent: the harness works against its session, and what it did is held against what can be trained on.


T = TypeVar("T")
BUDGET_EXHAUSTED = "budget_exhausted"
"""The service's word for a call that the session's budget did not cover."""
SIGNALLED = 128
"""Exit codes above it say which signal ended a command."""


Calls = Sequence[Mapping[str, Any]]
Unserved = Mapping[str, Any]
"""The session's last call that the service or its engine failed, of which there may be no record."""


class Patiently(Protocol):
    """Gives what it is given to do, however long the service does not answer."""

    async def __call__(self, act: Callable[[], Awaitable[T]], /) -> T: ...


async def run_agent(
    parts: NodeParts, harness: HarnessRun, opened: OpenSession, attempt: AttemptId, patiently: Patiently
) -> Run:
    """How the harness's run ended, well or by its own budget. Raises `RolloutFailed` for every other end."""
    endpoint = Endpoint(_urls_inside(parts.url, opened.base_urls, harness.runtime), opened.api_key)
    # Without an engine its first call would fail, and the attempt be used up.
    await patiently(parts.sessions.ready)
    model = harness.task.model or ""
    if not model and harness.harness.takes_model:
        model = await patiently(lambda: first_model(parts.url, opened))
    done = await harness.start(endpoint, model)
    calls = await patiently(lambda: parts.sessions.calls(attempt.session_id))
    session = await patiently(lambda: parts.sessions.load(attempt.session_id))
    check(harness, done, calls, session.get("unserved"))
    return Run(attempt.session_id, None if done.timed_out else done.exit_code, done.timed_out, done.stdout, done.stderr, calls)


def check(harness: HarnessRun, done: Executed, calls: Calls, unserved: Unserved | None = None) -> None:
    """Raises `RolloutFailed` where what the agent did, and what was recorded of it, is nothing to be scored."""
    name, look = harness.harness.name, harness.logs.place("agent.err")
    last = max(calls, key=lambda call: call["started_at"], default=None)
    if done.timed_out and calls:
        # It was stopped in the middle of whatever call it was in.
        return
    if unserved is not None and unserved["code"] == BUDGET_EXHAUSTED and calls:
        # However it ended: it did what it did with what it was given.
        return
    # Whatever the agent made of it, this is not how it would have gone on.
    if last is not None and last["status"] == "dangling":
        raise RolloutFailed(Failure.SERVICE_FAILED, f"the service died in the last call of {name}, {last['call_id']}", look)
    if unserved is not None and (last is None or last["started_at"] < unserved["at"]):
        message = f"the last call of {name}, {unserved['call_id']}, was not served: {unserved['code']}: {unserved['message']}"
        raise RolloutFailed(Failure.SERVICE_FAILED, message, look)
    if done.exit_code > SIGNALLED and not done.timed_out:
        message = f"{name} was ended by signal {done.exit_code - SIGNALLED}: {read_tail(done)}"
        raise RolloutFailed(Failure.HARNESS_CRASHED, message, look)
    if done.exit_code and not done.timed_out:
        raise RolloutFailed(Failure.HARNESS_FAILED, f"{name} ended with exit code {done.exit_code}: {read_tail(done)}", look)
    if not calls:
        raise RolloutFailed(Failure.NO_CALLS, f"{name} never called the model: {read_tail(done)}", look)


def _urls_inside(url: str, base_urls: Mapping[str, str], runtime: Runtime) -> dict[str, str]:
    """The session's base URLs as the runtime reaches them: the service's own name for itself may mean nothing there."""
    inside = runtime.map_url(url).rstrip("/")
    return {dialect: inside + urlsplit(given).path for dialect, given in base_urls.items()}


# What a node is made of, as its rollouts see it.


@dataclass(frozen=True, slots=True)
class NodeParts:
    """`url` is the service as harnesses on this node call it, `route` its host and port: all of it that a rollout reaches. `kinds` are the
    runtimes that this machine has, by name; `logs` is the folder of all attempts' logs."""

    name: str
    url: str
    route: Route
    work: WorkStore
    sessions: Sessions
    judge: Judge
    stages: Stages
    kinds: Mapping[str, RuntimeKind]
    logs: Path
