"""The node's own machine as a runtime: a folder of its own, and every command in a sandbox of bubblewrap with limits on it.

Option `sandbox`: `bwrap` (the default), or `none`, with which a command may read, write and reach whatever the node's user may; a task
has to want both that and `network: full`. Processes do not outlive the command that started them; files do.
"""

from __future__ import annotations

import asyncio
import os
import platform
import posixpath
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollout.runtimes import installs, processes, route, seccomp
from rollout.runtimes.base import (
    GRACE_SECONDS,
    BadRuntime,
    DiskFull,
    Executed,
    Install,
    Installed,
    Logs,
    Route,
    RuntimeFailed,
    check_common,
    check_options,
    check_path,
    no_room,
)
from rollout.runtimes.command import CannotPass, Held, Limits, finished, shell, variables
from rollout.runtimes.files import FilesByCommand
from rollout.runtimes.installs import deleted, owned
from rollout.runtimes.local import resources
from rollout.runtimes.local.sandbox import OWN, SYSTEM, USER, View, private, sandboxed, supervised
from rollout.runtimes.local.supervisor import MARK
from rollout.runtimes.settings import RuntimeSettings, from_environment
from rollout.task import Network, RuntimeSpec

HOME, WORKDIR = "/home/agent", "/workspace"
"""In a sandbox."""
_START_SECONDS = 60.0
_SWEEP_SECONDS = 10.0


class LocalKind:
    """`grace_seconds` is what a command has between SIGTERM and SIGKILL."""

    name = "local"

    def __init__(self, settings: RuntimeSettings | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.settings = settings or from_environment()
        self.grace_seconds = grace_seconds
        self.installs = installs.LocalInstalls(self.make, self.settings)

    def check(self, spec: RuntimeSpec) -> None:
        check_common(spec)
        check_options(spec, ("sandbox",))
        sandbox = spec.options.get("sandbox", "bwrap")
        if sandbox not in ("bwrap", "none"):
            raise BadRuntime(f"options.sandbox cannot be {sandbox!r}: choose bwrap or none")
        if spec.image is not None:
            raise BadRuntime(f"image: a local runtime has none ({spec.image!r}): it is the node's own system")
        if spec.workdir is not None:
            first = check_path("workdir", spec.workdir).split("/")[1]
            if first in (*SYSTEM, *OWN) or HOME.startswith(spec.workdir):
                raise BadRuntime(f"workdir: {spec.workdir} is the system's, or holds the home: choose another")
        if sandbox == "none" and (spec.network != "full" or spec.workdir is not None):
            raise BadRuntime("options.sandbox none keeps nothing from the network and has a workdir of its own: "
                             "say network full and no workdir with it")  # fmt: skip

    async def missing(self) -> str | None:
        if sys.platform != "linux":
            return "local runtimes need Linux"
        if self.settings.cgroup is not None and not resources.hierarchies(self.settings.cgroup):
            return f"VERBATIM_CGROUP: no control group with memory, cpu and pids can be made below {self.settings.cgroup}"
        if self.settings.local_sandbox == "none":
            return None
        program = shutil.which("bwrap")
        if program is None:
            return (
                "bubblewrap (bwrap) is not installed; with VERBATIM_LOCAL_SANDBOX=none tasks without a sandbox run all the same"
            )
        probe = [program, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "/bin/true"]
        process = await asyncio.create_subprocess_exec(*probe, stderr=asyncio.subprocess.PIPE)
        _, told = await process.communicate()
        return f"bubblewrap does not work here: {told.decode(errors='replace').strip()}" if process.returncode else None

    def limits(self) -> str:
        sentences = [resources.held_by(resources.hierarchies(self.settings.cgroup))]
        if seccomp.own() is None:
            sentences.append(f"system calls are not filtered on {platform.machine()}")
        return "; ".join(sentences)

    def make(self, spec: RuntimeSpec, name: str, route: Route) -> LocalRuntime:
        return LocalRuntime(self, spec, name, route)

    async def installed(self, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs) -> Installed:
        return await self.installs.installed(spec, install, name, route, logs)

    async def sweep(self, prefix: str) -> int:
        folder = self.settings.local_dir
        names = [each.name for each in folder.iterdir() if each.name.startswith(prefix)] if folder.is_dir() else []
        for name in names:
            await removed(self, name)
        return len(names)


class LocalRuntime(FilesByCommand):
    """Commands run one beside the other, each in a sandbox of its own over the same files."""

    def __init__(self, kind: LocalKind, spec: RuntimeSpec, name: str, route: Route) -> None:
        self._kind = kind
        self._spec = spec
        self.name = name
        self._route = route
        self._folder = kind.settings.local_dir / name
        self._sandbox = spec.options.get("sandbox", "bwrap") == "bwrap"
        self._resources = resources.Resources(spec, name, resources.hierarchies(kind.settings.cgroup))
        self._running: set[asyncio.Task[object]] = set()
        self._held_install: int | None = None
        self.home = HOME if self._sandbox else str(self._folder / "home")
        self.workdir = (spec.workdir or WORKDIR) if self._sandbox else str(self._folder / "work")

    async def start(self) -> None:
        self._claim()
        try:
            self._held_install = self._kind.installs.held(self._spec)
            self._make_folders()
            self._resources.make()
            done = await self.exec(["true"], timeout_seconds=_START_SECONDS)
            if done.exit_code != 0:
                raise RuntimeFailed(f"the runtime {self.name} runs nothing: {done.stderr.decode(errors='replace').strip()}")
        except OSError as error:
            await self.stop()
            raise (DiskFull if no_room(error) else RuntimeFailed)(f"the runtime {self.name} cannot be made: {error}") from error
        except BaseException:
            await self.stop()
            raise

    def _claim(self) -> None:
        """Takes the name. What is there under it is another's, and stays."""
        try:
            owned(self._kind.settings.local_dir, "VERBATIM_LOCAL_DIR")
            self._folder.mkdir(mode=0o700)
        except OSError as error:
            raise (DiskFull if no_room(error) else RuntimeFailed)(f"the runtime {self.name} cannot be made: {error}") from error

    def _make_folders(self) -> None:
        for name in ("home", "work", "tmp", "shm", "etc"):
            (self._folder / name).mkdir()
        etc = self._folder / "etc"
        (etc / "hosts").write_text(route.hosts(self._route))
        (etc / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\nagent:x:{USER}:{USER}::{HOME}:/bin/sh\n")
        (etc / "group").write_text(f"root:x:0:\nagent:x:{USER}:\n")

    def base_url(self, url: str) -> str:
        return route.inside(self._route, url) if self._spec.network == "proxy" else url

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        stdin: bytes = b"",
        timeout_seconds: float,
        logs: Logs | None = None,
        network: Network | None = None,
    ) -> Executed:
        limits = Limits(timeout_seconds, logs, self._kind.grace_seconds)
        return await self._run(argv, stdin, limits, env, workdir, network or self._spec.network)

    async def _in_files(self, argv: Sequence[str], stdin: bytes, limits: Limits) -> Executed:
        return await self._run(argv, stdin, limits, {"LC_ALL": "C"}, "/", "full")

    async def _run(
        self,
        argv: Sequence[str],
        stdin: bytes,
        limits: Limits,
        env: Mapping[str, str] | None,
        workdir: str | None,
        network: Network,
    ) -> Executed:
        place = posixpath.join(self.workdir, workdir) if workdir else self.workdir
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            line = shell(place, argv)
            whole = variables(self._environment(), {"PWD": place}, env)
            async with self._held(line, whole, network) as held:
                return await self._done(held, stdin, limits, network)
        except CannotPass as error:
            return error.executed()
        finally:
            self._running.discard(task)

    async def _done(self, held: Held, stdin: bytes, limits: Limits, network: Network) -> Executed:
        over = False

        def kill() -> None:
            nonlocal over
            over = True
            held.send(signal.SIGKILL)

        async with AsyncExitStack() as stack:
            try:
                self._resources.hold(held.pid)
            except (OSError, ValueError) as error:
                raise RuntimeFailed(f"the command cannot be put under its limits: {error}") from error
            if network == "proxy" and self._sandbox:
                await stack.enter_async_context(route.Passage(held.pid, self._route))
            held.release()
            watch = asyncio.ensure_future(self._resources.watched(held.pids, kill))
            try:
                done = await finished(held.process, stdin, limits, held.send)
            finally:
                watch.cancel()
        if reason := await held.failure(done):
            raise RuntimeFailed(f"{reason} (runtime {self.name})")
        return Executed(137, done.stdout, done.stderr, done.timed_out, done.seconds) if over else done

    @asynccontextmanager
    async def _held(self, line: Sequence[str], env: Mapping[str, str], network: Network) -> AsyncIterator[Held]:
        owner = {MARK: self.name}
        if not self._sandbox:
            async with supervised(line, env, owner) as held:
                yield held
            return
        program = shutil.which("bwrap")
        if program is None:
            raise RuntimeFailed("bubblewrap (bwrap) is not installed: there is no sandbox for the command")
        view = await asyncio.to_thread(self._view)
        machine = seccomp.own()
        calls = seccomp.compiled(machine, shared_memory=self._resources.by_the_kernel) if machine else None
        async with sandboxed(program, view.arguments(network=network == "full"), calls, line, env, owner) as held:
            yield held

    def _view(self) -> View:
        folder = self._folder
        own = [(folder / "home", HOME), (folder / "tmp", "/tmp"), (folder / "shm", "/dev/shm"), (folder / "work", self.workdir)]
        readable = [(Path(each), each) for each in self._kind.settings.local_readable]
        readable += installs.readable_of(self._spec)
        readable += [(folder / "etc" / name, f"/etc/{name}") for name in ("hosts", "passwd", "group")]
        return View(own, readable, private(Path("/etc")))

    def _environment(self) -> dict[str, str]:
        temporary = {} if self._sandbox else {"TMPDIR": str(self._folder / "tmp")}
        path = installs.path_of(self._spec, self._kind.settings.local_path)
        return {"PATH": path, "HOME": self.home, "LANG": "C.UTF-8", **temporary}

    async def stop(self) -> None:
        current = asyncio.current_task()
        running = [task for task in self._running if task is not current]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await removed(self._kind, self.name)
        if self._held_install is not None:
            os.close(self._held_install)
            self._held_install = None


async def removed(kind: LocalKind, name: str) -> None:
    """Ends what runs of the runtime of that name, whoever started it, and removes its files."""
    deadline = asyncio.get_running_loop().time() + _SWEEP_SECONDS
    number = signal.SIGTERM
    while outer := processes.started_with(MARK.encode(), name.encode(), processes.running()):
        processes.send(outer, number)
        await asyncio.sleep(0.05)
        if asyncio.get_running_loop().time() > deadline:
            number = signal.SIGKILL
    await resources.removed(each.folder / name for each in resources.hierarchies(kind.settings.cgroup))
    await asyncio.to_thread(deleted, kind.settings.local_dir / name)
