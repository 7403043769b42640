"""Fixtures shared by all tests: servers, each in a module of its own."""

import os
import shutil
import subprocess
import threading

import pytest
from hypothesis import HealthCheck, settings
from redis_server import redis_kind, redis_server, redis_url, store
from scripted_fixtures import engine, engines, service, token_service
from scripted_service import scripted_server
from vllm_server import tiny_model, vllm_server, vllm_url
from weight_fixtures import weights

__all__ = [
    "engine",
    "engines",
    "redis_kind",
    "redis_server",
    "redis_url",
    "scripted_server",
    "service",
    "store",
    "tiny_model",
    "token_service",
    "vllm_server",
    "vllm_url",
    "weights",
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


_LEFT_OUT = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are left out where there are not two: what no machine of the project has is no failure of its tests."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and _gpus() < 2:
        items[:] = [item for item in items if item not in wanting]
        config.hook.pytest_deselected(items=wanting)
        config.stash[_LEFT_OUT] = len(wanting)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if left_out := terminalreporter.config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"left out: {left_out} tests that need two GPUs, this machine has {_gpus()}")
    if left := _left_running():
        terminalreporter.write_line(f"ERROR: tests left threads running: {', '.join(left)}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if _left_running():
        # Python would wait for them for ever.
        os._exit(pytest.ExitCode.TESTS_FAILED)
