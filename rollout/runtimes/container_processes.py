"""The processes of a container on the node's own machine, and which of its commands started each."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from rollout.runtimes import processes

MARK = "VERBATIM_EXEC"
"""A variable of every command: which one it is, to tell the processes of several apart."""
_KILL_TRIES, _KILL_SECONDS = 100, 0.01


class ContainerProcesses:
    """Those in the process namespace of `first`, the container's first process, except those of its session: `first` itself and what it
    waits in. runc, crun and a node's own clients start every command in a session of its own, and no process can join another's."""

    def __init__(self, first: int, namespace: str) -> None:
        self.first = first
        self._namespace = namespace
        self._session = processes.session(first)
        self.commands: dict[str, Set[str]] = {}
        """Those that run, with the names of the pipes to which each writes its output."""

    def send(self, command: str, number: int) -> None:
        processes.send(self._started_by(command), number)

    def kill(self, command: str, tries: int = _KILL_TRIES) -> None:
        """Now, and again until nothing is left: what forks while it is looked for is found the next time."""
        if command in self.commands and tries and (left := self._started_by(command)):
            processes.send(left)
            asyncio.get_running_loop().call_later(_KILL_SECONDS, self.kill, command, tries - 1)

    async def nothing_left(self, command: str) -> None:
        """Returns when it has killed all that is left of it."""
        for _ in range(_KILL_TRIES):
            if not (left := self._started_by(command)):
                return
            processes.send(left)
            await asyncio.sleep(_KILL_SECONDS)

    def _started_by(self, command: str) -> list[int]:
        """Processes of the container that a command started; with it those that nobody can be told to have started, when no other
        command runs. One that hides who started it, but holds a command's output, is that one's: it would be waited for."""
        within = [pid for pid in processes.running() if processes.namespace(pid, "pid") == self._namespace]
        within = [pid for pid in within if pid != self.first and processes.session(pid) not in (None, self._session)]
        within = [pid for pid in within if processes.parent(pid) is not None]
        if self.commands.keys() <= {command}:
            return [*within, *processes.descendants(within)]
        marked = processes.started_with(MARK.encode(), command.encode(), within)
        holding = processes.holding(self.commands.get(command, frozenset()), within)
        return [*marked, *holding, *processes.descendants([*marked, *holding])]
