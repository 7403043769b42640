"""A pod of a Kubernetes cluster as a runtime (kind `kubernetes`): one for each rollout, made and removed by the node.

The cluster does what other kinds do themselves: it finds a machine, holds CPU, memory and disk to the spec, and keeps the pod from the
network (`pod_network`). The proxy is reached at its own address. A pod has one network for all its commands: a step cannot have another
one than its runtime.

Commands are started over the API's exec (`pod_command`). They run as a user other than root unless option `user` says 0.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.runtimes.base import (
    GRACE_SECONDS,
    BadRuntime,
    Executed,
    Install,
    Installed,
    Logs,
    Route,
    RuntimeFailed,
    check_common,
    check_options,
    check_path,
)
from rollout.runtimes.command import CannotPass, Limits, settled, variables
from rollout.runtimes.files import FilesByCommand
from rollout.runtimes.kubernetes import cluster, network
from rollout.runtimes.kubernetes import manifest as pod_scripts
from rollout.runtimes.kubernetes.cluster import Cluster, NameTaken, Pod, opened
from rollout.runtimes.kubernetes.exec import PodCommand
from rollout.runtimes.kubernetes.manifest import INSIDE, Surroundings, labels, manifest
from rollout.runtimes.settings import RuntimeSettings, from_environment
from rollout.task import Network, RuntimeSpec

WORKDIR = "/workspace"
"""Where the image's user may make it."""
_START_SECONDS = 60.0
_REMOVAL_SECONDS = 60.0


class KubernetesKind:
    """`grace_seconds` is what a command has between SIGTERM and SIGKILL."""

    name = "kubernetes"

    def __init__(self, settings: RuntimeSettings | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.settings = settings or from_environment()
        self.grace_seconds = grace_seconds
        self._cluster: Cluster | None = None

    def check(self, spec: RuntimeSpec) -> None:
        check_common(spec)
        check_options(spec, ("user",))
        if not spec.image:
            raise BadRuntime("image: a pod needs one")
        if spec.workdir is not None:
            check_path("workdir", spec.workdir)
        user = spec.options.get("user", 0)
        if type(user) is not int or user < 0:
            raise BadRuntime(f"options.user: {user!r} is not the number of a user")

    async def missing(self) -> str | None:
        try:
            await self.cluster().pods()
            await self.holding().missing()
        except RuntimeFailed as error:
            return str(error)
        return None

    def holding(self) -> network.Holding:
        return network.Holding(self.cluster(), self.settings)

    def cluster(self) -> Cluster:
        """Raises `RuntimeFailed`."""
        if self._cluster is None:
            self._cluster = opened(self.settings)
        return self._cluster

    def limits(self) -> str:
        return "memory, CPUs and disks are held by the cluster; the number of processes where its nodes limit it"

    def make(self, spec: RuntimeSpec, name: str, route: Route) -> PodRuntime:
        return PodRuntime(self, spec, name, route)

    async def installed(self, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs) -> Installed:
        """A cluster keeps nothing but images: the spec as it is."""
        return Installed(spec)

    async def sweep(self, prefix: str) -> int:
        cluster = self.cluster()
        left = [pod["metadata"] for pod in await cluster.pods() if pod["metadata"]["name"].startswith(prefix)]
        await asyncio.gather(*(cluster.removed(each["name"], each["uid"], _REMOVAL_SECONDS) for each in left))
        return len(left)


class PodRuntime(FilesByCommand):
    """One pod, which lives from `start` to `stop`."""

    def __init__(self, kind: KubernetesKind, spec: RuntimeSpec, name: str, route: Route) -> None:
        self._kind = kind
        self._spec = spec
        self._route = route
        self.name = name
        self._uid: str | None = None
        self._claimed = False
        self._running: set[asyncio.Task[object]] = set()
        self.home = "/root"
        self.workdir = spec.workdir or WORKDIR

    async def start(self) -> None:
        described = await self._described()
        try:
            await self._create(described)
            await self._until_it_runs()
            await self._find_places()
        except BaseException:
            await self.stop()
            raise

    async def _described(self) -> dict[str, Any]:
        """Once its network is held. Raises `RuntimeFailed`."""
        settings, carried, way = self._kind.settings, labels(self._spec, self.name), None
        if self._spec.network == "proxy":
            way = await network.way(self._route)
            carried |= await self._kind.holding().ensured(way, carried)
        surroundings = Surroundings(
            way=way,
            owner=self._kind.cluster().owner,
            service_account=settings.kubernetes_service_account,
            user=self._spec.options.get("user", settings.kubernetes_user),
            deadline_seconds=settings.kubernetes_deadline_seconds,
        )
        return manifest(self._spec, self.name, carried, surroundings)

    async def _create(self, described: Mapping[str, Any]) -> None:
        cluster = self._kind.cluster()
        self._claimed = True
        creating = asyncio.ensure_future(cluster.created(described))
        cancelled = await settled(creating)
        try:
            self._uid = creating.result()["metadata"]["uid"]
        except NameTaken:
            self._claimed = False
            raise
        if cancelled:
            raise asyncio.CancelledError

    async def _until_it_runs(self) -> None:
        last: Pod = {}

        def decided(pod: Pod | None) -> str | None:
            """Empty: it runs."""
            nonlocal last
            last = pod or {}
            if pod is None:
                return "somebody removed it"
            return "" if cluster.runs(pod) else cluster.hopeless(pod)

        seconds = self._kind.settings.kubernetes_start_seconds
        why = await self._kind.cluster().until(self.name, decided, seconds)
        if why is None:
            why = f"it does not run after {seconds:g} seconds: {cluster.waits_for(last)}"
        if why:
            raise RuntimeFailed(f"the pod {self.name} does not start: {why}")

    async def _find_places(self) -> None:
        argv = ["/bin/sh", "-c", pod_scripts.PLACES, INSIDE, self._spec.workdir or "", WORKDIR]
        done = await self._run(argv, b"", Limits(_START_SECONDS), {}, "/")
        if done.exit_code != 0:
            raise RuntimeFailed(f"the pod {self.name} has no place to work: {done.stderr.decode(errors='replace').strip()}")
        self.home, self.workdir = os.fsdecode(done.stdout).splitlines()

    def base_url(self, url: str) -> str:
        return url

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
        if network is not None and network != self._spec.network:
            raise RuntimeFailed(f"a pod has one network, here {self._spec.network}: a command in it cannot have {network}")
        place = posixpath.join(self.workdir, workdir) if workdir else self.workdir
        own = {"HOME": self.home, "LANG": "C.UTF-8", "PWD": place}
        limits = Limits(timeout_seconds, logs, self._kind.grace_seconds)
        return await self._run(argv, stdin, limits, {**own, **(env or {})}, place)

    async def _in_files(self, argv: Sequence[str], stdin: bytes, limits: Limits) -> Executed:
        return await self._run(argv, stdin, limits, {"LC_ALL": "C"}, "/")

    async def _run(self, argv: Sequence[str], stdin: bytes, limits: Limits, env: Mapping[str, str], place: str) -> Executed:
        task = asyncio.current_task()
        if self._uid is None or task is None:
            raise RuntimeFailed(f"the runtime {self.name} has not started")
        self._running.add(task)
        try:
            command = PodCommand(self._kind.cluster(), self.name)
            script = pod_scripts.script(place, argv, variables(env, {pod_scripts.MARK: command.identity}))
            return await command.executed(script, stdin, limits)
        except CannotPass as error:
            return error.executed()
        finally:
            self._running.discard(task)

    async def stop(self) -> None:
        current = asyncio.current_task()
        running = [task for task in self._running if task is not current]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._claimed:
            await self._kind.cluster().removed(self.name, self._uid, _REMOVAL_SECONDS)
