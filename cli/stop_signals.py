"""Stop signals of a command that must clean up first."""

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
    """Inside the `with` block, Ctrl-C, SIGTERM and SIGHUP do not end the process but are recorded in `number` and passed on to the
    watched harness."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._process: HarnessProcess | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Signals that the caller ignores, as nohup does, stay ignored.
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self, process: HarnessProcess) -> None:
        """Pass signals on to the process, including one that came before."""
        self._process = process
        if self.number is not None:
            process.stop(self.number)

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` or until a signal arrives. Returns whether one has."""
        deadline = time.monotonic() + seconds
        # `time.sleep` continues after a signal whose handler does not raise.
        while self.number is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left))
        return self.number is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if self._process is not None:
            self._process.stop(number)
