"""A fault to be planted into the product: what it would do to a user, the text it replaces, and the tests that must notice."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("contract", "proxy", "reconstruct", "rollout", "trainer_client", "cli")
SUFFIXES = (".py", ".lua")


class NotPlaced(Exception):
    """The text to be replaced does not occur exactly once in the product."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`old` occurs exactly once in the product. `tests` are arguments of pytest as on a command line: paths, perhaps with `-k`."""

    harm: str
    old: str
    new: str
    tests: str

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.tests)

    @property
    def paths(self) -> list[str]:
        """The test files."""
        return [word.partition("::")[0] for word in self.arguments if word.startswith("tests/")]

    def place(self, sources: dict[Path, str]) -> Path:
        """The file that has the text. Raises NotPlaced."""
        found = [path for path, text in sources.items() for _ in range(text.count(self.old))]
        if len(found) == 1:
            return found[0]
        where = ", ".join(sorted({str(path) for path in found})) or "no file"
        raise NotPlaced(f"its text occurs {len(found)} times in the product, not once ({where}): {self.old.strip()[:200]!r}")


def sources(root: Path) -> dict[Path, str]:
    """The text of every file of the product below `root`, by its path from there."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*") if path.suffix in SUFFIXES)
    return {path.relative_to(root): path.read_text() for path in sorted(files)}
