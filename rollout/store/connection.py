"""The connection to Redis as this store needs it, and the scripts it runs. Whoever makes the store hands the connection in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from rollout.store import keys

Argument = bytes | str | int | float
PRELUDE = "_rollout"


@dataclass(frozen=True, slots=True)
class Script:
    source: bytes
    sha: str

    @classmethod
    def read(cls, name: str) -> Script:
        """The script `scripts/<name>.lua`, after the prelude, which only defines functions."""
        folder = files("rollout.store") / "scripts"
        source = b"\n".join((folder / f"{part}.lua").read_bytes() for part in (PRELUDE, name))
        return cls(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


async def now(connection: Connection) -> float:
    """Redis's time in epoch seconds, on the server that holds the rollouts."""
    seconds, microseconds = await connection.execute("TIME", key=keys.ARRIVALS)
    return int(seconds) + int(microseconds) / 1e6


class Connection(Protocol):
    """Both methods raise `rollout.store.base.StoreUnavailable` for all that is Redis's doing. What is sent may be sent again."""

    timeout_seconds: float
    """Longest time that Redis may take to answer."""

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], *, durable: bool) -> Any:
        """The script's answer. `durable`: once as many replicas and disks hold what it wrote as the service is set to want."""

    async def execute(self, *command: Argument, key: str) -> Any:
        """The answer to a command about `key`."""
