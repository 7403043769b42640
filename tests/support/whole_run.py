"""Hooks of a whole test run: missing programs are reported, tests of missing hardware left out, and leftovers found and ended."""

import gc
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import leftovers, machine


def pytest_configure(config: pytest.Config) -> None:
    # A background job of a shell ignores Ctrl-C, and so would every process that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    lacking = machine.shortage()
    if lacking and os.environ.get("CI") == "true" and not hasattr(config, "workerinput"):
        pytest.exit(f"with CI=true no test may be skipped for want of a program; {lacking}", returncode=1)
    if not config.option.collectonly:
        leftovers.watch()


def pytest_report_header() -> list[str]:
    lacking = machine.shortage()
    return [f"tests will be skipped: {lacking}"] if lacking else []


@pytest.fixture(scope="module", autouse=True)
def _leaks_are_told_where_they_are() -> Iterator[None]:
    """What a module forgot to close warns at its own end; the next module would be blamed for it. What is in use still, such as what it
    imported, is not looked through again: that took up to a second per module."""
    yield
    gc.collect()
    gc.freeze()


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
    """Marks of the tests that are left out, and why."""
    missing = {}
    if (gpus := _gpus()) < 2:
        missing["gpu"] = f"need two GPUs, this machine has {gpus}"
    if "apptainer" in machine.LEFT_OUT:
        missing["apptainer"] = "need the real apptainer, which is not available"
    return missing


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out(config, items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """The million objects that exist by now stay to the end. Looking through them for garbage would stop services in this process for
    a second or two."""
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
    """A worker has ended; all of them left out the same tests."""
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
        # Python would wait for them forever.
        os._exit(pytest.ExitCode.TESTS_FAILED)
