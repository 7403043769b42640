"""Fixtures shared by all tests: servers, each in a module of its own."""

import os
import threading

import pytest
from hypothesis import HealthCheck, settings
from redis_server import redis_kind, redis_server, redis_url, store
from scripted_fixtures import engine, service, token_service
from vllm_server import tiny_model, vllm_server, vllm_url

__all__ = [
    "engine",
    "redis_kind",
    "redis_server",
    "redis_url",
    "service",
    "store",
    "tiny_model",
    "token_service",
    "vllm_server",
    "vllm_url",
]

# Other tests run engines beside these: a slow example says nothing about the code.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def _left_running() -> list[str]:
    """Threads that would keep the interpreter from ending."""
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if left := _left_running():
        terminalreporter.write_line(f"ERROR: tests left threads running: {', '.join(left)}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if _left_running():
        # Python would wait for them for ever.
        os._exit(pytest.ExitCode.TESTS_FAILED)
