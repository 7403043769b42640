"""Imports go one way: no module imports itself by way of others, types included, and the storeys above a module are few."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter

import grimp
import pytest

ROOMS = ("contract", "proxy", "reconstruct", "rollout", "trainer_client", "cli")


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """What each module imports, at its top or within a function."""
    graph = grimp.build_graph(*ROOMS, cache_dir=None)
    return {module: frozenset(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def storeys(room: str) -> int:
    """The length of the longest chain of modules of the room, of which each imports the next."""
    height: dict[str, int] = {}
    for module in TopologicalSorter(imports()).static_order():
        if module.startswith(room):
            height[module] = 1 + max((height[other] for other in imports()[module] if other.startswith(room)), default=0)
    return max(height.values())


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter(imports()).prepare()


@pytest.mark.parametrize(
    ("room", "most"),
    [("proxy.engine.", 8), ("proxy.", 19), ("rollout.", 7), ("cli.", 9), ("contract.", 4), ("reconstruct.", 6)],
)
def test_rooms_have_no_more_storeys_than_now(room: str, most: int) -> None:
    """Who reads a module reads all below it. Fewer are welcome: lower the number then."""
    assert storeys(room) <= most
