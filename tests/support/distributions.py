"""Installed distributions with entry points, as an installer leaves them: what `contract.plugins` finds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import proxy.builders
import proxy.dialects.catalogue
import proxy.engine.kinds
import rollout.evaluators.catalogue
import rollout.runtimes.catalogue

CACHES = (
    proxy.builders.plugins,
    proxy.dialects.catalogue.plugins,
    proxy.dialects.catalogue.dialects,
    proxy.engine.kinds.plugins,
    rollout.evaluators.catalogue.plugins,
    rollout.runtimes.catalogue.plugins,
)


class Distributions:
    """Distributions that this process finds, in folders of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self.modules: set[str] = set()

    def install(self, name: str, group: str, *points: str, version: str = "1.0", **modules: str) -> Path:
        """A distribution with these lines in the group, and these modules by name. Returns its folder, which `PYTHONPATH` may take."""
        place = self._folder / f"{name}-{version}"
        metadata = place / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *points, ""]))
        for module, code in modules.items():
            (place / f"{module}.py").write_text(code)
        self.modules |= modules.keys()
        self._monkeypatch.syspath_prepend(str(place))
        forget()
        return place


def forget() -> None:
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distributions]:
    """Gone after the test, with what was imported of them."""
    with monkeypatch.context() as patch:
        found = Distributions(tmp_path / "installed", patch)
        yield found
    forget()
    for module in found.modules:
        sys.modules.pop(module, None)
