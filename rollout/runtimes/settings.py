"""What a node's machine says about its runtimes; the environment is read here and nowhere else."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollout.runtimes.base import BadRuntime

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Every field has a variable, `VERBATIM_` and its name in capitals; but for those that a pod's own description names."""

    local_dir: Path = Path("/var/tmp/verbatim-runtimes")
    """Where local runtimes have their files. With a user other than root its number is added to the name."""
    local_path: str = SYSTEM_PATH
    """PATH of commands in local runtimes."""
    local_readable: tuple[str, ...] = ()
    """Files and folders of the machine that a sandbox sees, read-only, beside the system's: where harnesses and interpreters are
    installed. Separated by colons."""
    local_sandbox: str = "bwrap"
    """none: a machine without bubblewrap still takes local runtimes, of tasks that want no sandbox."""
    cgroup: Path | None = None
    """A control group (version 2) delegated to the node, below which runtimes get theirs. None: where the node may make any."""
    container_command: str | None = None
    """docker, podman or the path of either. None: the first of those whose engine answers."""
    container_dir: Path = Path("/var/tmp/verbatim-containers")
    """For what the node passes into containers, of which each has a folder."""
    container_user: int = 0
    """Number of the user that commands run as where the task does not say."""
    container_network: str = "bridge"
    """Of the engine, for runtimes and steps with the whole network. host: the node's own."""
    container_flags: tuple[str, ...] = ()
    """Of the container engine, before its subcommand, as a shell splits them."""
    container_run_flags: tuple[str, ...] = ()
    """Of its `run`, as a shell splits them."""
    installs_kept: int = 32
    """How many installed harnesses are kept for later runtimes, as folders and as layers of images each; those that were not used for
    longest are removed, none that is in use."""
    apptainer_command: str = "apptainer"
    """Or singularity, or the path of either."""
    apptainer_dir: Path = Path("/var/tmp/verbatim-instances")
    """Files of apptainer's instances, of which each has a folder. With a user other than root its number is added to the name."""
    apptainer_writable: str = "overlay"
    """overlay: what is written in an instance lies in that folder. tmpfs: in memory, as much as apptainer.conf allows."""
    apptainer_flags: tuple[str, ...] = ()
    """Of `instance start`, as a shell splits them."""
    apptainer_root: str = "refused"
    """allowed: a node that runs as root takes instances all the same."""
    kubernetes_context: str | None = None
    """Of the kubeconfig. None: the cluster that the node runs in, or else the kubeconfig's current one."""
    kubernetes_namespace: str | None = None
    """Where pods are made. None: where the node's own is, or what the kubeconfig's context says."""
    kubernetes_service_account: str | None = None
    """Of the pods, which get no token of it: for the image pull secrets it names. None: the namespace's default."""
    kubernetes_user: int | None = 1000
    """Number of the user that commands run as where the task does not say. None, in the variable `image`: the image's own."""
    kubernetes_network_policy: str = "made"
    """made: the node makes the NetworkPolicy that holds pods to the proxy. given: the namespace must have one that chooses them.
    elsewhere: they are held by other means, so that none is looked for."""
    kubernetes_proxy_pods: Mapping[str, str] = field(default_factory=dict)
    """Labels of the proxy's own pods, where it is a Service: policies are about those. In the variable NAME=VALUE, separated by commas."""
    kubernetes_proxy_namespace: str | None = None
    """Of those pods. None: where the runtimes' are."""
    kubernetes_start_seconds: float = 900.0
    """For a pod to be scheduled and its image to be there."""
    kubernetes_deadline_seconds: int = 86400
    """After which the cluster ends a pod, whatever became of the node."""
    kubernetes_pod: str | None = None
    """The node's own pod, as POD_NAME, its number, POD_UID, and its namespace, POD_NAMESPACE: with the first two pods of runtimes in
    the same namespace belong to it, and go when it goes."""
    kubernetes_pod_uid: str | None = None
    kubernetes_pod_namespace: str | None = None


def from_environment(env: Mapping[str, str] = os.environ) -> RuntimeSettings:
    """The settings of this process. Raises `BadRuntime` for a variable that is no such thing."""
    default = RuntimeSettings()
    given = env.get("VERBATIM_CGROUP")
    return RuntimeSettings(
        local_dir=Path(env.get("VERBATIM_LOCAL_DIR") or _of_user(default.local_dir)),
        local_path=env.get("VERBATIM_LOCAL_PATH") or default.local_path,
        local_readable=tuple(each for each in env.get("VERBATIM_LOCAL_READABLE", "").split(":") if each),
        local_sandbox=env.get("VERBATIM_LOCAL_SANDBOX") or default.local_sandbox,
        cgroup=Path(given) if given else None,
        container_command=env.get("VERBATIM_CONTAINER_COMMAND") or None,
        container_dir=Path(env.get("VERBATIM_CONTAINER_DIR") or default.container_dir),
        container_user=_number_of_user("VERBATIM_CONTAINER_USER", env.get("VERBATIM_CONTAINER_USER") or "0"),
        container_network=env.get("VERBATIM_CONTAINER_NETWORK") or default.container_network,
        container_flags=tuple(shlex.split(env.get("VERBATIM_CONTAINER_FLAGS", ""))),
        container_run_flags=tuple(shlex.split(env.get("VERBATIM_CONTAINER_RUN_FLAGS", ""))),
        installs_kept=int(env.get("VERBATIM_INSTALLS_KEPT") or default.installs_kept),
        apptainer_command=env.get("VERBATIM_APPTAINER_COMMAND") or default.apptainer_command,
        apptainer_dir=Path(env.get("VERBATIM_APPTAINER_DIR") or _of_user(default.apptainer_dir)),
        apptainer_writable=env.get("VERBATIM_APPTAINER_WRITABLE") or default.apptainer_writable,
        apptainer_flags=tuple(shlex.split(env.get("VERBATIM_APPTAINER_FLAGS", ""))),
        apptainer_root=env.get("VERBATIM_APPTAINER_ROOT") or default.apptainer_root,
        kubernetes_context=env.get("VERBATIM_KUBERNETES_CONTEXT") or None,
        kubernetes_namespace=env.get("VERBATIM_KUBERNETES_NAMESPACE") or None,
        kubernetes_service_account=env.get("VERBATIM_KUBERNETES_SERVICE_ACCOUNT") or None,
        kubernetes_user=_user_of(env.get("VERBATIM_KUBERNETES_USER") or str(default.kubernetes_user)),
        kubernetes_network_policy=env.get("VERBATIM_KUBERNETES_NETWORK_POLICY") or default.kubernetes_network_policy,
        kubernetes_proxy_pods=_labels_of(env.get("VERBATIM_KUBERNETES_PROXY_PODS", "")),
        kubernetes_proxy_namespace=env.get("VERBATIM_KUBERNETES_PROXY_NAMESPACE") or None,
        kubernetes_start_seconds=_number(env, "VERBATIM_KUBERNETES_START_SECONDS", default.kubernetes_start_seconds),
        kubernetes_deadline_seconds=int(
            _number(env, "VERBATIM_KUBERNETES_DEADLINE_SECONDS", default.kubernetes_deadline_seconds)
        ),
        kubernetes_pod=env.get("POD_NAME") or None,
        kubernetes_pod_uid=env.get("POD_UID") or None,
        kubernetes_pod_namespace=env.get("POD_NAMESPACE") or None,
    )


def _of_user(folder: Path) -> Path:
    return folder if os.geteuid() == 0 else Path(f"{folder}-{os.geteuid()}")


def _user_of(text: str) -> int | None:
    return None if text == "image" else _number_of_user("VERBATIM_KUBERNETES_USER", text, " nor image")


def _number_of_user(name: str, text: str, other: str = "") -> int:
    if not text.isdigit():
        raise BadRuntime(f"{name}: {text!r} is {'neither' if other else 'not'} the number of a user{other}")
    return int(text)


def _labels_of(text: str) -> dict[str, str]:
    pairs = [each.strip().partition("=") for each in text.split(",") if each.strip()]
    if any(not name or not equals for name, equals, _ in pairs):
        raise BadRuntime(f"VERBATIM_KUBERNETES_PROXY_PODS: {text!r} is not NAME=VALUE, separated by commas")
    return {name: value for name, _, value in pairs}


def _number(env: Mapping[str, str], name: str, usual: float) -> float:
    """Raises `BadRuntime` for what is no number of seconds."""
    text = env.get(name) or str(usual)
    try:
        seconds = float(text)
    except ValueError as error:
        raise BadRuntime(f"{name}: {text!r} is no number of seconds") from error
    if not 1 <= seconds < float("inf"):
        raise BadRuntime(f"{name}: {text!r} is no number of seconds, 1 at least")
    return seconds
