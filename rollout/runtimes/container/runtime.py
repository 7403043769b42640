"""A container as a runtime, by the command line of docker or podman (kind `docker`).

The engine runs on the node's machine and the node as root: the way to the proxy (`route`) and the end of what a command started need
the container's processes. Commands have the image's own variables; it needs `sh`, `sleep` and what `files` needs. They run as root with
the few capabilities by which packages are installed, or as option `user` says: then with none, and home and workdir are the node's to
give. No program gives them more, and the engine's own filter of system calls holds them.

The network of `full` is the engine's, not the node's; for a single step it is that of a container beside, in which nothing else happens.
The proxy is reached over `route` in either.

How a command gets its environment is said in `container_script`.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollout.runtimes import processes, seccomp
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
from rollout.runtimes.command import CannotPass, Limits, exports, finished, shell, started, variables
from rollout.runtimes.files import FilesByCommand
from rollout.runtimes.installs import ImageInstalls, Uses, deleted, owned
from rollout.runtimes.local.resources import PIDS
from rollout.runtimes.processes import MARK, ContainerProcesses, kill_tree
from rollout.runtimes.route import Passage, inside, named
from rollout.runtimes.settings import RuntimeSettings, from_environment
from rollout.task import Network, RuntimeSpec

HOME, WORKDIR = "/root", "/workspace"
USERS_HOME = "/home/agent"
LABEL = "verbatim.runtime"
USER_BESIDE = 65534
_ENTER = Path(__file__).with_name("enter.py")
ROOTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""Capabilities of root inside: to install packages and to unpack as their owners."""
_FIRST = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"
START_SECONDS = 60.0
_CLIENT_SECONDS = 10.0
"""What the engine's client has for noticing that its command was killed."""


class ContainerKind:
    name = "docker"
    folder_variable = "VERBATIM_CONTAINER_DIR"

    def __init__(self, settings: RuntimeSettings | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.settings = settings or from_environment()
        self.grace_seconds = grace_seconds
        layers = self.settings.container_dir.with_name(f"{self.settings.container_dir.name}-layers")
        self._installs = ImageInstalls(self.make, Uses(layers, self.settings.installs_kept, "VERBATIM_CONTAINER_DIR"))

    @property
    def folder(self) -> Path:
        """For what the node passes into containers, of which each has a folder."""
        return self.settings.container_dir

    async def engine(self) -> Engine:
        """Raises `RuntimeFailed`."""
        return await found(self.settings)

    def check(self, spec: RuntimeSpec) -> None:
        check_common(spec)
        check_options(spec, ("user",))
        user = spec.options.get("user", 0)
        if type(user) is not int or user < 0:
            raise BadRuntime(f"options.user: {user!r} is not the number of a user")
        if not spec.image or spec.image.startswith("-"):
            raise BadRuntime(f"image: {spec.image!r} is not the name of an image, which a container needs")
        if spec.workdir is not None:
            check_path("workdir", spec.workdir)

    async def missing(self) -> str | None:
        if os.geteuid() != 0:
            return "containers need a node that runs as root"
        try:
            await self.engine()
        except RuntimeFailed as error:
            return str(error)
        return None

    def limits(self) -> str:
        return f"memory, CPUs and {PIDS} processes are held by the container engine"

    def make(self, spec: RuntimeSpec, name: str, route: Route) -> ContainerRuntime:
        return ContainerRuntime(self, spec, name, route)

    async def installed(self, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs) -> Installed:
        return await self._installs.installed(await self.engine(), spec, install, name, route, logs)

    async def sweep(self, prefix: str) -> int:
        engine, folder = await self.engine(), self.folder
        names = {each for each in await engine.names(LABEL) if each.startswith(prefix)}
        names |= {each.name for each in folder.iterdir() if each.name.startswith(prefix)} if folder.is_dir() else set()
        for name in names:
            await engine.removed(name)
            await asyncio.to_thread(deleted, folder / name)
        return len(names)


class ContainerRuntime(FilesByCommand):
    """One container, which lives from `start` to `stop`."""

    def __init__(self, kind: ContainerKind, spec: RuntimeSpec, name: str, route: Route) -> None:
        self._kind = kind
        self._spec = spec
        self.name = name
        self._route = route
        self._folder = kind.folder / name
        self._user = int(spec.options.get("user", kind.settings.container_user))
        self._engine: Engine | None = None
        self._beside: int | None = None
        """The first process of the container beside, whose network is a step's; 0: it is being made. None: nobody has asked for it."""
        self._making_beside = asyncio.Lock()
        self._claimed = False
        self._passage: Passage | None = None
        self._processes: ContainerProcesses | None = None
        self._running: set[asyncio.Task[object]] = set()
        self.home = USERS_HOME if self._user else HOME
        self.workdir = spec.workdir or WORKDIR

    async def start(self) -> None:
        self._engine = await self._kind.engine()
        self._claim()
        try:
            await self._make(self._engine)
        except BaseException:
            await self.stop()
            raise

    def _claim(self) -> None:
        try:
            owned(self._kind.folder, self._kind.folder_variable)
            self._folder.mkdir(mode=0o700)
        except OSError as error:
            raise (DiskFull if no_room(error) else RuntimeFailed)(f"the runtime {self.name} cannot be made: {error}") from error
        self._claimed = True

    async def _make(self, engine: Engine) -> None:
        first = await self._begun(engine)
        namespace = processes.namespace(first, "pid") if first else None
        if namespace is None or namespace == processes.namespace(os.getpid(), "pid"):
            raise RuntimeFailed(f"the container {self.name} has ended, or its processes are not this machine's")
        self._processes = ContainerProcesses(first, namespace)
        if self._passes_on:
            self._passage = await Passage(first, self._route).__aenter__()
        done = await self._run(["mkdir", "-p", self.workdir, self.home], b"", Limits(START_SECONDS), None, "/")
        if done.exit_code != 0:
            raise RuntimeFailed(f"{self.workdir} cannot be made: {done.stderr.decode(errors='replace').strip()}")
        await self._check_workdir()

    async def _check_workdir(self) -> None:
        if self._user and (await self._run(["test", "-w", self.workdir], b"", Limits(START_SECONDS), None, "/")).exit_code:
            raise RuntimeFailed(
                f"the user {self._user} cannot write {self.workdir} of the image {self._spec.image}: say options.user 0, or another"
            )

    @property
    def _passes_on(self) -> bool:
        """Whether the node passes on to the proxy what connects in the container."""
        return self._spec.network == "proxy" or self._kind.settings.container_network != "host"

    async def _begun(self, engine: Engine) -> int:
        """Makes the container; its first process as the node's machine counts it, 0 where there is none."""
        image = self._spec.image
        assert image is not None
        if not await engine.has_image(image):
            await engine.pull(image)
        self._give_folders()
        return await self._first_of(engine, self.name, *self._flags())

    async def _first_of(self, engine: Engine, name: str, *flags: str) -> int:
        """Makes a container of the image; its first process."""
        assert self._spec.image is not None
        await engine.run(*flags, self._spec.image, "-c", _FIRST)
        told = await engine.told("inspect", "--format", "{{.State.Pid}}", name)
        return int(told) if told.isdigit() else 0

    def _give_folders(self) -> None:
        try:
            for name in ("inside", "home", "work") if self._user else ("inside",):
                (self._folder / name).mkdir()
                os.chown(self._folder / name, self._user, self._user)
        except OSError as error:
            raise (DiskFull if no_room(error) else RuntimeFailed)(f"{self._folder} cannot be filled: {error}") from error

    def _held_flags(self, name: str, user: int, network: str) -> list[str]:
        """Of every container: whose it is, and what it may not."""
        words = ["--detach", "--name", name, "--label", f"{LABEL}={name}", "--user", f"{user}:{user}", "--workdir", "/"]
        words += ["--network", network, "--entrypoint", "/bin/sh", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        return words

    def _flags(self) -> list[str]:
        spec, settings = self._spec, self._kind.settings
        memory = f"{spec.memory_mb}m"
        words = self._held_flags(self.name, self._user, "none" if spec.network == "proxy" else settings.container_network)
        words += [] if self._user else [word for name in ROOTS for word in ("--cap-add", name)]
        words += ["--cpus", f"{spec.cpus:g}", "--memory", memory, "--memory-swap", memory, "--pids-limit", str(PIDS)]
        words += ["--volume", f"{self._passed}:{INSIDE}"]
        if self._user:
            words += ["--volume", f"{self._folder}/home:{USERS_HOME}"]
            words += ["--volume", f"{self._folder}/work:{self.workdir}"] if spec.workdir is None else []
        if spec.disk_mb is not None:
            words += ["--ulimit", f"fsize={spec.disk_mb << 20}:{spec.disk_mb << 20}"]
        if (name := named(self._route.host)) is not None and self._passes_on:
            words += ["--add-host", f"{name}:127.0.0.1"]
        return [*words, *settings.container_run_flags]

    @property
    def _passed(self) -> Path:
        """The folder of the node that is mounted at `INSIDE`."""
        return self._folder / "inside"

    def base_url(self, url: str) -> str:
        return inside(self._route, url) if self._passes_on else url

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
        place = posixpath.join(self.workdir, workdir) if workdir else self.workdir
        return await self._run(argv, stdin, limits, env, place, network)

    async def _in_files(self, argv: Sequence[str], stdin: bytes, limits: Limits) -> Executed:
        return await self._run(argv, stdin, limits, {"LC_ALL": "C"}, "/")

    async def _run(
        self,
        argv: Sequence[str],
        stdin: bytes,
        limits: Limits,
        env: Mapping[str, str] | None,
        place: str,
        network: Network | None = None,
    ) -> Executed:
        task, within = asyncio.current_task(), self._processes
        if self._engine is None or within is None or task is None:
            raise RuntimeFailed(f"the runtime {self.name} has not started")
        command = uuid.uuid4().hex
        self._running.add(task)
        within.commands[command] = frozenset()
        script = self._passed / command
        try:
            line = shell(place, argv)
            env = variables({"HOME": self.home, "LANG": "C.UTF-8", "PWD": place}, env)
            write(script, env, *self._first_lines(), owner=self._user)
            client = await self._client(self._engine, f"{MARK}={command}", network or self._spec.network)
            whole = [*client, *reader(script), *line]
            async with started(whole, env=self._engine.environment()) as process:
                within.commands[command] = processes.pipes(process.pid)
                try:
                    done = await finished(process, stdin, limits, partial(self._send, within, process, script))
                finally:
                    await within.nothing_left(command)
            if unread(script) and not done.timed_out:
                raise RuntimeFailed(f"the command was not started: {done.stderr.decode(errors='replace').strip()}")
            return done
        except CannotPass as error:
            return error.executed()
        finally:
            within.commands.pop(command, None)
            self._running.discard(task)
            take_away(script)

    def _first_lines(self) -> Sequence[str]:
        """Of a shell, for each command before it starts."""
        return ()

    async def _client(self, engine: Engine, mark: str, network: Network) -> list[str]:
        """What starts a command in the container."""
        if network == self._spec.network:
            return [*engine.command, "exec", "--interactive", "--user", f"{self._user}:{self._user}", "--env", mark, self.name]
        if network == "proxy":
            raise RuntimeFailed("a command cannot be kept from the network in a container that has it")
        assert self._processes is not None
        machine = seccomp.own()
        calls = seccomp.compiled(machine, shared_memory=True).hex() if machine else ""
        beside = await self._process_beside(engine)
        return [sys.executable, "-I", "-S", str(_ENTER), str(self._processes.first), str(beside), str(self._user), calls, mark]

    async def _process_beside(self, engine: Engine) -> int:
        """A process that has the network of a step."""
        network = self._kind.settings.container_network
        if network == "host":
            return os.getpid()
        async with self._making_beside:
            if not self._beside:
                # It may be there also where its making is broken off: then `stop` has to know.
                self._beside = 0
                flags = self._held_flags(self._name_beside, USER_BESIDE, network)
                flags += ["--memory", "64m", "--pids-limit", "64", *self._kind.settings.container_run_flags]
                self._beside = await self._first_of(engine, self._name_beside, *flags)
                if not self._beside:
                    raise RuntimeFailed(f"the container {self._name_beside} has ended: there is no network for a step")
                await self._take_name_service(engine)
            return self._beside

    async def _take_name_service(self, engine: Engine) -> None:
        """Where names are looked up: that of a container without network is the node's, which may be on its loopback device."""
        found = await engine.told("exec", self._name_beside, "cat", "/etc/resolv.conf")
        line = 'printf "%s\\n" "$1" > /etc/resolv.conf'
        await engine.told("exec", "--user", "0", self.name, "/bin/sh", "-c", line, "sh", found)

    @property
    def _name_beside(self) -> str:
        return f"{self.name}-n"

    @staticmethod
    def _send(within: ContainerProcesses, process: asyncio.subprocess.Process, script: Path, number: int) -> None:
        if number != signal.SIGKILL:
            within.send(script.name, number)
            return
        if process.returncode is None:
            take_away(script)
            asyncio.get_running_loop().call_later(_CLIENT_SECONDS, _kill, process)
        within.kill(script.name)

    async def stop(self) -> None:
        current = asyncio.current_task()
        running = [task for task in self._running if task is not current]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._passage is not None:
            await self._passage.close()
            self._passage = None
        if self._engine is not None and self._claimed:
            if self._beside is not None:
                await self._engine.removed(self._name_beside)
                self._beside = None
            await self._engine.removed(self.name)
            await asyncio.to_thread(deleted, self._folder)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


# How a command gets its environment in a container: a folder of the node is mounted there at `INSIDE`, in which the node writes a script
# for each command that sets the variables, and that the shell which becomes the command reads and removes.
#
# So values may hold anything and stand in no list of processes; a script that is still there says that the command never started, and one
# that the node took away, that it never will.


INSIDE = "/run/verbatim"
_READER = 'exec 3<"$0" && rm "$0" && . /dev/fd/3 && exec 3<&- && exec "$@"'


def reader(script: Path) -> list[str]:
    """What reads the script in the container and becomes the words that follow."""
    return ["/bin/sh", "-c", _READER, f"{INSIDE}/{script.name}"]


def write(script: Path, env: Mapping[str, str], *lines: str, owner: int = 0) -> None:
    """`lines` are run before the variables are set; `owner` is the user of the container that reads it, 0 whose it is anyway. Raises
    `RuntimeFailed`, `CannotPass`."""
    text = "".join(f"{line}\n" for line in (*lines, *exports(env)))
    try:
        # The container's root may put anything into the folder: what is there already is not followed.
        descriptor = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.fsencode(text))
            if owner:
                os.fchown(descriptor, owner, owner)
    except OSError as error:
        raise (DiskFull if no_room(error) else RuntimeFailed)(f"{script} cannot be written: {error}") from error


def unread(script: Path) -> bool:
    """Whether it is still there. What else a command may have put in its place, or done to the folder, says nothing."""
    return os.path.isfile(script)


def take_away(script: Path) -> None:
    """Nobody reads it any more. What cannot be removed is none; it goes with the folder."""
    with suppress(OSError):
        script.unlink()


# The command line of a container engine, docker's or podman's: what both know.


_COMMANDS = ("docker", "podman")
_SECONDS = 300.0
_PULL_SECONDS = 3600.0
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class Engine:
    """`command` with the flags that go before every subcommand."""

    command: tuple[str, ...]

    def environment(self) -> Mapping[str, str]:
        """What the command line is run with."""
        return os.environ

    async def told(self, *words: str, seconds: float = _SECONDS, env: Mapping[str, str] | None = None) -> str:
        """What a subcommand printed. Raises `RuntimeFailed`, `DiskFull`."""
        async with started([*self.command, *words], env=self.environment() if env is None else env) as process:

            def send(number: int) -> None:
                if process.returncode is None:
                    kill_tree(process.pid)

            done = await finished(process, b"", Limits(seconds), send)
        if done.exit_code == 0 and not done.timed_out:
            return done.stdout.decode(errors="replace").strip()
        reason = f"it took more than {seconds:g} seconds" if done.timed_out else done.stderr.decode(errors="replace").strip()
        refused = DiskFull if "no space left on device" in reason.lower() else RuntimeFailed
        raise refused(f"{self.command[0]} {words[0]}: {reason or f'exit code {done.exit_code}'}")

    async def has_image(self, image: str) -> bool:
        try:
            await self.told("image", "inspect", "--format", "{{.Id}}", image)
        except RuntimeFailed:
            return False
        return True

    async def pull(self, image: str) -> None:
        await self.told("pull", image, seconds=_PULL_SECONDS)

    async def run(self, *words: str) -> None:
        """podman would pass the node's proxies on to the container."""
        env = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
        await self.told("run", *words, env=env)

    async def names(self, label: str) -> list[str]:
        """Of the containers with that label, running or not."""
        listed = await self.told("ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}")
        return listed.split()

    async def removed(self, name: str) -> None:
        """Raises nothing for a container that is not there."""
        try:
            await self.told("rm", "--force", "--volumes", name)
        except RuntimeFailed as error:
            if "no such container" not in str(error).lower() and "no container with name" not in str(error).lower():
                raise


async def found(settings: RuntimeSettings) -> Engine:
    """The engine of the settings, or the first whose service answers. Raises `RuntimeFailed`."""
    reasons = []
    for name in (settings.container_command,) if settings.container_command else _COMMANDS:
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        engine = Engine((name, *settings.container_flags))
        try:
            await engine.told("ps", "--quiet")
        except RuntimeFailed as error:
            reasons.append(str(error))
            continue
        return engine
    raise RuntimeFailed(f"no container engine answers: {'; '.join(reasons)}")
