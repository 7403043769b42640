"""Journal: what a run has done, a JSON line per event, written so that a killed run can go on from it.

{"event": "held-out", "step": 0, ...}   exercises that no training draws, tried with the weights of that step
{"event": "step", "step": 1, ...}       this line makes the step done: its checkpoint was written before
{"event": "push", "step": 1, ...}       the engines serve its weights
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, event: str | None = None) -> list[Line]:
        """The whole lines there are, or those of one kind."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if event is None or line["event"] == event]

    @property
    def done(self) -> int:
        """The last step that is done; 0: none."""
        return max((line["step"] for line in self.read("step")), default=0)

    def mend(self) -> None:
        """Cut off what a killed writer left of its last line."""
        if self.path.exists() and not (text := self.path.read_bytes()).endswith(b"\n"):
            os.truncate(self.path, text.rfind(b"\n") + 1)

    def add(self, event: str, step: int, **more: Any) -> None:
        """On disk when it returns."""
        with self.path.open("a") as lines:
            lines.write(json.dumps({"event": event, "step": step, **more}) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
