"""Projects: names under which sessions are opened, each with a key for calls and a token for the control side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.store.connection import Script, StoreConnection
from proxy.store.keys import PROJECTS, pack_versioned, unpack_versioned


@dataclass(frozen=True, slots=True)
class Project:
    """`key_hash` and `token_hash` are sha256 of its secrets, which are not stored. `defaults`: fields of the sessions that its rollouts
    open, unless they were declared."""

    name: str
    key_hash: bytes
    token_hash: bytes
    created_at: float
    defaults: Mapping[str, Any] = field(default_factory=dict)


class ProjectStore:
    """Every process sees them. Every method may raise `StoreUnavailable`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def add(self, project: Project) -> bool:
        """False when there is one of that name."""
        return bool(await self._redis.execute("HSETNX", PROJECTS, project.name, pack_versioned(project)))

    async def load(self, name: str) -> Project | None:
        blob = await self._redis.execute("HGET", PROJECTS, name)
        return None if blob is None else unpack_versioned(blob, Project)

    async def replace(self, old: Project, new: Project) -> bool:
        """False when it was changed or removed since it was loaded."""
        args = (old.name, pack_versioned(old), pack_versioned(new))
        return bool(await self._redis.run(Script.read("swap_project"), (PROJECTS,), args))

    async def list(self) -> list[Project]:
        """By name."""
        blobs = await self._redis.execute("HVALS", PROJECTS)
        return sorted((unpack_versioned(blob, Project) for blob in blobs), key=lambda project: project.name)

    async def remove(self, name: str) -> bool:
        """False when there is none of that name."""
        return bool(await self._redis.execute("HDEL", PROJECTS, name))
