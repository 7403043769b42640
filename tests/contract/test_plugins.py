"""One loader of plug-ins, and its one rule: a name stands for one thing, or nothing starts. The groups are held to it, all five."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import proxy.builders
import proxy.dialects.catalogue
import proxy.engine.kinds
import rollout.evaluators.catalogue
import rollout.runtimes.catalogue
from contract import plugins
from contract.plugins import BrokenPlugin, PluginConflict, Plugins, UnknownPlugin, load_plugins
from tests import ROOT
from tests.support.distributions import Distributions
from tests.support.service.verbatim_process import COMMAND, environment

GROUP = "tests.toys"
BUILT_IN = {"dict": "builtins:dict", "list": "builtins:list"}
GROUPS: dict[str, tuple[Callable[[], Plugins[Any]], str]] = {
    "verbatim.builders": (proxy.builders.plugins, "merged"),
    "verbatim.dialects": (proxy.dialects.catalogue.plugins, "chat"),
    "verbatim.engines": (proxy.engine.kinds.plugins, "token"),
    "verbatim.evaluators": (rollout.evaluators.catalogue.plugins, "pytest"),
    "verbatim.runtimes": (rollout.runtimes.catalogue.plugins, "local"),
}


def take_any(name: str, found: Any) -> Any:
    return found


def find() -> Plugins[Any]:
    return load_plugins(GROUP, BUILT_IN, take_any)


def test_plugins_are_the_built_in_ones_and_those_of_packages(distributions: Distributions) -> None:
    distributions.install("more-toys", GROUP, "text = builtins:str")
    found = find()
    assert found.names() == ["dict", "list", "text"]
    assert [found.load(name) for name in found.names()] == [dict, list, str]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownPlugin, match="there is no toy 'dick': choose one of dict, list"):
        find().load("dick")


@pytest.mark.parametrize(("group", "taken"), [(group, taken) for group, (_, taken) in GROUPS.items()])
def test_no_group_lets_a_package_take_a_built_in_name(distributions: Distributions, group: str, taken: str) -> None:
    """Two groups let the package win, one the built-in plug-in, and two failed only when it was used."""
    distributions.install("usurper", group, f"{taken} = usurper:Thing", version="2.1")
    with pytest.raises(PluginConflict, match=rf"{taken!r}: .* of verbatim-rl and usurper:Thing of usurper 2\.1; uninstall"):
        GROUPS[group][0]()


@pytest.mark.parametrize("group", GROUPS)
def test_two_packages_that_give_one_name_are_both_named(distributions: Distributions, group: str) -> None:
    for name in ("one", "two"):
        distributions.install(name, group, f"mine = {name}:Thing")
    with pytest.raises(PluginConflict) as raised:
        GROUPS[group][0]()
    assert "one:Thing of one 1.0" in str(raised.value) and "two:Thing of two 1.0" in str(raised.value)


@pytest.mark.parametrize(("group", "noun"), [("verbatim.engines", "engine"), ("verbatim.evaluators", "evaluator")])
def test_a_service_with_two_plugins_of_one_name_does_not_start_and_names_both(
    distributions: Distributions, redis_url: str, tmp_path: Path, group: str, noun: str
) -> None:
    places = [distributions.install(name, group, f"mine = {name}:Thing") for name in ("one", "two")]
    path = os.pathsep.join(map(str, (ROOT, *places)))
    words = ("serve", "--port", "0", "--redis", redis_url, "--data-dir", str(tmp_path), "--engine", "http://127.0.0.1:9")
    done = subprocess.run([*COMMAND, *words], env=environment(PYTHONPATH=path), capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    assert f"two packages give the {noun} 'mine': one:Thing of one 1.0 and two:Thing of two 1.0" in " ".join(
        done.stderr.split()
    )


NAMES = st.sampled_from(["a", "b", "dict"])
VALUES = st.sampled_from(["builtins:int", "builtins:str", "builtins:dict"])


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6))
def test_names_are_accepted_exactly_if_none_stands_for_two_things(listed: list[tuple[str, str]]) -> None:
    """However many packages list them, in whatever order."""
    values = {name: {value} for name, value in BUILT_IN.items()}
    for name, value in listed:
        values.setdefault(name, set()).add(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "entry_points", lambda group: [EntryPoint(name, value, group) for name, value in listed])
        if any(len(several) > 1 for several in values.values()):
            with pytest.raises(PluginConflict):
                find()
        else:
            assert find().names() == sorted(values)


def test_a_broken_plugin_is_an_error_only_where_it_is_named(
    distributions: Distributions, caplog: pytest.LogCaptureFixture
) -> None:
    distributions.install("more-toys", GROUP, "gone = nowhere.at_all:Toy", "text = builtins:str")
    found = find()
    assert found.load_all() == {"dict": dict, "list": list, "text": str}
    reason = (
        "the toy 'gone' (nowhere.at_all:Toy of more-toys 1.0) cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"
    )
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", reason)]
    with pytest.raises(BrokenPlugin) as raised:
        found.load("gone")
    assert str(raised.value) == reason


def test_what_the_check_of_a_group_raises_is_what_is_wrong_with_a_plugin() -> None:
    def refuse(name: str, found: Any) -> Any:
        raise BrokenPlugin("it has no wheels") if name == "dict" else KeyError("doors")

    found = load_plugins(GROUP, BUILT_IN, refuse)
    with pytest.raises(
        BrokenPlugin, match=r"the toy 'dict' \(builtins:dict of verbatim-rl\) cannot be loaded: it has no wheels$"
    ):
        found.load("dict")
    with pytest.raises(BrokenPlugin, match=r"cannot be loaded: KeyError: 'doors'$"):
        found.load("list")


def test_threads_that_load_a_plugin_at_once_get_the_same_object() -> None:
    meeting = threading.Barrier(2)

    def make(name: str, found: Any) -> Any:
        meeting.wait()
        return found()

    found = load_plugins(GROUP, BUILT_IN, make)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(found.load, ["dict", "dict"])
    assert one is two is found.load("dict")
