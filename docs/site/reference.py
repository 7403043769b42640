"""Writes docs/reference: the pages that are made from the code and committed, so that they can be read without a site. `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import archive_page
import commands_page
import http_page
import metrics_page
import settings_page
import templates_page

FOLDER = Path(__file__).resolve().parents[1] / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "archive.md": archive_page.render,
    "commands.md": commands_page.render,
    "http.md": http_page.render,
    "metrics.md": metrics_page.render,
    "settings.md": settings_page.render,
    "templates.md": templates_page.render,
}


def main(*, write: bool) -> list[str]:
    """The pages that were not as the code says. With `write` they are afterwards."""
    rendered = {FOLDER / name: render() for name, render in PAGES.items()}
    stale = [path for path, text in rendered.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if write:
        FOLDER.mkdir(exist_ok=True)
        for path in stale:
            path.write_text(rendered[path], encoding="utf-8")
    return [path.name for path in stale]


if __name__ == "__main__":
    found = main(write="--check" not in sys.argv)
    sys.stdout.writelines(f"{name}\n" for name in found)
    sys.exit(bool(found) and "--check" in sys.argv)
