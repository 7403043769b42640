"""vLLM's server as a process of its own that need not import anything: forked off a process that has imported it, as `verbatim` is in
tests/support/service/forked.py. On a CPU a start costs little but imports: of torch, transformers and vLLM, twice per server.

vLLM's own process, the engine core, is forked too; on a CPU it would start Python anew for it. So it has as many OpenMP threads as the
first: one, for so small a model. What vLLM and torch leave in the temporary folder and in shared memory when they are killed has a name by
which it is removed. Everything else is as vLLM does it.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from examples.vllm_server import VllmServer, make_one_process_env
from tests.support.engine.without_torchvision import serve_without_torchvision
from tests.support.service.forked import Forked, await_order

IMPORTED_WITH = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    **make_one_process_env(threads=1),
}
"""What is read when a module is imported, or when a library is loaded."""
MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.idefics3",
    "vllm.model_executor.models.qwen2_5_vl",
    "proxy.engine.in_vllm.backend",
    "proxy.engine.in_vllm.sampler",
    # What the demo needs besides.
    *("cli.main", "proxy.app", "examples.demo.loop", "examples.demo.report", "examples.demo.warmup", "examples.demo.recompute"),
)

_TEMPORARY = Path(tempfile.gettempdir())
_SHARED = "/v{}_"


class ForkedVllm(Forked):
    module = "tests.support.engine.forked_vllm"


class ForkedVllmServer(VllmServer):
    """A server, its command line and environment those of `vllm_command`. Where there is a GPU, nothing is forked."""

    def start(self) -> None:
        if shutil.which("nvidia-smi"):
            super().start()
            return
        self._output = self.log.open("ab")
        env = {**self._env, **IMPORTED_WITH}
        streams: dict[str, Any] = {"stdout": self._output, "stderr": subprocess.STDOUT}
        self._process = ForkedVllm(self._argv, env=env, start_new_session=True, **streams)


def run_beside_vllm(
    option: str, program: str, *arguments: str, env: dict[str, str] | None = None, timeout_seconds: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """`python -c PROGRAM ARGUMENTS...`, or -m, finished, with vLLM imported."""
    return ForkedVllm.run(["python", option, program, *arguments], env=env, timeout_seconds=timeout_seconds)


def import_all() -> None:
    os.environ |= IMPORTED_WITH
    serve_without_torchvision()
    for name in MODULES:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()


def _fork_instead_of_spawn() -> None:
    import multiprocessing

    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]


def _name_files() -> None:
    """The files that this program and its own processes will make."""
    pid = os.getpid()
    shared_memory._SHM_NAME_PREFIX = _SHARED.format(pid)  # type: ignore[attr-defined]
    tempfile.tempdir = os.environ["TMPDIR"] = str(_folder(pid))
    _folder(pid).mkdir(mode=0o700, exist_ok=True)


def _remove_files(pid: int) -> None:
    shutil.rmtree(_folder(pid), ignore_errors=True)
    for file in Path("/dev/shm").glob(f"{_SHARED.format(pid)[1:]}*"):
        file.unlink(missing_ok=True)


def _folder(pid: int) -> Path:
    return _TEMPORARY / f"vllm-{pid}"


def _run(python: str, option: str, program: str, *arguments: str) -> None:
    _fork_instead_of_spawn()
    _name_files()
    sys.argv = [program, *arguments]
    if option == "-c":
        exec(program, {"__name__": "__main__"})
    elif program == "vllm.entrypoints.openai.api_server":
        from vllm.entrypoints.launchers.api_server.entry import main

        main()
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import_all()
    _run(*await_order(socket.socket(fileno=0), _remove_files)["argv"])
