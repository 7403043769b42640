"""The node's own machine as a runtime: a folder per runtime, and every command in a limited bubblewrap sandbox.

Option `sandbox`: `bwrap` (the default), or `none`, with which a command may read, write and reach whatever the node's user may; a task
has to ask for both that and `network: full`. Option `places`: folders that a sandbox has besides its home, workdir and /tmp, empty and its
own. Processes do not outlive the command that started them; files do.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from contract.tasks import RuntimeSpec
from rollout.runtimes import installs, passage, processes, seccomp
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
    describe_os_error,
)
from rollout.runtimes.command import HeldCommand, find_failure, finish_process, merge_variables, wrap_in_shell
from rollout.runtimes.command_runtime import CommandRuntime, RuntimeCommand
from rollout.runtimes.disk import DiskWatch
from rollout.runtimes.installs import claim_folder, delete_folder
from rollout.runtimes.local import resources
from rollout.runtimes.local.sandbox import OWN, SYSTEM, USER, View, bind_system, find_private, start_sandboxed, start_supervised
from rollout.runtimes.local.supervisor import MARK
from rollout.runtimes.settings import RuntimeSettings, read_environment

HOME, WORKDIR = "/home/agent", "/workspace"
"""In a sandbox."""
_GROUPS = "groups"
"""A file of a runtime's folder that lists its control groups: those of a node that is restarted may be elsewhere."""
_START_SECONDS = 60.0
_SWEEP_SECONDS = 10.0


def read_places(spec: RuntimeSpec) -> list[str]:
    """Raises `BadRuntime`."""
    places = spec.options.get("places", [])
    if not isinstance(places, list) or not all(isinstance(each, str) for each in places):
        raise BadRuntime(f"options.places: {places!r} is not a list of paths")
    return [each for each in places if each != (spec.workdir or WORKDIR)]


def _check_place(what: str, path: str) -> None:
    first = check_path(what, path).split("/")[1]
    if first in (*SYSTEM, *OWN) or HOME.startswith(path):
        raise BadRuntime(f"{what}: {path} belongs to the system, or contains the home: choose another")


class LocalKind:
    name = "local"

    def __init__(self, settings: RuntimeSettings | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.settings = settings or read_environment()
        self.grace_seconds = grace_seconds
        self.installs = installs.LocalInstalls(self.make, self.settings)

    def check(self, spec: RuntimeSpec) -> None:
        check_common(spec)
        check_options(spec, ("sandbox", "places"))
        sandbox = spec.options.get("sandbox", "bwrap")
        if sandbox not in ("bwrap", "none"):
            raise BadRuntime(f"options.sandbox cannot be {sandbox!r}: choose bwrap or none")
        if spec.image is not None:
            raise BadRuntime(f"image: a local runtime has none ({spec.image!r}): it is the node's own system")
        if spec.workdir is not None:
            _check_place("workdir", spec.workdir)
        for place in read_places(spec):
            _check_place("options.places", place)
        if sandbox == "none" and (spec.network != "full" or spec.workdir is not None or read_places(spec)):
            raise BadRuntime(
                "options.sandbox none does not isolate the network and has its own workdir: set network to full, and no workdir or places"
            )

    async def probe(self) -> str | None:
        if sys.platform != "linux":
            return "local runtimes need Linux"
        if self.settings.cgroup is not None and not resources.find_hierarchies(self.settings.cgroup):
            return f"VERBATIM_CGROUP: no control group with memory, cpu and pids can be made below {self.settings.cgroup}"
        if self.settings.local_sandbox == "none":
            return None
        program = shutil.which("bwrap")
        if program is None:
            return "bubblewrap (bwrap) is not installed; with VERBATIM_LOCAL_SANDBOX=none the node still runs tasks without a sandbox"
        probe = [program, "--unshare-all", "--unshare-user", *bind_system(), "--proc", "/proc", "/bin/true"]
        failure = await find_failure(probe)
        return None if failure is None else f"bubblewrap does not work here: {failure}"

    def describe_limits(self) -> str:
        sentences = [resources.describe_limits(resources.find_hierarchies(self.settings.cgroup))]
        if seccomp.find_machine() is None:
            sentences.append(f"system calls are not filtered on {platform.machine()}")
        return "; ".join(sentences)

    def make(self, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> LocalRuntime:
        return LocalRuntime(self, spec, name, proxy)

    async def install(self, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs) -> Installed:
        return await self.installs.install(spec, install, name, proxy, logs)

    async def sweep(self, prefix: str) -> int:
        """A runtime is found by its folder or by a control group of its name, whichever is left."""
        places = [self.settings.local_dir, *(each.folder for each in resources.find_hierarchies(self.settings.cgroup))]
        names = {each.name for place in places if place.is_dir() for each in place.iterdir() if each.name.startswith(prefix)}
        for name in names:
            await self.remove(name)
        return len(names)

    async def remove(self, name: str) -> None:
        """Ends every process of the runtime `name`, including those of other nodes, and removes its control groups, its files last."""
        deadline = asyncio.get_running_loop().time() + _SWEEP_SECONDS
        number = signal.SIGTERM
        while outer := processes.find_by_variable(MARK.encode(), name.encode(), processes.list_pids()):
            processes.send_signal(outer, number)
            await asyncio.sleep(0.05)
            if asyncio.get_running_loop().time() > deadline:
                number = signal.SIGKILL
        groups = {each.folder / name for each in resources.find_hierarchies(self.settings.cgroup)}
        await resources.remove_groups(groups | _read_groups(self.settings.local_dir / name))
        await asyncio.to_thread(delete_folder, self.settings.local_dir / name)


class LocalRuntime(CommandRuntime):
    """Commands run side by side, each in its own sandbox over the same files."""

    def __init__(self, kind: LocalKind, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> None:
        super().__init__(spec, name, proxy, kind.grace_seconds)
        self._kind = kind
        self._folder = kind.settings.local_dir / name
        self._sandbox = spec.options.get("sandbox", "bwrap") == "bwrap"
        self._resources = resources.Resources(spec, name, resources.find_hierarchies(kind.settings.cgroup))
        self._held_install: int | None = None
        self._places = [(f"place-{number}", path) for number, path in enumerate(read_places(spec))]
        """Its folder outside, and its path inside."""
        self.home = HOME if self._sandbox else str(self._folder / "home")
        self.workdir = (spec.workdir or WORKDIR) if self._sandbox else str(self._folder / "work")

    async def _make(self) -> None:
        try:
            self._claim()
            self._held_install = self._kind.installs.hold(self._spec)
            self._make_folders()
            (self._folder / _GROUPS).write_text("".join(f"{group}\n" for group in self._resources.groups))
            self._resources.make()
            done = await self.exec(["true"], timeout_seconds=_START_SECONDS)
        except OSError as error:
            raise describe_os_error(f"the runtime {self.name} cannot be made", error) from error
        if done.exit_code != 0:
            raise RuntimeFailed(f"the runtime {self.name} runs nothing: {done.explain_failure()}")

    def _claim(self) -> None:
        claim_folder(self._kind.settings.local_dir, "VERBATIM_LOCAL_DIR")
        self._folder.mkdir(mode=0o700)
        self._claimed = True

    def _make_folders(self) -> None:
        for name in ("home", "work", "tmp", "shm", "etc", *(name for name, _ in self._places)):
            (self._folder / name).mkdir()
        etc = self._folder / "etc"
        (etc / "hosts").write_text(passage.render_hosts(self._proxy))
        (etc / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\nagent:x:{USER}:{USER}::{HOME}:/bin/sh\n")
        (etc / "group").write_text(f"root:x:0:\nagent:x:{USER}:\n")

    def map_url(self, url: str) -> str:
        return passage.map_url(self._proxy, url) if self._spec.network == "proxy" else url

    async def _run_command(self, command: RuntimeCommand) -> Executed:
        line = wrap_in_shell(command.workdir, command.argv)
        env = merge_variables(self._get_environment(), command.env)
        # A network namespace costs more than sharing the node's, so a command of ours that uses no network shares it.
        has_network = command.network != "proxy"
        async with self._hold(line, env, has_network) as held:
            return await self._release(held, command, has_network)

    async def _release(self, held: HeldCommand, command: RuntimeCommand, has_network: bool) -> Executed:
        """Runs the command to its end, under its limits."""
        exceeded = False

        def kill() -> None:
            nonlocal exceeded
            exceeded = True
            held.send(signal.SIGKILL)

        async with AsyncExitStack() as stack:
            try:
                self._resources.hold(held.pid)
            except (OSError, ValueError) as error:
                raise RuntimeFailed(f"the command cannot be put under its limits: {error}") from error
            if self._sandbox and not has_network:
                await stack.enter_async_context(passage.Passage(held.pid, self._proxy))
            held.release()
            watch = asyncio.ensure_future(self._resources.watch(held.list_pids, kill))
            disk = DiskWatch([self._folder], self._spec.disk_mb, partial(held.send, signal.SIGKILL))
            try:
                async with disk:
                    done = disk.judge(await finish_process(held.process, command.stdin, command.limits, held.send))
            finally:
                watch.cancel()
        if reason := await held.find_failure(done):
            raise RuntimeFailed(f"{reason} (runtime {self.name})")
        return Executed(137, done.stdout, done.stderr, done.timed_out, done.seconds) if exceeded else done

    @asynccontextmanager
    async def _hold(self, line: Sequence[str], env: Mapping[str, str], has_network: bool) -> AsyncIterator[HeldCommand]:
        owner = {MARK: self.name}
        if not self._sandbox:
            async with start_supervised(line, env, owner) as held:
                yield held
            return
        program = shutil.which("bwrap")
        if program is None:
            raise RuntimeFailed("bubblewrap (bwrap) is not installed: there is no sandbox for the command")
        view = await asyncio.to_thread(self._make_view)
        machine = seccomp.find_machine()
        calls = seccomp.compile_filter(machine, shared_memory=self._resources.by_the_kernel) if machine else None
        async with start_sandboxed(program, view.make_arguments(network=has_network), calls, line, env, owner) as held:
            yield held

    def _make_view(self) -> View:
        folder = self._folder
        own = [(folder / "home", HOME), (folder / "tmp", "/tmp"), (folder / "shm", "/dev/shm"), (folder / "work", self.workdir)]
        own += [(folder / name, path) for name, path in self._places]
        readable = [(Path(each), each) for each in self._kind.settings.local_readable]
        readable += installs.list_readable(self._spec)
        readable += [(folder / "etc" / name, f"/etc/{name}") for name in ("hosts", "passwd", "group")]
        return View(own, readable, find_private(Path("/etc")))

    def _get_environment(self) -> dict[str, str]:
        temporary = {} if self._sandbox else {"TMPDIR": str(self._folder / "tmp")}
        return {"PATH": installs.extend_path(self._spec, self._kind.settings.local_path), "HOME": self.home, **temporary}

    async def _remove(self) -> None:
        await self._kind.remove(self.name)
        if self._held_install is not None:
            os.close(self._held_install)
            self._held_install = None


def _read_groups(folder: Path) -> set[Path]:
    """The control groups that the runtime of that folder has; each bears its name."""
    try:
        lines = (folder / _GROUPS).read_text().splitlines()
    except OSError:
        return set()
    return {group for line in lines if (group := Path(line)).name == folder.name}
