"""The builders of rows: those of `reconstruct.builders`, and those that installed packages add under the entry-point group
`verbatim.builders`, each a function `(Settled, RowContext) -> list[Trajectory]`."""

from __future__ import annotations

from functools import cache

from contract.plugins import Plugins, load_plugins
from reconstruct.accounting import Settled
from reconstruct.builders import Builder, RowContext
from reconstruct.errors import ReconstructError
from reconstruct.trajectory import Trajectory

_BUILT_IN = {"merged": "reconstruct.builders:merged", "per_call": "reconstruct.builders:per_call"}


@cache
def plugins() -> Plugins[Builder]:
    """Any error of a builder from a package is a ReconstructError that names it. Raises `PluginConflict`."""
    return load_plugins("verbatim.builders", _BUILT_IN, _wrap)


def _wrap(name: str, build: Builder) -> Builder:
    if name in _BUILT_IN:
        return build

    def built(settled: Settled, context: RowContext) -> list[Trajectory]:
        try:
            return build(settled, context)
        except ReconstructError:
            raise
        except Exception as error:
            raise ReconstructError(f"the builder {name!r} failed on session {context.session_id}: {error!r}") from error

    return built
