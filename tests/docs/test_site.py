"""The documentation as a site: it builds without a warning, no link leads nowhere, nothing is loaded from elsewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from rollout.harnesses.catalogue import load, names
from tests import ROOT
from tests.support.service.browser import running_browser
from tests.support.service.verbatim_process import environment

pytestmark = pytest.mark.timeout(1500)  # whichever comes first builds the site
LOADING = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


class Page(HTMLParser):
    """Targets of links, names that links may end in, and what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loaded += [value for name, value in given.items() if (tag, name) in LOADING and given.get("rel") != "canonical"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(NO_MKDOCS_2_WARNING="1", PATH=os.environ["PATH"]),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_link_within_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are from the root of a server
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = target / "index.html" if target.is_dir() else target
            named = not parts.fragment or found not in pages or unquote(parts.fragment) in pages[found].names
            if not found.is_file() or not named:
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []


def test_a_page_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert [link for page in pages.values() for link in page.loaded if urlsplit(link).netloc or link.startswith("//")] == []
    sheets = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"']*", sheets) == []


def test_every_document_is_a_page_with_a_title_of_its_own(site: Path) -> None:
    documents = sorted(path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md"))
    titles: dict[str, Path] = {}
    for path in documents:
        title = re.search(r"<h1[^>]*>(.*?)<", (site / path).read_text())
        assert title is not None, f"{path} has no title"
        assert titles.setdefault(title[1], path) == path, f"{path} is titled as {titles[title[1]]} is: {title[1]}"


def test_the_page_of_definitions_shows_each_harness_whole(site: Path) -> None:
    text = (site / "reference" / "harnesses.html").read_text()
    words = re.sub(r"<[^>]+>", "", text)
    for name in names():
        harness = load(name)
        assert f'<h2 id="{name}">' in text and harness.version in words, name
        assert [variable for variable in harness.env if variable not in words] == []


def test_what_is_generated_is_whole(site: Path) -> None:
    """Each of these pages has what its source has, of which one example is looked at."""
    found = {
        name: re.sub(r"<[^>]+>", "", (site / "reference" / f"{name}.html").read_text())
        for name in ("http", "commands", "settings", "measurements")
    }
    assert "Targets: calls per second at 16 connections" in found["measurements"]
    assert "POST /batches/lease" in found["http"] and "/s/{session_id}/v1/messages" in found["http"]
    assert "verbatim dead-letters retry" in found["commands"] and "--max-samples" in found["commands"]
    assert "VERBATIM_KEEPALIVE_SECONDS" in found["settings"]
    assert "/sessions" in (site / "reference" / "openapi.json").read_text()


def test_pictures_take_the_colours_of_the_scheme(site: Path) -> None:
    """They stand in their pages, not beside them as images, and have texts for those who do not see them."""
    page = (site / "concepts.html").read_text()
    assert page.count('<svg class="picture"') == 4 and page.count("<desc") >= 4
    assert ".svg" not in "".join(Page(page).loaded)


def test_the_search_finds_in_pages_that_were_opened_from_the_disk(site: Path) -> None:
    with running_browser() as browser:
        browser.resize(1280, 900)
        browser.open((site / "index.html").as_uri())
        browser.one(".md-search__input").click()
        browser.press("quarantined")
        browser.wait(lambda: browser.all(".md-search-result__item a"), "what is found")
        assert browser.complaints() == []


def test_every_adapter_has_a_page_of_its_trainer_that_the_overview_leads_to() -> None:
    shared = {"__init__", "microbatches", "split_rows", "steps"}
    adapters = {path.stem for path in (ROOT / "trainer_client/adapters").glob("*.py")} - shared
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/trainers").glob("*.md")}
    overview = (ROOT / "docs/trainers.md").read_text()
    assert set(re.findall(r"\(trainers/([\w-]+)\.md\)", overview)) == pages.keys()
    for adapter in adapters:
        linked = re.findall(rf"\(trainers/([\w-]+)\.md\) \| `{adapter}\.(\w+)", overview)
        assert linked, f"docs/trainers.md has no row of {adapter}"
        for page, name in linked:
            assert f"trainer_client.adapters.{adapter}" in pages[page] and re.search(rf"\b{name}\b", pages[page]), page


TRAINER_PAGES = sorted((ROOT / "docs/trainers").glob("*.md"))


@pytest.mark.parametrize("page", TRAINER_PAGES, ids=lambda page: page.stem)
def test_a_trainers_page_says_what_was_run_and_leads_from_install_to_what_to_watch(page: Path) -> None:
    words = page.read_text()
    assert re.findall(r"^## (.+)$", words, re.MULTILINE) == ["Install", "Launch", "The loop", "The push", "What to watch"]
    beginning = words.partition("\n## ")[0]
    assert "Run here" in beginning and "Not run" in beginning


TRAINER_CODE = [*TRAINER_PAGES, *sorted((ROOT / "examples/trainers").glob("*.py"))]


@pytest.mark.parametrize("page", TRAINER_CODE, ids=lambda page: page.name)
def test_the_code_of_a_trainers_page_parses_and_imports_what_exists(page: Path) -> None:
    text = page.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if page.suffix == ".md" else [text]
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer_client"):
                path = ROOT / str(node.module).replace(".", "/")
                source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
                names = {each.name for each in node.names}
                assert {name for name in names if not re.search(rf"\b{name}\b", source)} == set(), node.module
