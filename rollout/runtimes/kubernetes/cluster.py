"""One namespace of a Kubernetes cluster, through the official asyncio client (`kubernetes.aio`).

Objects go in and come out as JSON, spelled as the API spells them: an answer is not parsed into the client's models, which refuse values
that a newer cluster adds. Every operation opens its own client, because a runtime kind has no moment at which a shared one could be
closed; a TLS handshake costs little beside starting a pod.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reconstruct.extras import how_to_install
from rollout.runtimes.base import NoRoom, RuntimeFailed
from rollout.runtimes.kubernetes.manifest import CONTAINER, LABEL, Owner
from rollout.runtimes.settings import RuntimeSettings

if TYPE_CHECKING:
    from aiohttp import ClientWebSocketResponse
    from kubernetes.aio.client import ApiClient, Configuration
    from kubernetes.aio.stream import WsApiClient


_REQUEST_SECONDS = 60.0
_WATCH_SECONDS = 30.0
"""The longest single watch. A watch whose connection silently died goes unnoticed for this long."""
_MIN_WATCH_SECONDS = 0.05
_PING_SECONDS = 40.0
"""Interval of pings on a silent exec connection, under the 60 s after which load balancers drop one. The answer may take half as long."""
_CLOSE_SECONDS = 1.0
_TOKEN_SECONDS = 60.0
"""How often a kubeconfig's credentials are checked for expiry; the client itself does so only for a service account."""
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_GRACE_SECONDS = 1

T = TypeVar("T")
Pod = Mapping[str, Any]


class NameTaken(RuntimeFailed):
    """Another pod has this name."""


class PodApi:
    """`owner` is the node's own pod if it lives in the same namespace."""

    def __init__(self, configuration: Configuration, namespace: str, owner: Owner | None) -> None:
        self.namespace = namespace
        self.owner = owner
        self._configuration = configuration

    async def create_pod(self, manifest: Mapping[str, Any]) -> Pod:
        """The pod as the cluster accepted it. Raises `NameTaken`, `NoRoom` for a quota that is used up, `RuntimeFailed`."""
        name = manifest["metadata"]["name"]
        pod: Pod | None = await self._request("create", name, "create_namespaced_pod", body=dict(manifest), ignore=(409,))
        if pod is None:
            raise NameTaken(f"Kubernetes: create {name}: the namespace {self.namespace} already has a pod of this name")
        return pod

    async def read_pod(self, name: str) -> Pod | None:
        pod: Pod | None = await self._request("read", name, "read_namespaced_pod", name=name, ignore=(404,))
        return pod

    async def list_pods(self) -> Sequence[Pod]:
        """The pods of all runtimes in the namespace, from every node."""
        answer = await self._request("list", "pods", "list_namespaced_pod", label_selector=LABEL)
        return answer.get("items") or ()

    async def list_policies(self) -> Sequence[Mapping[str, Any]]:
        answer = await self._request("list", "network policies", "list_namespaced_network_policy")
        return answer.get("items") or ()

    async def ensure_policy(self, policy: Mapping[str, Any], **options: str) -> None:
        """Creates the NetworkPolicy unless one of this name exists; with `dry_run="All"` only checks that the node may. Raises
        `RuntimeFailed`."""
        operation = "create_namespaced_network_policy"
        await self._request("create", policy["metadata"]["name"], operation, body=dict(policy), ignore=(409,), **options)

    async def delete_pod(self, name: str, uid: str | None, seconds: float) -> None:
        """Returns once the pod is gone, or after `seconds`. With a `uid`, another pod of the same name is left alone."""
        body: dict[str, Any] = {"gracePeriodSeconds": _GRACE_SECONDS}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        # 409: the name now belongs to another pod.
        answer = await self._request("delete", name, "delete_namespaced_pod", name=name, body=body, ignore=(404, 409))
        if answer is not None:
            await self.wait_for_pod(
                name, lambda pod: True if pod is None or pod["metadata"].get("uid") != uid else None, seconds
            )

    async def wait_for_pod(self, name: str, decide: Callable[[Pod | None], T | None], seconds: float) -> T | None:
        """The first result of `decide` that is not None, or None after `seconds`. `decide` gets None if there is no such pod."""
        deadline = time.monotonic() + seconds
        while True:
            pod = await self.read_pod(name)
            if (result := decide(pod)) is not None:
                return result
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await self._wait_for_change(name, pod, min(left, _WATCH_SECONDS))

    async def _wait_for_change(self, name: str, pod: Pod | None, seconds: float) -> None:
        """Returns at the first event of the pod since `pod` was read, or after `seconds`."""
        from kubernetes.aio.client import ApiClient

        begun = time.monotonic()
        # However a watch ends, an outdated version included, the caller reads the pod again.
        with suppress(Exception):
            async with asyncio.timeout(seconds), ApiClient(self._configuration) as client:
                response = await self._bind(client, "list_namespaced_pod")(
                    watch=True,
                    field_selector=f"metadata.name={name}",
                    resource_version=pod["metadata"].get("resourceVersion") if pod else None,
                    timeout_seconds=round(_WATCH_SECONDS),
                )
                with closing(response):
                    await response.content.readany()
        # Do not spin on a cluster that ends every watch at once.
        if time.monotonic() - begun < _MIN_WATCH_SECONDS:
            await asyncio.sleep(min(_MIN_WATCH_SECONDS, seconds))

    @asynccontextmanager
    async def connect(self, name: str, argv: Sequence[str], *, stdin: bool) -> AsyncIterator[ClientWebSocketResponse]:
        """A websocket to argv, which runs in the pod. Raises `RuntimeFailed`."""
        async with _make_exec_client(self._configuration) as client:
            try:
                opening = await self._bind(client, "connect_get_namespaced_pod_exec")(
                    name=name,
                    container=CONTAINER,
                    command=list(argv),
                    stdin=stdin,
                    stdout=True,
                    stderr=True,
                    tty=False,
                )
                socket: ClientWebSocketResponse = await opening
            except Exception as error:
                raise _translate("exec in", name, error) from error
            try:
                yield socket
            finally:
                await socket.close()

    async def _request(self, verb: str, subject: str, operation: str, *, ignore: Sequence[int] = (), **arguments: Any) -> Any:
        """The API's answer, or None for a status in `ignore`. Raises `RuntimeFailed`."""
        from kubernetes.aio.client import ApiClient

        try:
            async with ApiClient(self._configuration) as client:
                response = await self._bind(client, operation)(_request_timeout=_REQUEST_SECONDS, **arguments)
                text = await response.text()
        except Exception as error:
            raise _translate(verb, subject, error) from error
        if response.status in ignore:
            return None
        if response.status >= 400:
            reason = _find_message(text) or response.reason
            failure = NoRoom if response.status == 403 and "exceeded quota" in reason else RuntimeFailed
            raise failure(f"Kubernetes: {verb} {subject}: {response.status} {reason}")
        return json.loads(text)

    def _bind(self, client: ApiClient, operation: str) -> Callable[..., Any]:
        """The client's method of that name for this namespace, in the variant that returns the response unparsed."""
        from kubernetes.aio.client import CoreV1Api, NetworkingV1Api

        api = (NetworkingV1Api if "network_policy" in operation else CoreV1Api)(client)
        return partial(getattr(api, f"{operation}_without_preload_content"), namespace=self.namespace)


def _make_exec_client(configuration: Configuration) -> WsApiClient:
    from aiohttp import ClientWSTimeout
    from kubernetes.aio.stream import WsApiClient
    from kubernetes.aio.stream.ws_client import get_websocket_url

    class ExecClient(WsApiClient):  # type: ignore[misc]
        """Offers version 5 of the protocol, and honours the kubeconfig's proxy and TLS server name, which the package's class ignores."""

        async def request(self, method: str, url: str, headers: Mapping[str, str] | None = None, **_: Any) -> Any:
            session = self.rest_client.pool_manager = self.rest_client._create_pool_manager()
            return session.ws_connect(
                get_websocket_url(url),
                headers=headers,
                protocols=_PROTOCOLS,
                heartbeat=_PING_SECONDS,
                timeout=ClientWSTimeout(ws_close=_CLOSE_SECONDS),
                proxy=configuration.proxy,
                proxy_headers=configuration.proxy_headers,
                server_hostname=configuration.tls_server_name,
            )

    return ExecClient(configuration)


def _translate(verb: str, name: str, error: Exception) -> RuntimeFailed:
    status = f"{status} " if (status := getattr(error, "status", None)) else ""
    reason = getattr(error, "message", None) or str(error) or type(error).__name__
    return RuntimeFailed(f"Kubernetes: {verb} {name}: {status}{reason}")


def _find_message(text: str) -> str | None:
    """The message of a `Status` object."""
    try:
        message: str | None = json.loads(text).get("message")
    except (ValueError, AttributeError):
        return None
    return message


async def load_cluster(settings: RuntimeSettings) -> PodApi:
    """The cluster that the settings name: the one this process runs in, or a context of the kubeconfig. Raises `RuntimeFailed`."""
    try:
        from kubernetes.aio import config
        from kubernetes.aio.client import Configuration
    except ImportError as error:
        raise RuntimeFailed(f"the package kubernetes is not installed: {how_to_install('rollout')}") from error
    configuration = Configuration()
    try:
        here = _read_own_namespace() if settings.kubernetes_context is None else None
        if here is not None:
            config.load_incluster_config(client_configuration=configuration)
        else:
            loader = await config.load_kube_config(
                context=settings.kubernetes_context, client_configuration=configuration, persist_config=False
            )
            configuration.refresh_api_key_hook = _make_refresh(loader.load_and_set)
            here = loader.current_context["context"].get("namespace")
    except Exception as error:
        raise RuntimeFailed(f"no Kubernetes cluster is configured: {error}") from error
    namespace = settings.kubernetes_namespace or here or "default"
    return PodApi(configuration, namespace, _find_owner(settings, namespace, settings.kubernetes_pod_namespace or here))


def _read_own_namespace() -> str | None:
    """None outside a cluster."""
    with suppress(FileNotFoundError):
        return _NAMESPACE.read_text().strip()
    return None


def _make_refresh(load: Callable[[Configuration], Any]) -> Callable[[Configuration], Any]:
    """A hook that reads the credentials again, at most every `_TOKEN_SECONDS`; `load` itself renews only those that expire."""
    loaded = time.monotonic()

    async def refresh(configuration: Configuration) -> None:
        nonlocal loaded
        if time.monotonic() - loaded >= _TOKEN_SECONDS:
            loaded = time.monotonic()
            await load(configuration)

    return refresh


def _find_owner(settings: RuntimeSettings, namespace: str, own: str | None) -> Owner | None:
    """None also for a node in another namespace: the cluster takes such an owner for deleted and removes the pods at once."""
    if settings.kubernetes_pod is None or settings.kubernetes_pod_uid is None or namespace != own:
        return None
    return Owner(settings.kubernetes_pod, settings.kubernetes_pod_uid)


# Reading a pod's status


_HOPELESS = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)
"""Reasons for waiting that do not resolve on their own. ErrImagePull is retried and then becomes ImagePullBackOff."""


def is_running(pod: Pod) -> bool:
    states = _find_states(pod)
    return _get_status(pod).get("phase") == "Running" and bool(states) and all("running" in state for state in states)


def find_end(pod: Pod) -> str | None:
    """Why the pod ended; None while it runs or has not started."""
    status = _get_status(pod)
    for state in _find_states(pod):
        if (end := state.get("terminated")) is not None:
            return _join_words(status) or _join_words(end) or f"its first process ended with exit code {end.get('exitCode')}"
    if status.get("phase") in ("Failed", "Succeeded"):
        return _join_words(status) or f"it has {status['phase'].lower()}"
    return None


def is_out_of_memory(pod: Pod) -> bool:
    return any(state.get("terminated", {}).get("reason") == "OOMKilled" for state in _find_states(pod))


def is_evicted(pod: Pod) -> bool:
    """Whether the kubelet evicted it, for its disk usage among other reasons."""
    return _get_status(pod).get("reason") == "Evicted"


def find_hopeless(pod: Pod) -> str | None:
    """Why it will never run, once that is certain."""
    for state in _find_states(pod):
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            return _join_words(waiting)
    return find_end(pod)


def describe_wait(pod: Pod) -> str:
    """What a pod that does not run yet is waiting for."""
    for state in _find_states(pod):
        if words := _join_words(state.get("waiting") or {}):
            return words
    status = _get_status(pod)
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and (words := _join_words(condition)):
            return words
    return f"it is {status.get('phase', 'unknown')}"


def _get_status(pod: Pod) -> Mapping[str, Any]:
    return pod.get("status") or {}


def _find_states(pod: Pod) -> list[Mapping[str, Any]]:
    return [each.get("state", {}) for each in _get_status(pod).get("containerStatuses") or ()]


def _join_words(status: Mapping[str, Any]) -> str:
    return ": ".join(word for word in (status.get("reason"), status.get("message")) if word)
