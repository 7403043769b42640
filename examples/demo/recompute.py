"""Recomputes, with transformers, the logprob of every sampled token under the weights it is said to come from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contract.tensor_files import map_tensors
from examples.demo.plan import Plan
from examples.demo.trainer import WHOLE
from proxy.engine.in_vllm.mirror import CURRENT
from proxy.engine.in_vllm.sources import open_source
from trainer_client import Batch, Group, MediaFiles, Vision, decode_trajectory, load_model

Row = Mapping[str, Any]


def largest_difference(
    rows: Sequence[Row],
    model_dir: str,
    weights_dir: Path,
    *,
    dtype: torch.dtype,
    images: Mapping[str, bytes] | None = None,
    batch: int = 32,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[float, int]:
    """The largest |stored - recomputed| over all tokens of `rows` with mask 1, and how many tokens that were. `images`: those of the rows,
    by digest.

    Version 0 is `model_dir` itself, version n is `weights_dir`/version-n. A row sampled across an update is computed
    once under each of its versions, each time with its whole context.
    """
    by_version = rows_by_version(rows)
    work = sum(len(chosen) for chosen in by_version.values())
    largest, tokens, done = torch.zeros(()), 0, 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, vision = load_model(model_dir, dtype=dtype)
    model.to(device)
    for version, chosen in sorted(by_version.items()):
        if version > 0:
            model.load_state_dict(load_checkpoint(weights_dir / f"version-{version}"))
        chosen.sort(key=lambda row: len(row["token_ids"]))
        for start in range(0, len(chosen), batch):
            part = chosen[start : start + batch]
            seen = {} if vision is None else _look(vision, images or {}, part)
            differences = _differences(model, part, version, seen)
            # torch's maximum, unlike Python's, keeps a NaN: what is no number must not pass as a small one.
            largest = torch.cat([largest[None], differences]).max()
            tokens += len(differences)
            done += len(part)
            progress(done, work)
    return largest.item(), tokens


def rows_by_version(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """For each weight version the rows that have tokens of it."""
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        for version in {version for version, _, _ in row["weight_versions"]}:
            found[version].append(row)
    return found


def load_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a version, which may be a delta."""
    source = open_source(str(directory), None, None)
    return dict(source.read(source.headers))


def differing_tensors(plan: Plan) -> list[str]:
    """Names of those that the engines' mirror has otherwise than the trainer's last weights, compared as bits."""
    held = map_tensors((plan.mirror_dir / CURRENT).resolve())
    published = map_tensors(plan.weights_dir / WHOLE / f"version-{plan.steps}")
    same = {
        name
        for name, tensor in published.items()
        if name in held and held[name].dtype == tensor.dtype and np.array_equal(held[name].data, tensor.data)
    }
    return sorted({*held, *published} - same)


def _look(vision: Vision, images: Mapping[str, bytes], rows: Sequence[Row]) -> Mapping[str, torch.Tensor]:
    """What the model is given besides the ids of `rows`, laid out as `_differences` does."""
    decoded = [decode_trajectory(row) for row in rows]
    media = MediaFiles.of(decoded, lambda _, digest: images[digest])
    seen: Mapping[str, torch.Tensor] = (
        Batch([Group("", tuple(decoded))], 0, media=media).padded(framework="torch", vision=vision).vision_inputs
    )
    return seen


@torch.no_grad()
def _differences(model: Any, rows: Sequence[Row], version: int, seen: Mapping[str, torch.Tensor]) -> torch.Tensor:
    width = max(len(row["token_ids"]) for row in rows)
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    stored = torch.zeros(len(rows), width)
    wanted = torch.zeros(len(rows), width, dtype=torch.bool)
    for line, row in enumerate(rows):
        token_ids[line, : len(row["token_ids"])] = torch.tensor(row["token_ids"])
        stored[line, : len(row["logprobs"])] = torch.tensor(row["logprobs"])
        for span_version, start, end in row["weight_versions"]:
            wanted[line, start:end] |= span_version == version
        wanted[line, : len(row["loss_mask"])] &= torch.tensor(row["loss_mask"], dtype=torch.bool)
    # Rows are padded at the end, where causal attention keeps the padding out of every token before it.
    token_ids, mask = token_ids.to(model.device), wanted[:, 1:].to(model.device)
    inputs = {name: tensor.to(model.device) for name, tensor in seen.items()}
    logprobs = model(token_ids, **inputs).logits[:, :-1][mask].float().log_softmax(-1)
    recomputed = logprobs.gather(-1, token_ids[:, 1:][mask][:, None])[:, 0]
    return (recomputed.cpu() - stored[:, 1:][wanted[:, 1:]]).abs()
