"""Fixtures of the agents' tests: two engines, which speak unlike each other, with a service each, and the table of figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_images import SEEING
from tests.support.engine.template_families import Family
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

# Asserted in there is what the tests show: their failures should say what was compared.
SHARED = ("every_failure", "every_harness", "every_record", "every_run", "truths")
pytest.register_assert_rewrite(*(f"tests.harnesses.{name}" for name in SHARED))

from tests.harnesses.agent_run import Cli, Tools  # noqa: E402
from tests.harnesses.figures import pytest_terminal_summary  # noqa: E402
from tests.harnesses.player import Step  # noqa: E402
from tests.harnesses.stage import Played, Stage  # noqa: E402

__all__ = ["pytest_terminal_summary"]

WINDOW = 131_072
KEEPALIVE_SECONDS = 0.5
"""The service's, in all these tests."""
SLOW_SECONDS = 2.0
VOLATILE_LINES = [
    r"^x-anthropic-billing-header:.*$",
    r"[Cc]urrent date|Today's date|<current_date(time)?>",
    r"^(Session folder|Message time): ",
]
"""What agents tell their models that differs between two runs: docs/forks.md."""


@contextmanager
def _stage(family: str | Family, redis_url: str, tmp: pytest.TempPathFactory, keepalive_seconds: float) -> Iterator[Stage]:
    with (
        ScriptedEngine(family, max_model_len=WINDOW, most_images=2 if family is SEEING else 0) as engine,
        RunningService(
            engine.url, redis_url, engine_api="token", keepalive_seconds=keepalive_seconds, volatile_lines=VOLATILE_LINES
        ) as service,
    ):
        yield Stage(engine, service, tmp.mktemp(engine.family.name))


@pytest.fixture(scope="module")
def stage(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Qwen3's template: thinking, and several tool calls in one reply."""
    with _stage("qwen3", redis_server.url, tmp_path_factory, KEEPALIVE_SECONDS) as stage:
        yield stage


@pytest.fixture(scope="module")
def failing_stage(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The same without keep-alives: on a slow machine one would go out first, and a failed call end in a stream instead of a status."""
    with _stage("qwen3", redis_server.url, tmp_path_factory, 60.0) as stage:
        yield stage


@pytest.fixture(scope="module")
def raw_stage(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Harmony's: the engine hands on a tool call's arguments as they were sampled, be they JSON or not."""
    with _stage("harmony", redis_server.url, tmp_path_factory, KEEPALIVE_SECONDS) as stage:
        yield stage


@pytest.fixture(scope="module")
def seeing_stage(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Qwen3's template, and a model that takes images."""
    with _stage(SEEING, redis_server.url, tmp_path_factory, KEEPALIVE_SECONDS) as stage:
        yield stage


@pytest.fixture(scope="module")
def cli(request: pytest.FixtureRequest) -> Cli:
    found: Cli = request.module.CLI
    return found


@pytest.fixture(scope="module")
def tools(cli: Cli) -> Tools:
    assert cli.tools is not None
    return cli.tools


@pytest.fixture(scope="module")
def plain(cli: Cli, stage: Stage) -> Played:
    """A run of several turns in which nothing goes wrong; the first token of one is slow."""
    steps: list[Step] = list(cli.steps(stage.workdir(cli, "plain")))
    steps[cli.change_at] = replace(steps[cli.change_at], how={"seconds_before": SLOW_SECONDS})
    return stage.play(cli, steps, "plain")
