"""Harbor's mini-swe-agent without its installer, which downloads, and with what may befall an agent. Harbor imports it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
from harbor.agents.installed.mini_swe_agent import MiniSweAgent


class Installed(MiniSweAgent):
    async def install(self, environment: Any) -> None:
        """The command is here already."""


def is_first() -> bool:
    try:
        Path(os.environ["BROKE_DOWN"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class BreaksDownOnce(Installed):
    """After its work, at the first of all its runs."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await super().run(instruction, environment, context)
        if is_first():
            raise RuntimeError("the agent broke down")


class RunsOutOfTime(Installed):
    """After its work: what Harbor makes of its own timer's error."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await super().run(instruction, environment, context)
        raise TimeoutError


class LosesItsSession(Installed):
    """After its work: its session is deleted."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await super().run(instruction, environment, context)
        session = (self._base_url or "").rsplit("/", 2)[1]
        headers = {"Authorization": f"Bearer {os.environ['VERBATIM_ADMIN_TOKEN']}"}
        async with httpx.AsyncClient(headers=headers) as client:
            answer = await client.delete(f"{os.environ['VERBATIM_URL']}/sessions/{session}")
        assert answer.status_code == 204, answer.text


class CallsNothing(Installed):
    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec("echo hello > /app/out.txt")
