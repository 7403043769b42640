"""llama.cpp's own server with SmolLM2-135M, as a real process. `make test` installs both below `.cache`; the server comes in a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from examples.pretrained.smollm2 import GGUF
from tests import ROOT
from tests.support.machine import unavailable

PACKAGES = ROOT / ".cache" / "llama-cpp"

_SERVE = """
import sys

import xllamacpp

model, window = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, int(window), 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
"""It ends with whoever started it."""


@contextmanager
def running_llama_cpp(window: int) -> Iterator[str]:
    """Its URL. `window` is in tokens."""
    missing = [path.name for path in (PACKAGES / "xllamacpp", GGUF) if not path.exists()]
    if missing:
        unavailable(
            f"{', '.join(missing)} is not installed: `make .cache/llama-cpp/installed .cache/smollm2/installed` does it"
        )
    argv = [sys.executable, "-c", _SERVE, str(GGUF), str(window)]
    with subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": str(PACKAGES)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            # Written once the model is loaded.
            url = server.stdout.readline().strip()
            assert url.startswith("http://"), "llama.cpp's server did not start"
            yield url
        finally:
            server.kill()
