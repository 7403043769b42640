"""The settings of a machine's runtimes. The environment is read here and nowhere else."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from rollout.runtimes.base import BadRuntime
from rollout.task import describe_problems

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DOMAIN = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_LabelName = Annotated[str, StringConstraints(pattern=f"^({_DOMAIN}/)?{_WORD}$")]
_ObjectName = Annotated[str, StringConstraints(pattern=f"^{_DOMAIN}$")]
_LabelValue = Annotated[str, StringConstraints(pattern=f"^({_WORD})?$")]
_RULES = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class Toleration(BaseModel):
    model_config = _RULES

    key: _LabelName | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Toleration:
        if self.operator == "Exists" and self.value:
            raise ValueError("operator Exists takes no value")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("without a key the operator must be Exists")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds needs the effect NoExecute")
        return self


class PodFields(BaseModel):
    """What the operator of a node puts into the pod of every runtime, spelled as Kubernetes spells it."""

    model_config = _RULES

    annotations: dict[_LabelName, str] = Field(default_factory=dict)
    node_selector: dict[_LabelName, _LabelValue] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = Field(default=(), strict=False)
    runtime_class_name: _ObjectName | None = None
    priority_class_name: _ObjectName | None = None


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """The variable of a field is `VERBATIM_` and its name in capitals, except for those of the node's own pod."""

    local_dir: Path = Path("/var/tmp/verbatim-runtimes")
    """Holds the files of local runtimes. For a user other than root, its number is appended to the name."""
    local_path: str = SYSTEM_PATH
    """PATH of commands in local runtimes."""
    local_readable: tuple[str, ...] = ()
    """Files and folders, separated by colons, that a sandbox sees read-only in addition to the system's: where harnesses and interpreters
    are installed."""
    local_sandbox: str = "bwrap"
    """none: a machine without bubblewrap still runs local runtimes, for tasks that ask for no sandbox."""
    cgroup: Path | None = None
    """A control group (version 2) delegated to the node, below which runtimes get theirs. None: wherever the node may make one."""
    container_command: str | None = None
    """docker, podman or the path of either. None: the first of the two whose engine answers."""
    container_dir: Path = Path("/var/tmp/verbatim-containers")
    """Holds a folder per container, for what the node passes into it."""
    container_user: int = 0
    """Number of the user that commands run as unless the task names one."""
    container_network: str | None = None
    """The engine's network for runtimes and steps with the whole network, in which they reach each other. host: the node's own. None: the
    engine makes one for each runtime."""
    container_set_id: str = "refused"
    """allowed: commands in containers may make files set-user-id and set-group-id, as packages do that bring such programs."""
    container_flags: tuple[str, ...] = ()
    """Flags of the container engine before its subcommand, as a shell splits them."""
    container_run_flags: tuple[str, ...] = ()
    """Flags of its `run`, as a shell splits them: --runtime runc, --storage-opt size=20G."""
    installs_kept: int = 32
    """How many installed harnesses are kept for later runtimes: as many folders, and as many image layers. The least recently used are
    removed, never one in use."""
    apptainer_command: str = "apptainer"
    """Or singularity, or the path of either."""
    apptainer_dir: Path = Path("/var/tmp/verbatim-instances")
    """Holds a folder per apptainer instance. For a user other than root, its number is appended to the name."""
    apptainer_writable: str = "overlay"
    """overlay: what an instance writes is stored in that folder. tmpfs: in memory, as much as apptainer.conf allows."""
    apptainer_flags: tuple[str, ...] = ()
    """Flags of `instance start`, as a shell splits them, such as --fakeroot."""
    apptainer_root: str = "refused"
    """allowed: a node that runs as root starts instances all the same."""
    kubernetes_context: str | None = None
    """A context of the kubeconfig. None: the cluster that the node runs in, else the kubeconfig's current context."""
    kubernetes_namespace: str | None = None
    """Where pods are made. None: the namespace of the node's own pod, or that of the kubeconfig's context."""
    kubernetes_service_account: str | None = None
    """Of the pods, for its image pull secrets; they get no token of it. None: the namespace's default."""
    kubernetes_user: int | None = 1000
    """Number of the user that commands run as unless the task names one. None (`image` in the variable): the image's own."""
    kubernetes_seccomp_profile: str | None = None
    """The system call filter of pods: a file below the seccomp folder of the cluster's machines. None: the cluster's default filter."""
    kubernetes_pod_fields: PodFields = field(default_factory=PodFields)
    """What every pod gets, as JSON in Kubernetes' own spelling: any of annotations, nodeSelector, tolerations, runtimeClassName,
    priorityClassName. A task may add to the node selector, and to nothing else."""
    kubernetes_network_policy: str = "made"
    """made: the node makes the NetworkPolicy that restricts pods to the proxy. given: the namespace must have one that selects
    `verbatim.network: proxy`, or nothing starts.
    elsewhere: pods are restricted by other means, and no policy is looked for."""
    kubernetes_proxy_pods: Mapping[str, str] = field(default_factory=dict)
    """Labels of the proxy's pods if it is behind a Service: policies match those. As app=verbatim,tier=api in the variable."""
    kubernetes_proxy_namespace: str | None = None
    """Namespace of those pods. None: the runtimes' own."""
    kubernetes_start_seconds: float = 900.0
    """Seconds for a pod to be scheduled and its image to be pulled."""
    kubernetes_deadline_seconds: int = 86400
    """Seconds after which the cluster ends a pod, whatever became of the node."""
    kubernetes_pod: str | None = None
    """The node's own pod: POD_NAME, POD_UID and POD_NAMESPACE. With the first two, it owns the pods of runtimes in its namespace, and the
    cluster removes them with it."""
    kubernetes_pod_uid: str | None = None
    kubernetes_pod_namespace: str | None = None


def read_environment(env: Mapping[str, str] = os.environ) -> RuntimeSettings:
    """The settings of this process; an empty variable is one that is not set. Raises `BadRuntime` for an invalid variable."""
    default = RuntimeSettings()
    given: dict[str, Any] = {name: _append_user(getattr(default, name)) for name in ("local_dir", "apptainer_dir")}
    for name, variable in VARIABLES.items():
        if text := env.get(variable):
            try:
                given[name] = _PARSERS.get(name, str)(text)
            except ValueError as error:
                raise BadRuntime(f"{variable}: {text!r} {error}") from error
    return RuntimeSettings(**given)


def _append_user(folder: Path) -> Path:
    return folder if os.geteuid() == 0 else Path(f"{folder}-{os.geteuid()}")


# Parsers raise a `ValueError` that explains the problem.


def _parse_user(text: str) -> int:
    if not text.isdigit():
        raise ValueError("is not the number of a user")
    return int(text)


def _parse_labels(text: str) -> dict[str, str]:
    pairs = [each.strip().partition("=") for each in text.split(",") if each.strip()]
    if any(not name or not equals for name, equals, _ in pairs):
        raise ValueError("is not NAME=VALUE, separated by commas")
    return {name: value for name, _, value in pairs}


def _parse_pod_fields(text: str) -> PodFields:
    try:
        return PodFields.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"is not valid: {describe_problems(error)}") from error


def _parse_seconds(text: str) -> float:
    with suppress(ValueError):
        if 1 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise ValueError("is not a number of seconds of at least 1")


VARIABLES: Mapping[str, str] = {
    **{each.name: f"VERBATIM_{each.name.upper()}" for each in fields(RuntimeSettings)},
    **{"kubernetes_pod": "POD_NAME", "kubernetes_pod_uid": "POD_UID", "kubernetes_pod_namespace": "POD_NAMESPACE"},
}
"""By field."""
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("local_dir", "cgroup", "container_dir", "apptainer_dir"), Path),
    **dict.fromkeys(("container_flags", "container_run_flags", "apptainer_flags"), lambda text: tuple(shlex.split(text))),
    "local_readable": lambda text: tuple(each for each in text.split(":") if each),
    "container_user": _parse_user,
    "installs_kept": int,
    "kubernetes_user": lambda text: None if text == "image" else _parse_user(text),
    "kubernetes_pod_fields": _parse_pod_fields,
    "kubernetes_proxy_pods": _parse_labels,
    "kubernetes_start_seconds": _parse_seconds,
    "kubernetes_deadline_seconds": lambda text: int(_parse_seconds(text)),
}
"""By field; without one the text is the value."""
