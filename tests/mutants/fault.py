"""A fault to be planted into the product: what it would do to a user, the lines it changes, and the tests that must notice.

`faults/*.diff` have one a paragraph: the harm, the tests, and the lines as in a diff. Paragraphs that begin with `#` are headings.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("contract", "proxy", "reconstruct", "rollout", "trainer_client", "cli")
SUFFIXES = (".py", ".lua")
FOLDER = Path(__file__).with_name("faults")


class NotPlaced(Exception):
    """The lines to be changed do not occur exactly once in the product."""


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
        raise NotPlaced(f"its lines occur {len(found)} times in the product, not once ({where}): {self.old.strip()[:200]!r}")


def read_faults() -> list[Fault]:
    """All of them."""
    paragraphs = (part for path in sorted(FOLDER.iterdir()) for part in path.read_text().strip().split("\n\n"))
    return [_read_fault(part) for part in paragraphs if not part.startswith("#")]


def _read_fault(paragraph: str) -> Fault:
    harm, tests, *lines = paragraph.split("\n")
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
    return Fault(harm, old, new, tests)


def sources(root: Path) -> dict[Path, str]:
    """The text of every file of the product below `root`, by its path from there."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*") if path.suffix in SUFFIXES)
    return {path.relative_to(root): path.read_text() for path in sorted(files)}
