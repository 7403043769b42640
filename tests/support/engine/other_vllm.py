"""A vLLM of the version that is asked for, in an environment of its own: `.cache/engines/VERSION`, which `make test-engines` makes.

`python -m tests.support.engine.other_vllm ARGUMENTS...` in that environment is its server, whose engine core is forked and not started
anew: it imports nothing twice.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.vllm_server import VllmServer, free_port, make_one_process_env, vllm_command
from proxy.engine.replica import Replica
from tests import ROOT

_MODULE = "tests.support.engine.other_vllm"
_FLAG_SINCE = (0, 30)
"""The first version with `--enable-scale-out`."""


@contextmanager
def other_vllm(version: str, model: Path, directory: Path) -> Iterator[VllmServer]:
    """That version serving `model` as "policy" on a free port, its log in `directory`."""
    port = free_port()
    python = ROOT / ".cache" / "engines" / version / "bin" / "python"
    extra = ["--max-logprobs", "5"]
    argv, env = vllm_command(model, port, reasoning_parser="qwen3", device="cpu", python=str(python), extra=extra)
    argv[argv.index("-m") + 1] = _MODULE
    if Replica(version, "", version=version).precedes(_FLAG_SINCE):
        argv.remove("--enable-scale-out")
    env |= {"HF_HUB_OFFLINE": "1", **make_one_process_env(threads=1)}
    log = directory / f"vllm-{version}.log"
    with VllmServer(argv, env, f"http://127.0.0.1:{port}", log, deadline_seconds=1200) as server:
        yield server


if __name__ == "__main__":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]
    sys.argv[0] = "vllm"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
