"""The pod that a runtime is, as the Kubernetes API takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.runtimes.pod_scripts import FIRST
from rollout.runtimes.route import named
from rollout.task import RuntimeSpec

INSIDE = "/run/verbatim"
"""A volume of the pod's own that whoever runs in it can write."""
CONTAINER = "runtime"
LABEL = "verbatim.runtime"
"""The runtime's name; by which pods of runtimes are found again."""
NETWORK_LABEL = "verbatim.network"
"""proxy or full: by which a NetworkPolicy chooses the pods that it holds."""
PROXY_LABEL = "verbatim.proxy"
"""Which proxy a pod may reach, where the node makes the policy."""
MANAGED = {"app.kubernetes.io/managed-by": "verbatim"}
_VOLUME = "verbatim"
_KEPT = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""Nobody moves a rollout to another machine to save one: it would have to begin again."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The pod that a node runs in."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Way:
    """To the proxy: its name, or its address, the addresses that stand for it, and its port."""

    host: str
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of a pod does not come from the task's own spec. `way` None: it has the whole network. `user` None: whom the image says.
    `owner` must be in the same namespace: with it the pod goes when that is gone."""

    way: Way | None
    owner: Owner | None
    service_account: str | None
    user: int | None
    deadline_seconds: int


def labels(spec: RuntimeSpec, name: str) -> dict[str, str]:
    return {**MANAGED, LABEL: name, NETWORK_LABEL: spec.network}


def manifest(spec: RuntimeSpec, name: str, labels: Mapping[str, str], surroundings: Surroundings) -> dict[str, Any]:
    """Of a pod that lives for `deadline_seconds` at most."""
    metadata: dict[str, Any] = {"name": name, "labels": dict(labels), "annotations": _KEPT}
    if (owner := surroundings.owner) is not None:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid}]
    whole: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": surroundings.deadline_seconds,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(surroundings.user),
        "containers": [_container(spec, surroundings.user)],
        "volumes": [{"name": _VOLUME, "emptyDir": {}}],
        **(_names(surroundings.way) if surroundings.way is not None else {}),
    }
    if surroundings.service_account is not None:
        whole["serviceAccountName"] = surroundings.service_account
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}


def _names(way: Way) -> dict[str, Any]:
    """The proxy's name is known without any name service: with one, a pod could tell the world what it likes."""
    known: dict[str, Any] = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    if named(way.host) is not None:
        known["hostAliases"] = [{"ip": address, "hostnames": [way.host]} for address in way.addresses]
    return known


def _container(spec: RuntimeSpec, user: int | None) -> dict[str, Any]:
    # What is asked for is what is given: a rollout is as fast on a full machine as on an empty one.
    amounts = {"cpu": f"{max(1, round(spec.cpus * 1000))}m", "memory": f"{spec.memory_mb}Mi"}
    if spec.disk_mb is not None:
        amounts["ephemeral-storage"] = f"{spec.disk_mb}Mi"
    # A user that is not root has no use for capabilities; root in an image needs the usual ones to install anything.
    dropped = ["ALL"] if user else ["NET_RAW"]
    return {
        "name": CONTAINER,
        "image": spec.image,
        "command": ["/bin/sh", "-c", FIRST, INSIDE],
        "workingDir": "/",
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": dropped}},
        "volumeMounts": [{"name": _VOLUME, "mountPath": INSIDE}],
    }


def _pod_security(user: int | None) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user is not None:
        security |= {"runAsNonRoot": user != 0, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return security
