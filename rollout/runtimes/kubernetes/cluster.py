"""A Kubernetes namespace as a node sees it: its pods, by the official client (package `kubernetes`).

The client waits where it is called, so every call has a thread of its own. Objects go in and come out as the API spells them (JSON).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.runtimes.base import RuntimeFailed
from rollout.runtimes.kubernetes.manifest import CONTAINER, LABEL, Owner
from rollout.runtimes.settings import RuntimeSettings

if TYPE_CHECKING:
    from kubernetes.client import Configuration
    from kubernetes.stream.ws_client import WSClient


_REQUEST_SECONDS = (10.0, 60.0)
"""To be connected, and for an answer."""
_WATCH_SECONDS = 5
"""For one look at what changes; a caller that is cancelled leaves a thread behind for so long at most."""
_CONNECTIONS = 64
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_GRACE_SECONDS = 1

T = TypeVar("T")
Pod = Mapping[str, Any]


class NameTaken(RuntimeFailed):
    """Another pod has the name."""


class Cluster:
    """One namespace of one cluster."""

    def __init__(self, configuration: Configuration, namespace: str, owner: Owner | None) -> None:
        from kubernetes.client import ApiClient, CoreV1Api, NetworkingV1Api

        self.namespace = namespace
        self.owner = owner
        self._configuration = configuration
        self._client = ApiClient(configuration)
        self._core = CoreV1Api(self._client)
        self._networking = NetworkingV1Api(self._client)

    async def created(self, manifest: Mapping[str, Any]) -> Pod:
        """The pod as the cluster took it. Raises `NameTaken`, `RuntimeFailed`."""
        call = self._core.create_namespaced_pod
        made: Pod = await self._asked("create", manifest["metadata"]["name"], call, body=dict(manifest))
        return made

    async def pod(self, name: str) -> Pod | None:
        found: Pod | None = await self._asked("read", name, self._core.read_namespaced_pod, name, none=404)
        return found

    async def pods(self) -> Sequence[Pod]:
        """Those of runtimes, everybody's."""
        listed = await self._asked("list", "pods", self._core.list_namespaced_pod, label_selector=LABEL)
        return listed.get("items") or ()

    async def policies(self) -> Sequence[Mapping[str, Any]]:
        """The namespace's NetworkPolicies."""
        listed = await self._asked("list", "network policies", self._networking.list_namespaced_network_policy)
        return listed.get("items") or ()

    async def policy_made(self, policy: Mapping[str, Any]) -> None:
        """Returns when there is a NetworkPolicy of that name, this one or one that was there. Raises `RuntimeFailed`."""
        call = self._networking.create_namespaced_network_policy
        await self._asked("create", policy["metadata"]["name"], call, body=dict(policy), none=409)

    async def allowed_to_make(self, policy: Mapping[str, Any]) -> None:
        """Raises `RuntimeFailed` when `policy_made` would."""
        call = self._networking.create_namespaced_network_policy
        await self._asked("create", policy["metadata"]["name"], call, body=dict(policy), dry_run="All", none=409)

    async def removed(self, name: str, uid: str | None, seconds: float) -> None:
        """Returns when the pod is gone, or `seconds` after it was told to go. With a `uid`, another pod of that name stays."""
        body: dict[str, Any] = {"gracePeriodSeconds": _GRACE_SECONDS}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        # 409: the name is another's by now.
        asked = await self._asked("delete", name, self._core.delete_namespaced_pod, name, body=body, none=(404, 409))
        if asked is not None:
            await self.until(name, lambda pod: True if pod is None or pod["metadata"].get("uid") != uid else None, seconds)

    async def until(self, name: str, decide: Callable[[Pod | None], T | None], seconds: float) -> T | None:
        """What `decide` says of the pod (None: there is none) once it says something; None when `seconds` have passed."""
        deadline = time.monotonic() + seconds
        while True:
            pod = await self.pod(name)
            if (decided := decide(pod)) is not None:
                return decided
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await self._changed(name, pod, min(left, _WATCH_SECONDS))

    async def _changed(self, name: str, pod: Pod | None, seconds: float) -> None:
        """Returns when something happened to it since, or after `seconds`."""
        version = pod["metadata"].get("resourceVersion") if pod else None
        begun = time.monotonic()
        # Whatever ends a watch, the pod is looked at again.
        with suppress(Exception):
            await in_thread(partial(self._watched, name, version, seconds))
        # A cluster that ends the watch at once is not to be asked without a pause.
        if time.monotonic() - begun < 0.05:
            await asyncio.sleep(min(0.05, seconds))

    def _watched(self, name: str, version: str | None, seconds: float) -> None:
        from kubernetes.client import CoreV1Api
        from kubernetes.watch import Watch

        watch = Watch()
        events = watch.stream(
            CoreV1Api(self._client).list_namespaced_pod,
            self.namespace,
            field_selector=f"metadata.name={name}",
            timeout_seconds=max(1, round(seconds)),
            _request_timeout=_REQUEST_SECONDS,
            **({"resource_version": version} if version else {}),
        )
        for _ in events:
            watch.stop()

    def connected(self, name: str, argv: Sequence[str], stdin: bool) -> WSClient:
        """A connection over which argv runs in the pod; to be called in a thread. Raises `RuntimeFailed`."""
        from kubernetes.client import ApiClient, CoreV1Api
        from kubernetes.stream import stream

        # A client of its own: while it connects, `stream` gives it another way to send requests.
        client = ApiClient(self._configuration)
        try:
            opened: WSClient = stream(
                CoreV1Api(client).connect_get_namespaced_pod_exec,
                name,
                self.namespace,
                container=CONTAINER,
                command=list(argv),
                stdin=stdin,
                stdout=True,
                stderr=True,
                tty=False,
                binary=True,
                _preload_content=False,
            )
        except Exception as error:
            raise _told("exec in", name, error) from error
        return opened

    async def _asked(
        self, verb: str, what: str, call: Callable[..., Any], *args: Any, none: int | tuple[int, ...] = (), **more: Any
    ) -> Any:
        """What the API answered, None for the statuses `none`. Raises `RuntimeFailed`."""

        def asked() -> Any:
            answer = call(*args, namespace=self.namespace, _request_timeout=_REQUEST_SECONDS, **more)
            return self._client.sanitize_for_serialization(answer)

        try:
            return await in_thread(asked)
        except Exception as error:
            if getattr(error, "status", None) in (none if isinstance(none, tuple) else (none,)):
                return None
            raise _told(verb, what, error) from error


def opened(settings: RuntimeSettings) -> Cluster:
    """The cluster of the settings: the one this process runs in, or that of the kubeconfig. Raises `RuntimeFailed`."""
    try:
        from kubernetes import config
        from kubernetes.client import Configuration
    except ImportError as error:
        raise RuntimeFailed("the package kubernetes is not installed: pip install 'verbatim-rl[rollout]'") from error
    configuration = Configuration()
    here: str | None = None
    try:
        if settings.kubernetes_context is None and _NAMESPACE.exists():
            config.load_incluster_config(client_configuration=configuration)
            here = _NAMESPACE.read_text().strip()
        else:
            config.load_kube_config(context=settings.kubernetes_context, client_configuration=configuration)
            here = _of_context(settings.kubernetes_context)
    except Exception as error:
        raise RuntimeFailed(f"no Kubernetes cluster is known: {error}") from error
    configuration.connection_pool_maxsize = _CONNECTIONS
    namespace = settings.kubernetes_namespace or here or "default"
    return Cluster(configuration, namespace, _owner(settings, namespace, settings.kubernetes_pod_namespace or here))


def _of_context(name: str | None) -> str | None:
    from kubernetes import config

    contexts, active = config.list_kube_config_contexts()
    chosen = next((each for each in contexts if each["name"] == name), active)
    namespace: str | None = (chosen.get("context") or {}).get("namespace")
    return namespace


def _owner(settings: RuntimeSettings, namespace: str, own: str | None) -> Owner | None:
    """An owner in another namespace counts as one that is gone: the cluster would remove the pods at once."""
    if settings.kubernetes_pod is None or settings.kubernetes_pod_uid is None or namespace != own:
        return None
    return Owner(settings.kubernetes_pod, settings.kubernetes_pod_uid)


def _told(verb: str, what: str, error: Exception) -> RuntimeFailed:
    """What the API, or the way to it, said."""
    reason = getattr(error, "reason", None)
    status = getattr(error, "status", None)
    try:
        message = json.loads(getattr(error, "body", None) or "").get("message")
    except (ValueError, AttributeError):
        message = None
    told = f"{status} {message or reason}" if status else str(message or reason or error)
    kind = NameTaken if verb == "create" and status == 409 else RuntimeFailed
    return kind(f"Kubernetes: {verb} {what}: {told}")


# A blocking call in a thread of its own, which no other has to wait for, and whose end nothing waits for that has gone on without it.


async def in_thread(call: Callable[[], T]) -> T:
    """What `call` returns, or raises. A caller that is cancelled leaves it running."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def told(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        # A loop that is closed has nobody left who asks.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(told, result, failure)

    threading.Thread(target=run, name="verbatim-call", daemon=True).start()
    return await future


# What the cluster says of a pod, from its status as the API gives it (JSON).


_HOPELESS = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)
"""Reasons for which a container waits that do not pass on their own. ErrImagePull is tried again, and then is ImagePullBackOff."""


def runs(pod: Pod) -> bool:
    """Whether commands can be started in it."""
    states = [each.get("state", {}) for each in _status(pod).get("containerStatuses") or ()]
    return _status(pod).get("phase") == "Running" and bool(states) and all("running" in state for state in states)


def ended(pod: Pod) -> str | None:
    """Why it does not run any more; None while it does, or has not begun to."""
    status = _status(pod)
    for each in status.get("containerStatuses") or ():
        if (gone := each.get("state", {}).get("terminated")) is not None:
            own = _words(status)
            return own or _words(gone) or f"its first process ended with exit code {gone.get('exitCode')}"
    if status.get("phase") in ("Failed", "Succeeded"):
        return _words(status) or f"it has {status['phase'].lower()}"
    return None


def out_of_memory(pod: Pod) -> bool:
    """Whether the kernel ended its container for the memory it took."""
    states = [each.get("state", {}) for each in _status(pod).get("containerStatuses") or ()]
    return any(state.get("terminated", {}).get("reason") == "OOMKilled" for state in states)


def evicted(pod: Pod) -> bool:
    """Whether the machine it was on took it away, for the disk space it used among others."""
    return _status(pod).get("reason") == "Evicted"


def hopeless(pod: Pod) -> str | None:
    """Why it will never run, where that is known already."""
    for each in _status(pod).get("containerStatuses") or ():
        waiting = each.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            return _words(waiting)
    return ended(pod)


def waits_for(pod: Pod) -> str:
    """What it waits for, for who has waited long enough."""
    status = _status(pod)
    for each in status.get("containerStatuses") or ():
        if words := _words(each.get("state", {}).get("waiting") or {}):
            return words
    for each in status.get("conditions") or ():
        if each.get("status") == "False" and (words := _words(each)):
            return words
    return f"it is {status.get('phase', 'unknown')}"


def _status(pod: Pod) -> Mapping[str, Any]:
    return pod.get("status") or {}


def _words(said: Mapping[str, Any]) -> str:
    return ": ".join(word for word in (said.get("reason"), said.get("message")) if word)
