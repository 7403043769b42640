"""The model of tests of rollouts: it says `hello world`, whatever it is asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine.scripted_engine import Say, ScriptedEngine


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3", **getattr(request, "param", {})) as engine:
        engine.script = lambda generation, index: Say("hello world")
        yield engine
