"""The tasks of a service as a generation uses them: over one connection, which outlives a restart of the service."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgpack

from cli.archive_api import PACKED, ArchiveApi
from cli.control import complaint
from cli.generation.inputs import Input
from cli.refusal import Refusal


class GenerationApi(ArchiveApi):
    """Every request raises `Refusal` when it failed for good."""

    def submit(self, given: Input, body: dict[str, Any]) -> dict[str, Any]:
        """The task, new or as it was submitted before."""
        response = self._send("POST", "/tasks", json=body, passes=(400, 409))
        if response.is_error:
            raise Refusal(f"line {given.number}: {complaint(response)}")
        told: dict[str, Any] = response.json()
        return told

    def task(self, task_id: str) -> dict[str, Any]:
        told: dict[str, Any] = self._send("GET", f"/tasks/{quote(task_id, safe='')}").json()
        return told

    def rollouts(self, task_id: str) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self._send("GET", f"/tasks/{quote(task_id, safe='')}/rollouts").json()["rollouts"]
        return told

    def sampled_tokens(self, session_id: str) -> int | None:
        """None for a session that is gone, or whose records contradict each other."""
        path = f"/sessions/{quote(session_id, safe='')}/trajectories"
        response = self._send("GET", path, headers={"Accept": PACKED}, passes=(404, 500))
        return None if response.is_error else int(msgpack.unpackb(response.content)["accounting"]["sampled_tokens"])
