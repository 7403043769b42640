"""The commands and programs that documents show, as a reader finds them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SHELLS = ("sh", "bash", "console")
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(verbatim [a-z][^`]*)`")
NEEDS = "# needs: "
ELSEWHERE = {
    "docker": "a container engine, and a registry for its bases; the files it is given are tested in deploy/test_deploy_files.py",
    "helm": "a cluster; the chart is rendered and held against the schemas in tests/helm",
    "kubectl": "a cluster",
    "systemctl": "a machine whose services it may change; the units are tested in deploy/test_deploy_files.py",
}
"""Programs that a block is not run for, and what they would need."""
KINDS = {
    "a package index": "an installation, which is tested in deploy/test_release.py",
    "a GPU": "an engine on a GPU",
    "an API key": "a vendor's server; the command is run against a strict one in cli/generation/test_generate_from_api.py",
    "a model on a GPU": "a trainer and its model; examples and adapters are run in tests/trainer_client/adapters",
    "the project's own environment": "a target of the Makefile, which installs first; that it exists is tested",
    "codex, and a service": "a command-line agent; real ones are run in tests/harnesses",
    "pi, which": "a command-line agent and a model; the command itself is run in cli/test_generate.py",
    "Harbor": "jobs of Harbor's, which are run in tests/joins",
    "verifiers": "a run of verifiers', which is run in tests/joins",
    "Inspect": "an evaluation of Inspect's, which is run in tests/joins",
    "SGLang": "an engine that is not installed here",
    "a service with closed sessions": "sessions to export; the command itself is run in proxy/archive/test_archive.py",
    "a task whose rollouts have ended": "rollouts to fork; the command itself is run in cli/test_tasks.py",
    "the task sets": "published task sets; cli/test_import_tasks.py imports some in their form",
}
"""How a block that is not run says what it needs, and what that is."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def needs(self) -> str:
        """What it says it needs beyond a service, or the program that says so."""
        if self.text.startswith(NEEDS):
            return self.text.partition("\n")[0].removeprefix(NEEDS)
        return next((words[0] for words in commands_of(self.text) if words[0] in ELSEWHERE), "")

    @property
    def reason(self) -> str:
        """Why it is not run; nothing where that is not known."""
        return ELSEWHERE.get(self.needs) or next((why for kind, why in KINDS.items() if self.needs.startswith(kind)), "")


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text()
    name = path.relative_to(ROOT).as_posix()
    return [Block(name, text[: found.start()].count("\n") + 1, found[1], found[2]) for found in FENCED.finditer(text)]


def commands_of(script: str) -> Iterator[list[str]]:
    """The words of each simple command of the script, roughly: those of substitutions too, without what only sets variables."""
    joined = script.replace("\\\n", " ").replace('"$(', " ; ").replace(')"', " ")
    for line in joined.splitlines():
        for part in re.split(r"\s(?:\||&&|;)\s|;\s", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                words = part.split()
            while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in ("export", "eval")):
                del words[0]
            if words:
                yield words


def shown_commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(where, words) of every `verbatim` command that the page shows, in a block or in a sentence."""
    for block in blocks_of(path):
        if block.language in SHELLS:
            for words in commands_of(block.text):
                if words[0] == "verbatim":
                    yield f"{block.page}:{block.line}", words
    text = FENCED.sub("", path.read_text())
    for found in INLINE.finditer(text):
        yield path.name, next(commands_of(found[1]))
