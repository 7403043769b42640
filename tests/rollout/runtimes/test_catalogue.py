"""The catalogue of runtimes: the built-in kinds, and one that an installed package brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.node import find_kinds
from cli.refusal import CommandError
from contract.tasks import RuntimeSpec
from rollout.runtimes import catalogue
from rollout.runtimes.base import BadRuntime, ProxyAddress
from rollout.runtimes.settings import RuntimeSettings
from tests.support.distributions import Distributions
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


@pytest.fixture
def installed(distributions: Distributions) -> None:
    """A package that brings runtimes."""
    points = ("folder = brought_runtimes:Folder", "broken = brought_runtimes:broken", "lost = not_there:X")
    distributions.install("brought", "verbatim.runtimes", *points, brought_runtimes=BROUGHT)


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
        ("lost", "the runtime 'lost' .not_there:X of brought 1.0. cannot be loaded: ModuleNotFoundError"),
        ("broken", "the runtime 'broken' cannot be used: ValueError: no such thing"),
    ],
)
def test_a_kind_that_cannot_be_used_says_why(installed: None, name: str, reason: str) -> None:
    with pytest.raises(BadRuntime, match=reason):
        catalogue.load(name)


async def test_a_node_starts_beside_a_broken_runtime(distributions: Distributions, caplog: pytest.LogCaptureFixture) -> None:
    """It ended with the error of a package that none of its rollouts would have used."""
    points = ("folder = brought_runtimes:Folder", "lost = not_there:X")
    distributions.install("brought", "verbatim.runtimes", *points, brought_runtimes=BROUGHT)
    found = await find_kinds([])
    assert "folder" in found and "lost" not in found
    assert "the runtime 'lost' (not_there:X of brought 1.0) cannot be loaded" in caplog.text
    with pytest.raises(CommandError, match="'lost'"):
        await find_kinds(["lost"])
