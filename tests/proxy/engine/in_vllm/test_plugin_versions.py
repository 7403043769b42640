"""The plugin in a vLLM that it does not know: one sentence in the log, no routes, and the engine starts."""

from __future__ import annotations

import ast
import asyncio
import logging
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.datastructures import State

from proxy.engine.in_vllm import internals
from proxy.engine.in_vllm.internals import INTERNALS, Internal, choose, find_problem, is_checked
from proxy.engine.in_vllm.plugin import SamplePlugin


def start(caplog: pytest.LogCaptureFixture, *, tokens_only: bool = False) -> list[str]:
    """Start the plugin as vLLM does; returns what it logged. It must have added nothing."""
    app, state, plugin = FastAPI(), State(), SamplePlugin()
    before = list(app.routes)
    with caplog.at_level(logging.DEBUG, "vllm.verbatim"):
        plugin.attach_router(app)
        asyncio.run(plugin.init_state(None, state, Namespace(tokens_only=tokens_only)))
    assert app.routes == before and not hasattr(state, "verbatim")
    return [record.getMessage() for record in caplog.records]


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A vLLM of that version in which every name is missing."""
    fake: Any = ModuleType("vllm")
    fake.__version__ = version
    for name in [name for name in sys.modules if name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", fake)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "0.3.2", "0.34.0+cpu", "dev"])
def test_in_an_unknown_vllm_the_plugin_says_so_and_adds_nothing(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine used to die after its model was loaded."""
    install(monkeypatch, version)
    (said,) = start(caplog)
    assert said == (
        f"the plugin 'verbatim' adds no routes, because it was checked with vLLM 0.32 and 0.33, and this is {version}; calls take the "
        "routes of --enable-scale-out instead"
    )


def test_where_a_name_is_missing_the_plugin_says_which_and_adds_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "0.33.4")
    (said,) = start(caplog)
    assert "because this vLLM 0.33.4 has no vllm.engine.protocol.EngineClient.abort; calls take" in said


def test_an_engine_that_parses_nothing_starts_without_the_routes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "0.33.0")
    (said,) = start(caplog, tokens_only=True)
    assert "because it parses replies, which --tokens-only rules out; calls take" in said


def test_whatever_else_fails_at_the_start_is_said_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A vLLM whose modules have all the names, and whose server lacks something at run time."""
    install(monkeypatch, "0.33.0")
    monkeypatch.setattr("proxy.engine.in_vllm.plugin.find_problem", lambda version: None)
    (said,) = start(caplog)
    assert "because it cannot start: " in said


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu", "0.33.0", "0.33.1rc1"])
def test_a_checked_vllm_with_all_names_is_used(version: str) -> None:
    assert is_checked(version) and find_problem(version, ()) is None


class Base:
    """Stands for a class of vLLM."""

    def __init__(self, client: Any, *, log: Any, limit: int | None = None) -> None: ...

    def stream(self, request: Any, results: Any, added: Any) -> None: ...


HERE = __name__
FITS = [
    Internal(HERE, "Base.__init__", "self client", "log"),
    Internal(HERE, "Base.__init__", "self client", "log", "limit gone"),
    Internal(HERE, "Base.stream", "self request results", overridden=True),
    Internal(HERE, "Base"),
]
MISFITS = [
    (Internal("no_such_module", "x"), "has no no_such_module.x"),
    (Internal(HERE, "Base.gone"), f"has no {HERE}.Base.gone"),
    (Internal(HERE, "Base.__init__", "self client"), f"has another {HERE}.Base.__init__: it wants log"),
    (Internal(HERE, "Base.__init__", "self client", "log more"), "it takes no more"),
    (Internal(HERE, "Base.stream", "self results request", overridden=True), "it takes (self, request, results, added)"),
    (Internal(HERE, "Base.stream", "self request results"), "it wants added"),
]


@pytest.mark.parametrize("internal", FITS, ids=str)
def test_a_name_that_can_be_called_as_the_plugin_calls_it_is_no_problem(internal: Internal) -> None:
    assert find_problem("0.33.0", [internal]) is None


@pytest.mark.parametrize(("internal", "problem"), MISFITS, ids=str)
def test_a_name_that_is_missing_or_wants_other_arguments_is_named(internal: Internal, problem: str) -> None:
    told = find_problem("0.33.0", [FITS[0], internal])
    assert told is not None and told.startswith("this vLLM 0.33.0 has ") and problem in told


def test_arguments_are_given_where_the_function_has_them() -> None:
    assert choose(Base.__init__, limit=3, gone=4) == {"limit": 3}


def test_all_names_of_vllm_that_the_plugin_imports_are_in_the_list() -> None:
    """So that a release that moves one is noticed at the start."""
    folder = Path(internals.__file__).parent
    listed = {(each.module, each.name.partition(".")[0]) for each in INTERNALS}
    for file in ("sampler.py", "reply.py", "aborts.py"):
        imports = [node for node in ast.walk(ast.parse((folder / file).read_text())) if isinstance(node, ast.ImportFrom)]
        used = {(node.module, name.name) for node in imports for name in node.names if (node.module or "").startswith("vllm")}
        assert used <= listed
