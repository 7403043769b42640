"""A harness made ready for one run: every placeholder filled in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.harnesses.errors import OutsideHome


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the session is. `base_urls` has `openai`, `anthropic` and `gemini`, as `POST /sessions` answers them."""

    base_urls: Mapping[str, str]
    api_key: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """`env` is set over the surroundings, `unset` are variables that would lead the harness elsewhere, `files` map paths
    relative to the home to their text. Environment and files hold the session's key."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str]
    unset: tuple[str, ...]
    stdin: bytes = b""

    def write(self, home: Path) -> list[Path]:
        """The files written below `home`, readable by their owner alone, beside a directory for temporary files. Raises
        `OutsideHome` when a link in `home` leads out of it."""
        temporary_directory(home).mkdir(parents=True, exist_ok=True)
        written = []
        for path, text in self.files.items():
            target = home / path
            if not target.resolve().is_relative_to(home.resolve()):
                raise OutsideHome(f"{path} would be written to {target.resolve()}, outside {home}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            written.append(target)
        return written


def temporary_directory(home: Path) -> Path:
    """The harness's TMPDIR. Codex withholds its helper programs where its home is below it, so it is below the home."""
    return home / "tmp"
