"""Messages that the documentation quotes are messages that the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from proxy.settings import Settings, list_variables
from tests import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PACKAGES = ("contract", "proxy", "cli", "rollout", "trainer_client", "reconstruct")


@cache
def said() -> str:
    """Every text of the code, with … for what is filled in; one per line."""
    texts = [text for package in PACKAGES for path in (ROOT / package).rglob("*.py") for text in _texts(path)]
    scripts = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.lua")]
    # Lua joins its texts by `..`
    return "\n".join([*texts, *(re.sub(r"'\s*\.\.[^'\n]*\.\.\s*'", "…", script) for script in scripts)])


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values).replace("\n", " ")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:\.\d)?[sdgf]", "…", node.value).replace("\n", " ")


def quoted() -> list[str]:
    """What stands between backquotes in the first column of the tables and has a blank in it: a sentence, not a name."""
    cells = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| ")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return [span for span in spans if " " in span and not span.startswith(("verbatim ", "GET ", "POST "))]


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    assert re.search(pattern, said()), message


def test_many_messages_are_quoted() -> None:
    assert len(quoted()) > 35


@cache
def sources(*kinds: str) -> str:
    """The text of every file of these kinds in the packages."""
    return "\n".join(path.read_text() for name in PACKAGES for path in (ROOT / name).rglob("*") if path.suffix in kinds)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_every_variable_that_a_page_names_is_read_somewhere(path: Path) -> None:
    code, settings = sources(".py"), {each for names in list_variables(Settings).values() for each in names}
    for name in set(re.findall(r"\bVERBATIM_[A-Z][A-Z_]+\b", path.read_text())):
        field = name.removeprefix("VERBATIM_").lower()
        assert name in settings or name in code or f'"{field}"' in code or f" {field}:" in code, name


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_every_metric_file_and_import_that_a_page_names_is_there(path: Path) -> None:
    text, code = path.read_text(), sources(".py", ".lua", ".html", ".js")
    for name in set(re.findall(r"(?<!\$)\bverbatim_[a-z_]+[a-z]\b", text)):
        assert re.sub(r"_(total|bucket|count|sum)$", "", name) in code, name
    for name in set(re.findall(r"\b(?:benchmarks|examples|deploy|helm|proxy|rollout|trainer_client)/[\w./-]+\.\w+", text)):
        # A test is named by where it is in tests/.
        assert (ROOT / "tests" / name if "/test_" in name else ROOT / name).exists(), name
    for module, names in re.findall(r"^from (trainer_client[\w.]*) import (.+)$", text, re.MULTILINE):
        found = ROOT / module.replace(".", "/")
        source = (found / "__init__.py" if found.is_dir() else found.with_suffix(".py")).read_text()
        for name in names.split(", "):
            assert re.search(rf"\b{name}\b", source), f"{module} has no {name}"
