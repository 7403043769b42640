"""Fixtures shared by all tests: servers, each in a module of its own."""

import gc
import os
import shutil
import subprocess
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.engine.scripted_fixtures import engine, engines, service, token_service
from tests.support.engine.vllm_server import tiny_model, vllm_server, vllm_url
from tests.support.engine.weight_fixtures import weights
from tests.support.runtimes.rollout_fixtures import world
from tests.support.runtimes.rollout_stores import stores
from tests.support.service.redis_server import redis_kind, redis_server, redis_url, shared_redis, store
from tests.support.service.scripted_service import scripted_server

__all__ = [
    "engine",
    "engines",
    "redis_kind",
    "redis_server",
    "redis_url",
    "scripted_server",
    "service",
    "shared_redis",
    "store",
    "stores",
    "tiny_model",
    "token_service",
    "vllm_server",
    "vllm_url",
    "weights",
    "world",
]

# Other tests run engines beside these: a slow example says nothing about the code.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def _left_running() -> list[str]:
    """Threads that would keep the interpreter from ending."""
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]


def _gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def _missing() -> dict[str, str]:
    """Marks of the tests that are left out, and why: what a machine cannot have is no failure of its tests."""
    missing = {}
    if (gpus := _gpus()) < 2:
        missing["gpu"] = f"need two GPUs, this machine has {gpus}"
    if os.environ.get("VERBATIM_TESTS_WITHOUT") == "apptainer":
        missing["apptainer"] = "need the real apptainer, which could not be had"
    return missing


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out(config, items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported and collected by now, a million objects, is there to the end. To look through it for garbage takes a second or
    two, in which services that run in this process stand still."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.shared_tests import SharedTests

    return SharedTests(config, log)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: dict[str, int] = {}
    for mark, reason in _missing().items():
        if wanting := [item for item in items if item.get_closest_marker(mark)]:
            items[:] = [item for item in items if item not in wanting]
            config.hook.pytest_deselected(items=wanting)
            left_out[reason] = len(wanting)
    config.stash[_LEFT_OUT] = left_out
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of several has ended; what it left out, each did."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in terminalreporter.config.stash.get(_LEFT_OUT, {}).items():
        terminalreporter.write_line(f"left out: {count} tests that {reason}")
    if left := _left_running():
        terminalreporter.write_line(f"ERROR: tests left threads running: {', '.join(left)}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if _left_running():
        # Python would wait for them for ever.
        os._exit(pytest.ExitCode.TESTS_FAILED)
