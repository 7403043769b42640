"""A push as it was asked for, held against what may be pushed: `checked` makes a Push of it or says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

from proxy.engine.replica_update import Kind, Mode, Push
from proxy.engine.weight_api import Transfer
from proxy.errors import RequestError
from proxy.settings import Settings


def checked(
    settings: Settings, version: int, path: str | None, kind: str, mode: str, policy: str, transfer: Transfer | None
) -> Push:
    """Raises RequestError."""
    if kind not in get_args(Kind):
        raise RequestError(f"kind is {kind!r}, must be one of {', '.join(get_args(Kind))}", param="kind")
    if mode not in get_args(Mode):
        raise RequestError(f"mode is {mode!r}, must be one of {', '.join(get_args(Mode))}", param="mode")
    if version < 1:
        raise RequestError(f"version is {version}, must be 1 or more", param="version")
    if (kind == "nccl") != (transfer is not None):
        raise RequestError("a transfer belongs to kind nccl, and kind nccl to a transfer", param="transfer")
    if path is not None:
        _check_path(path, settings.weights_roots)
    elif kind != "nccl":
        raise RequestError(f"kind {kind} needs a path", param="path")
    return Push(version, path, cast(Kind, kind), cast(Mode, mode), policy, transfer)


def _check_path(path: str, roots: list[Path]) -> None:
    if not Path(path).is_absolute():
        raise RequestError(f"path {path!r} must be absolute: the engines open it", param="path")
    if "\0" in path:
        raise RequestError("path holds a zero byte", param="path")
    resolved = Path(path).resolve()
    if roots and not any(resolved.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        raise RequestError(f"path {path!r} is outside the folders weights may come from: {allowed}", param="path")
    if ".." in Path(path).parts:
        # After a link that only the engine's machine has, ".." is somewhere else than it seems here.
        raise RequestError(f"path {path!r} must lead straight down, without '..'", param="path")
