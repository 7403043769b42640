"""A Kubernetes pod as a runtime (kind `kubernetes`): one per rollout, made and removed by the node.

The cluster does what other kinds do themselves: it chooses a machine, limits CPU, memory and disk, and isolates the pod from the network
(`network`). The proxy is reached at its own address. All commands of a pod share its network, so no step can have another.

Commands start through the API's exec (`exec`). They run as a user other than root unless option `user` is 0.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from contract.tasks import RuntimeSpec
from rollout.runtimes.base import (
    GRACE_SECONDS,
    BadRuntime,
    Executed,
    Install,
    Installed,
    Logs,
    NetworkRefused,
    ProxyAddress,
    RuntimeFailed,
    check_common,
    check_options,
    check_path,
    check_user,
)
from rollout.runtimes.command import ExecLimits, merge_variables, wait_settled
from rollout.runtimes.command_runtime import CommandRuntime, RuntimeCommand
from rollout.runtimes.kubernetes import cluster, manifest
from rollout.runtimes.kubernetes.cluster import NameTaken, Pod, PodApi
from rollout.runtimes.kubernetes.exec import PodCommand
from rollout.runtimes.kubernetes.manifest import INSIDE, PodSettings
from rollout.runtimes.kubernetes.network import Isolation, resolve_proxy
from rollout.runtimes.settings import PodFields, RuntimeSettings, read_environment
from rollout.task import describe_problems

WORKDIR = "/workspace"
"""The default, if the image's user may create it."""
_START_SECONDS = 60.0
_REMOVAL_SECONDS = 60.0


class KubernetesKind:
    name = "kubernetes"

    def __init__(self, settings: RuntimeSettings | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.settings = settings or read_environment()
        self.grace_seconds = grace_seconds
        self._cluster: PodApi | None = None

    def check(self, spec: RuntimeSpec) -> None:
        check_common(spec)
        check_options(spec, ("user", "node_selector"))
        check_user(spec)
        _read_node_selector(spec)
        if not spec.image:
            raise BadRuntime("image: a pod needs one")
        if spec.workdir is not None:
            check_path("workdir", spec.workdir)

    async def probe(self) -> str | None:
        try:
            cluster = await self.load_cluster()
            await cluster.list_pods()
            await Isolation(cluster, self.settings).check()
        except RuntimeFailed as error:
            return str(error)
        return None

    async def load_cluster(self) -> PodApi:
        """Raises `RuntimeFailed`."""
        if self._cluster is None:
            self._cluster = await cluster.load_cluster(self.settings)
        return self._cluster

    def describe_limits(self) -> str:
        return "memory, CPUs and disks are limited by the cluster, the number of processes if its nodes limit it"

    def make(self, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> PodRuntime:
        return PodRuntime(self, spec, name, proxy)

    async def install(self, spec: RuntimeSpec, install: Install, name: str, proxy: ProxyAddress, logs: Logs) -> Installed:
        """Leaves the spec unchanged: a cluster keeps nothing but images."""
        return Installed(spec)

    async def sweep(self, prefix: str) -> int:
        cluster = await self.load_cluster()
        left = [pod["metadata"] for pod in await cluster.list_pods() if pod["metadata"]["name"].startswith(prefix)]
        await asyncio.gather(*(cluster.delete_pod(each["name"], each["uid"], _REMOVAL_SECONDS) for each in left))
        return len(left)


class PodRuntime(CommandRuntime):
    """One pod, which lives from `start` to `stop`."""

    def __init__(self, kind: KubernetesKind, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> None:
        super().__init__(spec, name, proxy, kind.grace_seconds)
        self._kind = kind
        self._uid: str | None = None
        self.home = "/root"
        self.workdir = spec.workdir or WORKDIR

    async def _make(self) -> None:
        cluster = await self._kind.load_cluster()
        await self._create(cluster, await self._prepare(cluster))
        await self._wait_until_running(cluster)
        await self._find_places()

    async def _prepare(self, cluster: PodApi) -> dict[str, Any]:
        """The pod's manifest; its network is isolated by the time this returns. Raises `RuntimeFailed`."""
        settings, labels, proxy = self._kind.settings, manifest.make_labels(self._spec, self.name), None
        if self._spec.network == "proxy":
            proxy = await resolve_proxy(self._proxy)
            labels |= await Isolation(cluster, settings).ensure(proxy, labels)
        pod = PodSettings(
            proxy=proxy,
            owner=cluster.owner,
            service_account=settings.kubernetes_service_account,
            user=self._spec.options.get("user", settings.kubernetes_user),
            deadline_seconds=settings.kubernetes_deadline_seconds,
            seccomp_profile=settings.kubernetes_seccomp_profile,
            fields=_narrow(settings.kubernetes_pod_fields, _read_node_selector(self._spec)),
        )
        return manifest.make_manifest(self._spec, self.name, labels, pod)

    async def _create(self, cluster: PodApi, described: Mapping[str, Any]) -> None:
        self._claimed = True
        creating = asyncio.ensure_future(cluster.create_pod(described))
        cancelled = await wait_settled(creating)
        try:
            self._uid = creating.result()["metadata"]["uid"]
        except NameTaken:
            self._claimed = False
            raise
        if cancelled:
            raise asyncio.CancelledError

    async def _wait_until_running(self, in_cluster: PodApi) -> None:
        last: Pod = {}

        def decide(pod: Pod | None) -> str | None:
            """Empty once it runs."""
            nonlocal last
            last = pod or {}
            if pod is None:
                return "it was removed"
            return "" if cluster.is_running(pod) else cluster.find_hopeless(pod)

        seconds = self._kind.settings.kubernetes_start_seconds
        reason = await in_cluster.wait_for_pod(self.name, decide, seconds)
        if reason is None:
            reason = f"it does not run after {seconds:g} seconds: {cluster.describe_wait(last)}"
        if reason:
            raise RuntimeFailed(f"the pod {self.name} does not start: {reason}")

    async def _find_places(self) -> None:
        """Sets home and workdir. The command has the image's own variables, of which HOME is one."""
        argv = ["/bin/sh", "-c", manifest.PLACES, INSIDE, self._spec.workdir or "", WORKDIR]
        done = await self._run(RuntimeCommand(argv, {}, "/", b"", ExecLimits(_START_SECONDS), None))
        if done.exit_code != 0:
            raise RuntimeFailed(f"the pod {self.name} has no place to work: {done.explain_failure()}")
        self.home, self.workdir = os.fsdecode(done.stdout).splitlines()

    def map_url(self, url: str) -> str:
        return url

    async def _run_command(self, command: RuntimeCommand) -> Executed:
        if self._uid is None:
            raise RuntimeFailed(f"the runtime {self.name} has not started")
        if command.network not in (None, self._spec.network):
            raise NetworkRefused(f"a pod has one network, here {self._spec.network}: a command cannot have {command.network}")
        running = PodCommand(await self._kind.load_cluster(), self.name)
        variables = merge_variables(command.env, {manifest.MARK: running.identity})
        return await running.run(manifest.make_script(command.workdir, command.argv, variables), command.stdin, command.limits)

    async def _remove(self) -> None:
        await (await self._kind.load_cluster()).delete_pod(self.name, self._uid, _REMOVAL_SECONDS)


def _read_node_selector(spec: RuntimeSpec) -> dict[str, str]:
    """Raises `BadRuntime`."""
    try:
        return PodFields.model_validate({"nodeSelector": spec.options.get("node_selector", {})}).node_selector
    except ValidationError as error:
        raise BadRuntime(f"options.node_selector is not valid: {describe_problems(error)}") from error


def _narrow(fields: PodFields, asked: Mapping[str, str]) -> PodFields:
    """With the labels that a task asks for added to the node's own. Raises `RuntimeFailed` if they contradict each other."""
    own = fields.node_selector
    for name, value in asked.items():
        if own.get(name, value) != value:
            raise RuntimeFailed(
                f"options.node_selector: {name}={value} contradicts this node, whose pods run on {name}={own[name]}"
            )
    return fields.model_copy(update={"node_selector": {**own, **asked}})
