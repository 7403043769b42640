"""`verbatim node` as a process that is killed and started again."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from tests.support.service.forked import ForkedVerbatim
from tests.support.service.verbatim_process import ADMIN, environment

STOP_SECONDS = 60.0


class NodeVictim:
    """`start` again after `kill` has the name, the folder and the flags of before; `started_at` is in epoch seconds. `variables` are
    further ones of its environment."""

    def __init__(self, name: str, folder: Path, url: str, *flags: str, **variables: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.started_at = 0.0
        place = ["--name", name, "--data-dir", str(folder / name), "--url", url, "--runtime", "local"]
        # What its slots let in is bounded by them alone.
        room = ["--cpus", "64", "--memory-mb", str(1 << 20)]
        self._command = ["node", *place, *room, *flags]
        own = {"VERBATIM_ADMIN_TOKEN": ADMIN, "VERBATIM_LOCAL_DIR": str(folder / f"{name}-runtimes")}
        self._env = environment(**own, **variables)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.started_at = time.time()
        with self.log.open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = ForkedVerbatim(self._command, env=self._env, start_new_session=True, **streams)

    def kill(self) -> None:
        """kill -9. Raises AssertionError when it had ended by itself."""
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended by itself: {self.written[-2000:]}"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Told twice to end, it lets nothing run on."""
        if self._process is None:
            return
        for _ in range(2):
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def written(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""
