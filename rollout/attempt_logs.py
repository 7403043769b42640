"""The logs of one attempt, on the node that made it."""

from __future__ import annotations

from pathlib import Path

from rollout.attempts import AttemptId
from rollout.runtimes.base import Logs


class AttemptLogs:
    """A folder with `<what>.out` and `<what>.err` for each thing that ran: prepare, install, agent, evaluate, ..."""

    def __init__(self, node: str, root: Path, attempt: AttemptId, prefix: str = "") -> None:
        self._node = node
        self._root = root
        self._attempt = attempt
        self._prefix = prefix
        self.folder = root / attempt.task_id / f"{attempt.index}.{attempt.attempt}"

    def make(self) -> None:
        """Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def of(self, what: str) -> Logs:
        return Logs(self.folder / f"{self._prefix}{what}.out", self.folder / f"{self._prefix}{what}.err")

    def named(self, prefix: str) -> AttemptLogs:
        """The same folder, with `<prefix>-` before the name of every log."""
        return AttemptLogs(self._node, self._root, self._attempt, f"{prefix}-")

    def place(self, what: str = "") -> str:
        """Where a person finds them: `<node>:<path>`."""
        return f"{self._node}:{self.folder / (self._prefix + what) if what else self.folder}"
