"""A container as a runtime, through the command line of docker or podman (kind `docker`).

The engine runs on the node's machine and the node runs as root: the passage to the proxy and the end of what a command started need access
to the container's processes. Commands get the image's own variables; the image needs `sh`, `sleep` and what `command_runtime` needs. They
run as root with the few capabilities that installing packages takes, or as option `user` says: then with no capability, and with a home
and workdir that the node provides. No program gains privileges, and every process has the system call filter of `seccomp`, in place of the
engine's own, which leaves namespaces to whoever asks.

The network of `full` is one that the engine makes for this runtime alone, not the node's. A single step with `full` gets the network of a
second container, in which nothing else runs. The proxy is reached through `passage` in either case.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from contract.tasks import Network, RuntimeSpec
from rollout.runtimes import processes, seccomp
from rollout.runtimes.base import (
    GRACE_SECONDS,
    BadRuntime,
    Executed,
    Install,
    Installed,
    Logs,
    ProxyAddress,
    RuntimeFailed,
    check_common,
    check_options,
    check_path,
    check_user,
    describe_os_error,
)
from rollout.runtimes.command import ExecLimits, finish_process, merge_variables, render_exports, start_process, wrap_in_shell
from rollout.runtimes.command_runtime import CommandRuntime, RuntimeCommand
from rollout.runtimes.container.engine import Engine, find_engine
from rollout.runtimes.disk import DiskWatch, find_overlay
from rollout.runtimes.installs import ImageInstalls, Uses, claim_folder, delete_folder
from rollout.runtimes.local.resources import PIDS
from rollout.runtimes.passage import Passage, host_name, map_url
from rollout.runtimes.processes import MARK, ContainerProcesses
from rollout.runtimes.settings import RuntimeSettings, read_environment

log = logging.getLogger(__name__)
HOME, WORKDIR = "/root", "/workspace"
USERS_HOME = "/home/agent"
INSIDE = "/run/verbatim"
LABEL = "verbatim.runtime"
USER_BESIDE = 65534
SET_ID = ("refused", "allowed")
BESIDE = "-n"
"""What the name of a second container ends in."""
_ENTER = Path(__file__).with_name("enter.py")
ROOTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""Capabilities of root inside: to install packages and to unpack files as their owners."""
_FIRST = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"
_GONE_BEFORE_ITS_START = "cannot start a container that has stopped"
"""runc's words."""
START_SECONDS = 60.0
_CLIENT_SECONDS = 10.0
"""How long the engine's client may take to notice that its command was killed."""


class ContainerKind:
    name = "docker"
    folder_variable = "VERBATIM_CONTAINER_DIR"

    def __init__(self, settings: RuntimeSettings | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.settings = settings or read_environment()
        self.grace_seconds = grace_seconds
        layers = self.settings.container_dir.with_name(f"{self.settings.container_dir.name}-layers")
        self._installs = ImageInstalls(self.make, Uses(layers, self.settings.installs_kept, "VERBATIM_CONTAINER_DIR"))

    @property
    def folder(self) -> Path:
        """Holds a folder per container, for what the node passes into it."""
        return self.settings.container_dir

    async def find_engine(self) -> Engine:
        """Raises `RuntimeFailed`."""
        return await find_engine(self.settings)

    def check(self, spec: RuntimeSpec) -> None:
        check_common(spec)
        check_options(spec, ("user",))
        check_user(spec)
        if not spec.image or spec.image.startswith("-"):
            raise BadRuntime(f"image: {spec.image!r} is not the name of an image, which a container needs")
        if spec.workdir is not None:
            check_path("workdir", spec.workdir)

    async def probe(self) -> str | None:
        if os.geteuid() != 0:
            return "containers need a node that runs as root"
        if (set_id := self.settings.container_set_id) not in SET_ID:
            return f"VERBATIM_CONTAINER_SET_ID cannot be {set_id!r}: choose {' or '.join(SET_ID)}"
        try:
            await self.find_engine()
        except RuntimeFailed as error:
            return str(error)
        return None

    def describe_limits(self) -> str:
        return f"memory, CPUs and {PIDS} processes are limited by the container engine"

    def make(self, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> ContainerRuntime:
        return ContainerRuntime(self, spec, name, proxy)

    async def install(self, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs) -> Installed:
        return await self._installs.install(await self.find_engine(), spec, install, name, proxy, logs)

    async def sweep(self, prefix: str) -> int:
        """Containers first, then what they held: a name that has any trace left is found again."""
        engine, folder = await self.find_engine(), self.folder
        containers, networks = await engine.list_names(LABEL), await engine.list_networks(LABEL)
        folders = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        names = {each for each in (*containers, *networks, *folders) if each.startswith(prefix)}
        for name in names.intersection(containers):
            await engine.remove(name)
        for name in names.intersection(networks):
            await engine.remove_network(name)
        for name in names.intersection(folders):
            await asyncio.to_thread(delete_folder, folder / name)
        return len({name.removesuffix(BESIDE) for name in names})


class ContainerRuntime(CommandRuntime):
    """One container, which lives from `start` to `stop`."""

    def __init__(self, kind: ContainerKind, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> None:
        super().__init__(spec, name, proxy, kind.grace_seconds)
        self._kind = kind
        self._folder = kind.folder / name
        self._user = int(spec.options.get("user", kind.settings.container_user))
        self._engine: Engine | None = None
        self._beside: int | None = None
        """First process of the second container, whose network a step uses; 0 while it is being made, None if no step has needed it."""
        self._making_beside = asyncio.Lock()
        self._has_network = False
        """Whether the engine may have a network of this runtime's name."""
        self._passage: Passage | None = None
        self._written = [self._folder]
        """The folders of the machine that commands write to."""
        self._processes: ContainerProcesses | None = None
        self.home = USERS_HOME if self._user else HOME
        self.workdir = spec.workdir or WORKDIR

    async def _make(self) -> None:
        engine = self._engine = await self._kind.find_engine()
        self._claim()
        first = await self._begin(engine)
        namespace = processes.read_namespace(first, "pid") if first else None
        if namespace is None or namespace == processes.read_namespace(os.getpid(), "pid"):
            raise RuntimeFailed(f"the container {self.name} has ended, or its processes are not this machine's")
        if not processes.has_filter(first):
            raise RuntimeFailed(
                f"{engine.command[0]} started {self.name} without a system call filter: it must support seccomp"
            )
        self._processes = ContainerProcesses(first, namespace)
        if (overlay := find_overlay(first)) is not None and not overlay.is_relative_to(self._folder):
            self._written.append(overlay)
        if self._is_proxied:
            self._passage = await Passage(first, self._proxy).__aenter__()
        done = await self._run_bare(["mkdir", "-p", self.workdir, self.home], limits=ExecLimits(START_SECONDS))
        if done.exit_code != 0:
            raise RuntimeFailed(f"{self.workdir} cannot be made: {done.explain_failure()}")
        await self._check_workdir()

    def _claim(self) -> None:
        try:
            claim_folder(self._kind.folder, self._kind.folder_variable)
            self._folder.mkdir(mode=0o700)
        except OSError as error:
            raise describe_os_error(f"the runtime {self.name} cannot be made", error) from error
        self._claimed = True

    async def _begin(self, engine: Engine) -> int:
        """Makes the container; returns its first process as the node's machine numbers it, 0 if there is none."""
        image = self._spec.image or ""
        if not await engine.has_image(image):
            await engine.pull(image)
        try:
            self._profile.write_text(seccomp.render_profile(set_id=self._has_set_id))
            for name in ("inside", "home", "work") if self._user else ("inside",):
                (self._folder / name).mkdir()
                os.chown(self._folder / name, self._user, self._user)
        except OSError as error:
            raise describe_os_error(f"{self._folder} cannot be filled", error) from error
        network = await self._find_network(engine) if self._spec.network == "full" else "none"
        return await self._start_container(engine, self.name, *self._make_flags(network))

    async def _find_network(self, engine: Engine) -> str:
        """The engine's network for whatever has the whole one: the operator's, or this runtime's own."""
        if (given := self._kind.settings.container_network) is not None:
            return given
        if not self._has_network:
            self._has_network = True
            await engine.create_network(self.name, LABEL)
        return self.name

    async def _start_container(self, engine: Engine, name: str, *flags: str) -> int:
        """Starts a container of the image; returns its first process. runc sometimes finds its own process gone between making a
        container and starting it, on a busy machine: such a container never ran, and is made once more."""
        words = [*flags, self._spec.image or "", "-c", _FIRST]
        try:
            await engine.run(*words)
        except RuntimeFailed as error:
            if _GONE_BEFORE_ITS_START not in str(error):
                raise
            log.warning("the container %s is made once more: %s", name, error)
            await engine.remove(name)
            await engine.run(*words)
        return await engine.find_first_process(name)

    def _make_flags(self, network: str) -> list[str]:
        spec, settings = self._spec, self._kind.settings
        memory = f"{spec.memory_mb}m"
        words = _make_restrictions(self.name, self._user, network, self._profile)
        words += [] if self._user else [word for name in ROOTS for word in ("--cap-add", name)]
        words += ["--cpus", f"{spec.cpus:g}", "--memory", memory, "--memory-swap", memory, "--pids-limit", str(PIDS)]
        words += ["--volume", f"{self._passed}:{INSIDE}"]
        if self._user:
            words += ["--volume", f"{self._folder}/home:{USERS_HOME}"]
            words += ["--volume", f"{self._folder}/work:{self.workdir}"] if spec.workdir is None else []
        if spec.disk_mb is not None:
            words += ["--ulimit", f"fsize={spec.disk_mb << 20}:{spec.disk_mb << 20}"]
        if (name := host_name(self._proxy.host)) is not None and self._is_proxied:
            words += ["--add-host", f"{name}:127.0.0.1"]
        return [*words, *settings.container_run_flags]

    async def _check_workdir(self) -> None:
        if self._user and not await self._can_write_workdir():
            raise RuntimeFailed(
                f"the user {self._user} cannot write {self.workdir} of the image {self._spec.image}: set options.user to 0 or to "
                "another user"
            )

    async def _can_write_workdir(self) -> bool:
        return (await self._run_bare(["test", "-w", self.workdir], limits=ExecLimits(START_SECONDS))).exit_code == 0

    @property
    def _is_proxied(self) -> bool:
        """Whether connections in the container go through `passage` to the proxy."""
        return self._spec.network == "proxy" or self._kind.settings.container_network != "host"

    @property
    def _has_set_id(self) -> bool:
        return self._kind.settings.container_set_id == "allowed"

    @property
    def _profile(self) -> Path:
        """The system call filter as engines read it."""
        return self._folder / "seccomp.json"

    @property
    def _passed(self) -> Path:
        """The node's folder that is mounted at `INSIDE`."""
        return self._folder / "inside"

    def map_url(self, url: str) -> str:
        return map_url(self._proxy, url) if self._is_proxied else url

    async def _run_command(self, command: RuntimeCommand) -> Executed:
        within = self._processes
        if self._engine is None or within is None:
            raise RuntimeFailed(f"the runtime {self.name} has not started")
        mark = uuid.uuid4().hex
        within.commands[mark] = frozenset()
        script = self._passed / mark
        try:
            line = wrap_in_shell(command.workdir, command.argv)
            _write_script(script, merge_variables(command.env), *self._get_first_lines(), owner=self._user)
            client = await self._make_client(self._engine, within, f"{MARK}={mark}", command.network or self._spec.network)
            argv = [*client, "/bin/sh", "-c", _READER, f"{INSIDE}/{script.name}", *line]
            async with start_process(argv, env=self._engine.get_environment()) as process:
                within.commands[mark] = processes.find_output_pipes(process.pid)
                send = partial(_send, within, process, script)
                disk = DiskWatch(self._written, self._spec.disk_mb, partial(send, signal.SIGKILL))
                try:
                    async with disk:
                        done = disk.judge(await finish_process(process, command.stdin, command.limits, send))
                finally:
                    await within.kill_rest(mark)
            if _is_unread(script) and not done.timed_out:
                raise RuntimeFailed(f"the command did not start: {done.explain_failure()}")
            return done
        finally:
            within.commands.pop(mark, None)
            _withdraw(script)

    def _get_first_lines(self) -> Sequence[str]:
        """Shell lines that run before each command."""
        return ()

    async def _make_client(self, engine: Engine, within: ContainerProcesses, mark: str, network: Network) -> list[str]:
        """The words that start a command in the container."""
        if network == self._spec.network:
            return [*engine.command, "exec", "--interactive", "--user", f"{self._user}:{self._user}", "--env", mark, self.name]
        if network == "proxy":
            raise RuntimeFailed("a command cannot be kept from the network in a container that has it")
        machine = seccomp.find_machine()
        calls = seccomp.compile_filter(machine, shared_memory=True, set_id=self._has_set_id).hex() if machine else ""
        beside = await self._find_process_beside(engine)
        return [sys.executable, "-I", "-S", str(_ENTER), str(within.first), str(beside), str(self._user), calls, mark]

    async def _find_process_beside(self, engine: Engine) -> int:
        """A process that has the network of a step."""
        if self._kind.settings.container_network == "host":
            return os.getpid()
        async with self._making_beside:
            if not self._beside:
                # The container may exist even if making it is interrupted: `stop` has to know.
                self._beside = 0
                flags = _make_restrictions(self._name_beside, USER_BESIDE, await self._find_network(engine), self._profile)
                flags += ["--memory", "64m", "--pids-limit", "64", *self._kind.settings.container_run_flags]
                self._beside = await self._start_container(engine, self._name_beside, *flags)
                if not self._beside:
                    raise RuntimeFailed(f"the container {self._name_beside} has ended: there is no network for a step")
                await self._copy_name_servers(engine)
            return self._beside

    async def _copy_name_servers(self, engine: Engine) -> None:
        """A container without network has the node's name servers, which may listen on the node's loopback device only."""
        found = await engine.call("exec", self._name_beside, "cat", "/etc/resolv.conf")
        line = 'printf "%s\\n" "$1" > /etc/resolv.conf'
        await engine.call("exec", "--user", "0", self.name, "/bin/sh", "-c", line, "sh", found)

    @property
    def _name_beside(self) -> str:
        return f"{self.name}{BESIDE}"

    async def _remove(self) -> None:
        if self._passage is not None:
            await self._passage.close()
            self._passage = None
        if self._engine is not None:
            if self._beside is not None:
                await self._engine.remove(self._name_beside)
                self._beside = None
            await self._engine.remove(self.name)
            if self._has_network:
                await self._engine.remove_network(self.name)
                self._has_network = False
            await asyncio.to_thread(delete_folder, self._folder)


def _make_restrictions(name: str, user: int, network: str, profile: Path) -> list[str]:
    """Flags of every container: whose it is and what it may not do."""
    words = ["--detach", "--name", name, "--label", f"{LABEL}={name}", "--user", f"{user}:{user}", "--workdir", "/"]
    return [
        *words,
        *("--network", network, "--entrypoint", "/bin/sh", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--security-opt", f"seccomp={profile}"),
    ]


def _send(within: ContainerProcesses, process: Process, script: Path, number: int) -> None:
    if number != signal.SIGKILL:
        within.send(script.name, number)
        return
    if process.returncode is None:
        _withdraw(script)
        asyncio.get_running_loop().call_later(_CLIENT_SECONDS, _kill, process)
    within.kill(script.name)


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


# The environment of a command. A folder of the node is mounted at `INSIDE`. For each command the node writes a script there that sets the
# variables; the shell that becomes the command reads and removes it. So values may hold anything and show in no list of processes. A
# script that still exists says that its command never started; once the node has removed it, the command never will.


_READER = 'exec 3<"$0" && rm "$0" && . /dev/fd/3 && exec 3<&- && exec "$@"'
"""Reads the script in the container and becomes the words that follow."""


def _write_script(script: Path, env: Mapping[str, str], *lines: str, owner: int) -> None:
    """`lines` run before the variables are set; `owner` is the container's user. Raises `RuntimeFailed`, `CannotPass`."""
    text = "".join(f"{line}\n" for line in (*lines, *render_exports(env)))
    try:
        # The container's root may put anything into the folder: never follow what is already there.
        descriptor = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.fsencode(text))
            if owner:
                os.fchown(descriptor, owner, owner)
    except OSError as error:
        raise describe_os_error(f"{script} cannot be written", error) from error


def _is_unread(script: Path) -> bool:
    """Whether the script still exists. Anything else that a command put in its place says nothing."""
    return os.path.isfile(script)


def _withdraw(script: Path) -> None:
    """Removes the script so that no shell reads it any more. What cannot be removed is not a script and goes with the folder."""
    with suppress(OSError):
        script.unlink()
