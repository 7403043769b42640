"""What MkDocs calls while it builds the site: pages that are generated, files from outside of docs/, pictures, the navigation.

Documents are written to be read where they lie as well, so they link to files of the repository by relative paths, and show pictures
as images. Here such files are copied into the site, and pictures are put into their pages. Documents from outside are not copied:
their own links would lead nowhere, and a README would take the place of the index. A link to one is a warning, which ends the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands_page
import harness_pages
import http_page
import settings_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
GENERATED: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands_page.page,
    "reference/http.md": http_page.page,
    "reference/openapi.json": http_page.document,
    "reference/settings.md": settings_page.page,
}
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
PICTURE = re.compile(r'<p><img [^>]*\bsrc="([\w/.-]+\.svg)"[^>]*></p>')
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what is generated and what documents link to outside of docs/; take out of the navigation what is not there."""
    for path, made in GENERATED.items():
        files.append(File.generated(config, path, content=made()))
    for file in list(files.documentation_pages()):
        for target in outside(file.src_uri, file.content_string):
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    pages = [file.src_uri for file in files.documentation_pages()]
    named: set[str] = set()
    config.nav = _there(config.nav, set(pages), named)
    if unnamed := [path for path in pages if path not in named]:
        config.nav.append({"More": unnamed})
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The document with its definition, where it is a harness's, and with links that hold in the site."""
    path = page.file.src_uri
    if path.startswith("harnesses/"):
        markdown += harness_pages.facts(posixpath.basename(path).removesuffix(".md"))
    return within(path, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its pictures in it. Not done to the document: Markdown would take the words of a picture for a paragraph."""
    return PICTURE.sub(lambda found: _drawn(page.file.url, found[1]), html)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Leave the index of the search as a script as well, which is what the theme asks for in a page that was opened from the disk."""
    index = Path(config.site_dir, "search", "search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def outside(path: str, markdown: str) -> list[str]:
    """Files of the repository, but not of docs/, that the document links to, from the root of the repository on."""
    targets = [_target(path, link) for link in LINK.findall(FENCED.sub("", markdown))]
    return sorted({target for target in targets if target is not None})


def within(path: str, markdown: str) -> str:
    """The document with those links turned to their copies in the site."""

    def turned(found: re.Match[str]) -> str:
        target = _target(path, found[1])
        return found[1] if target is None else posixpath.relpath(target, posixpath.dirname(path) or ".")

    return LINK.sub(turned, markdown)


def _target(path: str, link: str) -> str | None:
    if ":" in link or link.startswith("#"):
        return None
    joined = posixpath.normpath(posixpath.join("docs", posixpath.dirname(path), link.partition("#")[0]))
    return None if joined.startswith(("docs/", "..")) or joined.endswith(".md") or not (ROOT / joined).is_file() else joined


def _drawn(url: str, picture: str) -> str:
    drawing = (ROOT / "docs" / posixpath.dirname(url) / picture).read_text()
    return f'<div class="drawn">{drawing[drawing.index("<svg") :].strip()}</div>'


def _there(nav: Any, pages: set[str], named: set[str]) -> list[Any]:
    """The entries of `nav` whose pages exist; their paths are added to `named`."""
    kept: list[Any] = []
    for entry in nav:
        ((title, value),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
        if isinstance(value, list):
            if inner := _there(value, pages, named):
                kept.append({title: inner})
        elif value in pages:
            named.add(value)
            kept.append(entry)
    return kept
