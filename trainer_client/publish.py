"""New weights as files for the engines, in `directory/version-<n>/`, and the result of a push.

A folder is written under a hidden name, flushed, and renamed when complete, so that no engine opens half a checkpoint. Tensors that
share memory (tied embeddings) are written under each of their names, because an engine that does not tie them would keep the old
values of a missing name.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.deltas import Stamps, list_bases, write_digests
from contract.tensor_files import BrokenWeights
from trainer_client.errors import InvalidAnswer, PublishError, UnpublishableWeights

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

_VERSION_FOLDER = re.compile(r"version-(\d+)")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)(\.index\.json)?|\..*")
"""Files of a checkpoint that hold its weights, and hidden ones."""
_UNFINISHED_FOLDER = re.compile(r"\.version-(\d+)\.(writing|replaced)")


@dataclass(frozen=True, slots=True)
class WeightPush:
    """The result of a push. `replicas` has per engine `{ok, seconds, error?}`; `seconds` is the whole push, in the service.

    `applied`: at least one engine runs on the new weights and `version` is current; the service retries those that failed, which
    take no calls until then. If not applied, nothing changed and the push may be repeated.
    """

    version: int
    path: str
    applied: bool
    seconds: float
    replicas: Mapping[str, Mapping[str, Any]]

    @property
    def failed(self) -> dict[str, str]:
        """The reason of each engine that does not run on the new weights."""
        return {name: str(result.get("error", "")) for name, result in self.replicas.items() if not result["ok"]}


def decode_push(answer: Any, version: int, path: str) -> WeightPush:
    """The push that an answer to `POST /weights` reports. Raises InvalidAnswer."""
    try:
        replicas = {name: {**result, "ok": bool(result["ok"])} for name, result in answer["replicas"].items()}
        return WeightPush(version, path, bool(answer["applied"]), float(answer["seconds"]), replicas)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidAnswer(f"the answer to a push is not readable: {error!r}") from error


def explain_failure(push: WeightPush) -> str:
    """One sentence about a push that did not reach every engine."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in push.failed.items())
    state = "the others serve it" if push.applied else "no replica serves it; nothing has changed"
    return f"version {push.version} failed on {len(push.failed)} of {len(push.replicas)} replicas, {state}: {reasons}"


def checkpoints_in_use(status: Mapping[str, Any]) -> dict[Path, str]:
    """What the service loads into an engine that restarts, and the model whose engine that is, from the answer of `GET /weights`: each
    model's last full weights and its last adapter."""
    used: dict[Path, str] = {}
    for model, line in {"": status, **status.get("models", {})}.items():
        newest: dict[bool, str | None] = {}
        for pushed in [line["current"], *line.get("history", ())]:
            if pushed["version"] <= line["current"]["version"]:
                newest.setdefault(pushed.get("kind") == "lora", pushed.get("path"))
        used |= {Path(path).resolve(): model for path in newest.values() if path}
    return used


def target_folder(directory: str | os.PathLike[str], version: int) -> Path:
    """Where `write_weights` leaves a version; absolute."""
    return Path(directory).resolve() / f"version-{version}"


def write_weights(
    state_dict: Mapping[str, Any],
    directory: str | os.PathLike[str],
    version: int,
    *,
    config: Any = None,
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write `state_dict` as safetensors to `directory/version-<version>`; returns that absolute path.

    One file `model.safetensors`, or shards of at most `shard_bytes` (a larger tensor gets its own shard) with
    `model.safetensors.index.json`. An existing folder of that version is replaced. In a distributed trainer, call it on one rank
    with full tensors. `config`, the model's (`model.config`) or the folder it was loaded from, makes it a whole checkpoint that
    `from_pretrained` loads, with the folder's tokenizer; without it, engines load the folder, and `from_pretrained` does not.
    Raises: UnpublishableWeights.
    """
    return write_tensors(check_tensors(state_dict), directory, version, config=config, shard_bytes=shard_bytes)


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    version: int,
    *,
    config: Any = None,
    shard_bytes: int = 5 * 10**9,
    stamps: Stamps | None = None,
) -> Path:
    """As `write_weights`, of tensors that have been checked. With `stamps`, theirs, the folder is an anchor of deltas."""
    if config is not None and not hasattr(config, "save_pretrained") and not (Path(config) / "config.json").is_file():
        raise UnpublishableWeights(f"config: {config} is neither a model's config nor a folder with a config.json")
    if config is None:
        _explain_weights_only(Path(directory).resolve())
    shards = list(_shards(tensors, shard_bytes))
    names = _file_names(len(shards))
    with version_folder(directory, version) as folder:
        if config is not None:
            _write_config(config, folder.unfinished)
        for name, shard in zip(names, shards, strict=True):
            _write_shard(folder.unfinished / name, {key: tensors[key] for key in shard})
        if len(shards) > 1:
            _write_index(folder.unfinished, tensors, dict(zip(names, shards, strict=True)))
        if stamps is not None:
            write_digests(folder.unfinished, stamps, version)
    return folder.path


@dataclass(frozen=True, slots=True)
class VersionFolder:
    """`path` is the absolute final path, `unfinished` the one to write to."""

    path: Path
    unfinished: Path


@contextmanager
def version_folder(directory: str | os.PathLike[str], version: int) -> Iterator[VersionFolder]:
    """A hidden, empty folder that becomes `directory/version-<version>` if the block succeeds, replacing an existing one."""
    target = target_folder(directory, version)
    unfinished = target.with_name(f".version-{version}.writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield VersionFolder(target, unfinished)
    for file in unfinished.iterdir():
        _flush(file)
    _rename_into_place(unfinished, target)


def prune_versions(
    directory: str | os.PathLike[str], version: int, keep_last: int, *, in_use: Container[Path] = ()
) -> list[Path]:
    """Remove all but the newest `keep_last` versions up to `version`, and older unfinished ones. Returns the removed folders.

    Folders of greater versions, those `in_use` (absolute), those on which a delta that stays is built, and anything that is not a version
    folder, are untouched. While a delta that stays cannot be read, nothing is removed."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: the version just published must stay")
    folder = Path(directory).resolve()
    numbers = _list_numbered(folder, _VERSION_FOLDER)
    kept = set(sorted(number for number in numbers.values() if number <= version)[-keep_last:])
    old = [path for path, number in numbers.items() if number <= version and number not in kept and path not in in_use]
    try:
        needed = {base for path in numbers.keys() - {*old} for base in list_bases(path)}
    except BrokenWeights as error:
        log.warning("no version is removed: %s", error)
        return []
    old = [path for path in old if path not in needed]
    old += [path for path, number in _list_numbered(folder, _UNFINISHED_FOLDER).items() if number <= version]
    for path in old:
        shutil.rmtree(path)
    return old


def check_tensors(state_dict: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The tensors of the state dict, those of floats of 16 bits and more as `dtype`, if one is given, and then on the CPU; tensors that
    share memory still do. Raises UnpublishableWeights, also for one that holds a NaN: engines load it and answer as if nothing were."""
    import torch

    cast: dict[tuple[object, ...], torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnpublishableWeights(f"{name!r} is of type {type(tensor).__name__}, not a torch tensor")
        if hasattr(tensor, "full_tensor"):
            raise UnpublishableWeights(f"{name!r} is a shard of a distributed tensor: gather full_tensor() first")
        if tensor.is_meta:
            raise UnpublishableWeights(f"{name!r} is on the meta device and has no values")
        if tensor.layout != torch.strided:
            raise UnpublishableWeights(f"{name!r} is sparse ({tensor.layout}), which safetensors cannot hold")
        if dtype is not None and tensor.is_floating_point() and tensor.itemsize > 1:
            memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if memory not in cast:
                cast[memory] = tensor.detach().to("cpu", dtype)
            tensor = cast[memory]
        if _holds_nan(tensor):
            raise UnpublishableWeights(f"{name!r} holds a NaN: the model has diverged")
        tensors[name] = tensor
    if not state_dict:
        raise UnpublishableWeights("the state dict is empty")
    return tensors


def _holds_nan(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    return bool((tensor if tensor.itemsize > 1 else tensor.float()).isnan().any())


@cache
def _explain_weights_only(directory: Path) -> None:
    """Once for each folder."""
    log.warning(
        "%s gets weights alone, which engines load; for from_pretrained, publish them with config=model.config", directory
    )


def _write_config(config: Any, folder: Path) -> None:
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
        return
    for file in Path(config).iterdir():
        if file.is_file() and not _WEIGHTS.fullmatch(file.name):
            shutil.copyfile(file, folder / file.name)


def _shards(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, so views and tied weights are copied for this file.
        memory = whole.untyped_storage().data_ptr()
        own[name] = whole.clone() if memory in seen else whole
        seen.add(memory)
    save_file(own, path, metadata={"format": "pt"})


def _write_index(folder: Path, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Sequence[str]]) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    weight_map = {name: file for file, names in shards.items() for name in names}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _rename_into_place(unfinished: Path, target: Path) -> None:
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    unfinished.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    _flush(target.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list_numbered(folder: Path, pattern: re.Pattern[str]) -> dict[Path, int]:
    found = ((path, pattern.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir())
    return {path: int(match[1]) for path, match in found if match}


class ReplicaFailed(PublishError):
    def __init__(self, message: str, *, push: WeightPush) -> None:
        super().__init__(message)
        self.push = push
