"""What stops a command that has something to put in order first."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rollout.harnesses.process import HarnessProcess

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.1


class StopSignals:
    """Passes Ctrl-C, SIGTERM and SIGHUP on to the harness instead of dying of them: the session is still to be closed."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._process: HarnessProcess | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # What the caller ignores, as nohup does, stays ignored.
        minded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in minded}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, process: HarnessProcess) -> None:
        """From now on the process is told, also of what came before it was there."""
        self._process = process
        if self.number is not None:
            process.stop(self.number)

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until a signal comes; whether one has."""
        deadline = time.monotonic() + seconds
        # A sleep goes on after a signal whose handler raises nothing.
        while self.number is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left))
        return self.number is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if self._process is not None:
            self._process.stop(number)
