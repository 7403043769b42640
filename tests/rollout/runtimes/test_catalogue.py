"""The catalogue of runtimes: the built-in kinds, and one that an installed package brings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.runtimes import catalogue
from rollout.runtimes.base import BadRuntime, ProxyAddress
from rollout.runtimes.settings import RuntimeSettings
from rollout.task import RuntimeSpec
from tests.support.runtimes.runtime_places import shell

BROUGHT = """
from tests.support.runtimes.plain_runtime import PlainRuntime

class Folder:
    name = "folder"
    def __init__(self, settings): self.settings = settings
    def check(self, spec): pass
    async def probe(self): return None
    def describe_limits(self): return "there are none"
    def make(self, spec, name, proxy): return PlainRuntime(self.settings.local_dir / name)
    async def sweep(self, prefix): return 0

def broken(settings):
    raise ValueError("no such thing")
"""
POINTS = """
[verbatim.runtimes]
folder = brought_runtimes:Folder
broken = brought_runtimes:broken
lost = not_there:X
local = brought_runtimes:Folder
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that brings runtimes, as an installer would have left it."""
    (tmp_path / "brought_runtimes.py").write_text(BROUGHT)
    info = tmp_path / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    catalogue._find_entry_points.cache_clear()
    yield
    catalogue._find_entry_points.cache_clear()
    sys.modules.pop("brought_runtimes", None)


@pytest.mark.parametrize("name", catalogue.list_names())
def test_every_kind_has_the_name_it_is_listed_under(name: str) -> None:
    assert catalogue.load(name).name == name


async def test_an_installed_package_brings_a_runtime(installed: None, tmp_path: Path) -> None:
    assert catalogue.list_names() == ["apptainer", "broken", "docker", "folder", "kubernetes", "local", "lost"]
    kind = catalogue.load("folder", RuntimeSettings(local_dir=tmp_path))
    runtime = kind.make(RuntimeSpec(kind="folder"), "r-1", ProxyAddress("127.0.0.1", 9))
    await runtime.start()
    assert (await shell(runtime, "echo ran")).stdout == b"ran\n"
    await runtime.stop()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vm", "there is no runtime 'vm': choose one of apptainer, broken, docker"),
        ("lost", "the runtime not_there:X cannot be loaded: ModuleNotFoundError"),
        ("broken", "the runtime brought_runtimes:broken cannot be loaded: ValueError: no such thing"),
        ("local", "several runtimes 'local': rollout.runtimes.local.runtime:LocalKind, brought_runtimes:Folder"),
    ],
)
def test_a_kind_that_cannot_be_used_says_why(installed: None, name: str, reason: str) -> None:
    with pytest.raises(BadRuntime, match=reason):
        catalogue.load(name)
