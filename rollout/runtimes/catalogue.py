"""The kinds of runtimes: the built-in ones, and those that installed packages register under the entry point group `verbatim.runtimes`.

An entry point is `name = module:Class`; the class is a `RuntimeKind` whose constructor takes a `RuntimeSettings` or None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from contract.plugins import PluginError, Plugins, load_plugins
from rollout.runtimes.base import BadRuntime, RuntimeKind
from rollout.runtimes.settings import RuntimeSettings

_BUILT_IN = {
    "apptainer": "rollout.runtimes.container.apptainer:ApptainerKind",
    "docker": "rollout.runtimes.container.runtime:ContainerKind",
    "kubernetes": "rollout.runtimes.kubernetes.runtime:KubernetesKind",
    "local": "rollout.runtimes.local.runtime:LocalKind",
}


@cache
def plugins() -> Plugins[Callable[[RuntimeSettings | None], RuntimeKind]]:
    """Raises `PluginConflict`."""
    return load_plugins("verbatim.runtimes", _BUILT_IN, lambda name, kind: kind)


def list_names() -> list[str]:
    return plugins().names()


def load(name: str, settings: RuntimeSettings | None = None) -> RuntimeKind:
    """The kind of that name; `settings` None are those of the environment. Raises `BadRuntime`."""
    try:
        return plugins().load(name)(settings)
    except BadRuntime:
        raise
    except PluginError as error:
        raise BadRuntime(str(error)) from error
    except Exception as error:
        raise BadRuntime(f"the runtime {name!r} cannot be used: {type(error).__name__}: {error}") from error
