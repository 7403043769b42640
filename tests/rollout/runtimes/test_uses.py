"""Uses: what is held is not removed, whenever the removal comes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout.runtimes import installs as module
from rollout.runtimes.installs import Uses
from tests.support.service.running_service import wait_until


@pytest.fixture
def uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uses:
    """Of one thing, "a", which was used just now; nothing is too young to be removed."""
    monkeypatch.setattr(module, "YOUNG_SECONDS", -3600.0)
    uses = Uses(tmp_path / "uses", 0, "VERBATIM_LOCAL_DIR")
    uses.note("a")
    return uses


def awaited(mark: Path) -> bool:
    """Somebody waits for a lock on the file."""
    waiting = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(line.split()[6].endswith(f":{mark.stat().st_ino}") for line in waiting)


def test_who_waited_for_a_removal_holds_what_is_there_afterwards(uses: Uses, tmp_path: Path) -> None:
    """It had the lock of a file that was gone: the next removal did not see it."""
    with ThreadPoolExecutor(1) as thread:
        with uses.lock("a") as unused:
            assert unused
            holding = thread.submit(uses.hold, "a")
            wait_until(lambda: awaited(tmp_path / "uses" / "a"), 120, "the lock is waited for")
            uses.forget("a")
        held = holding.result(120)
    with uses.lock("a") as unused:
        assert not unused
    os.close(held)
    with uses.lock("a") as unused:
        assert unused


def test_nothing_that_is_held_is_removed_however_often_both_come(uses: Uses, tmp_path: Path) -> None:
    """A removal between the look at the file and its opening was an error nobody expected."""
    done, removals = threading.Event(), 0

    def remove() -> None:
        nonlocal removals
        while not done.is_set():
            with uses.lock("a") as unused:
                if unused:
                    uses.forget("a")
                    removals += 1

    removing = threading.Thread(target=remove)
    removing.start()
    try:
        for _ in range(2000):
            held = uses.hold("a")
            assert (tmp_path / "uses" / "a").exists()
            os.close(held)
    finally:
        done.set()
        removing.join()
    assert removals > 10
