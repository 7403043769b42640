"""TrainerLog: the trainer's steps as it reports them, one JSON line each, read while the file grows."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from examples.demo.screen import Screen


class TrainerLog:
    def __init__(self, path: Path, screen: Screen) -> None:
        self._path = path
        self._screen = screen
        self._seen = 0
        self._news = asyncio.Condition()

    def read(self) -> list[dict[str, Any]]:
        """The whole lines there are."""
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    async def reached(self, step: int) -> None:
        """Returns when the trainer is done with `step`."""
        async with self._news:
            await self._news.wait_for(lambda: self._seen >= step)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While the block runs, new lines are shown on the screen; at its end all of them have been."""
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
        await self._show_new()

    async def _follow(self) -> None:
        while True:
            await self._show_new()
            await asyncio.sleep(0.1)

    async def _show_new(self) -> None:
        lines = self.read()
        for line in lines[self._seen :]:
            self._screen.trained(line)
        async with self._news:
            self._seen = len(lines)
            self._news.notify_all()
