"""How many kill -9 pushes of deltas survive: a real vLLM with a mirror, the service and a trainer, each killed in the middle of pushes.

    python -m benchmarks.delta_kills [--pushes 100] [--seed 1] [--json FILE]

A trainer publishes the bfloat16 weights of a tiny model, two elements in a hundred changed each time. In a third of the pushes one of the
three gets SIGKILL, at a random moment after the trainer began to publish, and is started again. The weights of a version depend on its
number alone, so a trainer that begins again goes on from what the service says. It ends with deltas, one after the other: the mirror must
hold the bits of the last one, and the engine's logprobs must agree with transformers on a checkpoint of it that was saved whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.processes import ADMIN, end, free_port, machine, redis_server, request, started
from contract.deltas import is_delta
from contract.errors import ClientError
from examples.demo.tiny_model import make_tiny_model
from examples.vllm_server import VllmServer, make_one_process_env, vllm_command
from trainer_client import TrainerClient
from trainer_client.publish import write_weights

VICTIMS = ("service", "trainer", "service", "trainer", "engine", "trainer", "service", "trainer")
"""In turn: an engine takes longest to start."""
KILL_EVERY = 3
LATEST_SECONDS = 1.0
"""After the trainer began to publish."""
DELTAS_AT_THE_END = 3
PROMPT = list(range(20, 60))


def weights_of(model: Path, version: int) -> dict[str, Any]:
    """Of a version, in bfloat16: the model's, of which one element in a hundred is another; each version has its own."""
    chance, weights = torch.Generator().manual_seed(version), load_file(model / "model.safetensors")
    for name, tensor in weights.items():
        chosen = torch.rand(tensor.shape, generator=chance) < 0.01
        weights[name] = torch.where(chosen, tensor * 1.5, tensor).bfloat16()
    return weights


def train(url: str, model: Path, directory: Path, pushes: int, told: Connection) -> None:
    """Publishes until that version serves and the last ones were deltas, and tells what it does."""
    deltas = 0
    with TrainerClient(url, ADMIN + "-trainer") as client:
        while True:
            try:
                version = int(client.weights()["current"]["version"]) + 1
                if version > pushes and deltas >= DELTAS_AT_THE_END:
                    return
                weights = weights_of(model, version)
                told.send({"pushing": version})
                push = client.publish(
                    weights, version, directory=directory, delta=True, anchor_every=10, keep_last=2, config=model
                )
                deltas = deltas + 1 if is_delta(Path(push.path)) else 0
                told.send({"applied": version, "kind": "delta" if deltas else "full"})
            except ClientError as error:
                told.send({"failed": str(error)})
                time.sleep(0.5)


class Parts:
    """The three that are killed, each with the same addresses and files when it is started again."""

    def __init__(self, folder: Path, stack: ExitStack, pushes: int) -> None:
        self.folder, self._stack, self._pushes = folder, stack, pushes
        self.model, self.mirror = make_tiny_model(folder / "model"), folder / "mirror"
        port, redis_port = free_port(), stack.enter_context(redis_server())
        argv, env = vllm_command(self.model, port, tool_parser=None)
        env |= {**make_one_process_env(1), "VERBATIM_MIRROR": str(self.mirror)}
        self.engine = VllmServer(argv, env, f"http://127.0.0.1:{port}", folder / "vllm.log", deadline_seconds=900)
        stack.enter_context(self.engine)
        listen = free_port()
        self.url = f"http://127.0.0.1:{listen}"
        store = ("--redis", f"redis://127.0.0.1:{redis_port}/0")
        self._serve = [sys.executable, "-m", "cli.main", "serve", "--port", str(listen), "--engine", self.engine.url, *store]
        self._start_service()
        self.start_trainer()

    def kill(self, victim: str) -> None:
        """And starts it again."""
        if victim == "engine":
            self.engine.kill()
            self.engine.start()
        elif victim == "service":
            self.service.kill()
            self.service.wait()
            self._start_service()
        else:
            self.trainer.kill()
            self.trainer.join()
            self.start_trainer()

    def _start_service(self) -> None:
        self.service = self._stack.enter_context(started(self._serve, log=self.folder / "service.log"))

    def start_trainer(self) -> None:
        """Forked, so that it need not import torch each time."""
        self.told, told = Pipe(duplex=False)
        where = (self.url, self.model, self.folder / "weights", self._pushes, told)
        self.trainer = get_context("fork").Process(target=train, args=where, daemon=True)
        self.trainer.start()
        told.close()


def survive(pushes: int, seed: int) -> dict[str, Any]:
    chance, began = random.Random(seed), time.monotonic()
    found: dict[str, Counter[str]] = {"kills": Counter(), "applied": Counter(), "failed": Counter()}
    with tempfile.TemporaryDirectory(prefix="verbatim-kills-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        parts, done = Parts(Path(name), stack, pushes), set[int]()
        while True:
            try:
                told = parts.told.recv()
            except EOFError:
                break
            print(round(time.monotonic() - began), told, flush=True)
            if "applied" in told:
                found["applied"][told["kind"]] += 1
            elif "failed" in told:
                found["failed"][told["failed"].partition(":")[0][:60]] += 1
            elif told["pushing"] <= pushes and told["pushing"] % KILL_EVERY == 0 and told["pushing"] not in done:
                done.add(told["pushing"])
                victim = VICTIMS[len(done) % len(VICTIMS)]
                time.sleep(chance.uniform(0, LATEST_SECONDS))
                parts.kill(victim)
                found["kills"][victim] += 1
                print(f"killed the {victim}", flush=True)
        parts.trainer.join()
        assert parts.trainer.exitcode == 0, "the trainer failed"
        judged = judge(parts)
        end(parts.service)
    return {"pushes": pushes, "seed": seed, "seconds": round(time.monotonic() - began), **found, **judged}


def judge(parts: Parts) -> dict[str, Any]:
    """What the engine serves in the end, against a checkpoint of that version that was saved whole."""
    import numpy as np

    from contract.tensor_files import map_tensors
    from proxy.engine.in_vllm.mirror import CURRENT
    from tests.support.engine.weight_fixtures import Judge, generate

    current = request(parts.url, "GET", "/weights")["current"]
    version = current["version"]
    assert current["kind"] == "delta", current
    truth = write_weights(weights_of(parts.model, version), parts.folder / "truth", version, config=parts.model)
    held, whole = map_tensors((parts.mirror / CURRENT).resolve()), map_tensors(truth)
    said = asyncio.run(generate(parts.engine.url, PROMPT, 32))
    assert said.spans == [(str(version), 0, 32)], said.spans
    return {
        "judged_version": version,
        "judged_kind": current["kind"],
        "tensors": len(whole),
        "differing_tensors": [name for name in whole if not np.array_equal(whole[name].data, held[name].data)],
        "largest_logprob_error": Judge().largest_error(truth, said),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    # A trainer that is forked has no threads to compute with.
    torch.set_num_threads(1)
    found = survive(options.pushes, options.seed)
    print(json.dumps(found, indent=1))
    assert not found["differing_tensors"] and found["largest_logprob_error"] < 1e-4, "the engine serves other weights"
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
