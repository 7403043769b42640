"""The kinds of runtimes there are, by name."""

from __future__ import annotations

from collections.abc import Callable

from rollout.runtimes.base import BadRuntime, RuntimeKind
from rollout.runtimes.container.apptainer import ApptainerKind
from rollout.runtimes.container.runtime import ContainerKind
from rollout.runtimes.kubernetes.runtime import KubernetesKind
from rollout.runtimes.local.runtime import LocalKind
from rollout.runtimes.settings import RuntimeSettings

_KINDS: dict[str, Callable[[RuntimeSettings | None], RuntimeKind]] = {
    "apptainer": ApptainerKind,
    "docker": ContainerKind,
    "kubernetes": KubernetesKind,
    "local": LocalKind,
}


def list_names() -> list[str]:
    return sorted(_KINDS)


def load(name: str, settings: RuntimeSettings | None = None) -> RuntimeKind:
    """The kind of that name; `settings` None: those of the environment. Raises `BadRuntime`."""
    if name not in _KINDS:
        raise BadRuntime(f"there is no runtime {name!r}: choose one of {', '.join(list_names())}")
    return _KINDS[name](settings)
