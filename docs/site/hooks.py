"""MkDocs hooks: add generated pages and files from outside of docs/, inline pictures, complete the navigation.

Documents also work in the repository, so they link to its files by relative paths and show pictures as images. The hooks copy such files
into the site and inline the pictures. They do not copy Markdown from outside of docs/: its own links would break, and a README would
replace the index. A link to such a document is a warning, which fails the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness_pages
import http_page
import measurements_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
GENERATED: dict[str, Callable[[], str]] = {
    "reference/harnesses.md": harness_pages.render,
    "reference/measurements.md": measurements_page.render,
    "reference/openapi.json": http_page.render_json,
}
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
PICTURE = re.compile(r'<p><img [^>]*\bsrc="([\w/.-]+\.svg)"[^>]*></p>')
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add generated pages and the files that documents link to outside of docs/; drop missing pages from the navigation."""
    for path, render in GENERATED.items():
        files.append(File.generated(config, path, content=render()))
    for file in list(files.documentation_pages()):
        for target in find_outside_files(file.src_uri, file.content_string):
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    pages = [file.src_uri for file in files.documentation_pages()]
    named: set[str] = set()
    config.nav = _keep_existing(config.nav, set(pages), named)
    if unnamed := [path for path in pages if path not in named]:
        config.nav.append({"More": unnamed})
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The document with links that work in the site."""
    return rewrite_links(page.file.src_uri, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its pictures inlined. Not done in Markdown, which would turn the text of a picture into paragraphs."""
    return PICTURE.sub(lambda found: _inline_picture(page.file.url, found[1]), html)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write the search index as a script, too: the theme loads that one in pages opened from the disk."""
    index = Path(config.site_dir, "search", "search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def find_outside_files(path: str, markdown: str) -> list[str]:
    """Files of the repository outside of docs/ that the document links to, relative to the root of the repository."""
    targets = [_find_outside_file(path, link) for link in LINK.findall(FENCED.sub("", markdown))]
    return sorted({target for target in targets if target is not None})


def rewrite_links(path: str, markdown: str) -> str:
    """The document with those links pointing to their copies in the site."""

    def rewrite(found: re.Match[str]) -> str:
        target = _find_outside_file(path, found[1])
        return found[1] if target is None else posixpath.relpath(target, posixpath.dirname(path) or ".")

    return LINK.sub(rewrite, markdown)


def _find_outside_file(path: str, link: str) -> str | None:
    if ":" in link or link.startswith("#"):
        return None
    joined = posixpath.normpath(posixpath.join("docs", posixpath.dirname(path), link.partition("#")[0]))
    return None if joined.startswith(("docs/", "..")) or joined.endswith(".md") or not (ROOT / joined).is_file() else joined


def _inline_picture(url: str, picture: str) -> str:
    drawing = (ROOT / "docs" / posixpath.dirname(url) / picture).read_text()
    return f'<div class="drawn">{drawing[drawing.index("<svg") :].strip()}</div>'


def _keep_existing(nav: Any, pages: set[str], named: set[str]) -> list[Any]:
    """The entries of `nav` whose pages exist; their paths are added to `named`."""
    kept: list[Any] = []
    for entry in nav:
        ((title, value),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
        if isinstance(value, list):
            if inner := _keep_existing(value, pages, named):
                kept.append({title: inner})
        elif value in pages:
            named.add(value)
            kept.append(entry)
    return kept
