"""SharedTests: how several processes share the tests (`make test`).

All tests of a file are one process's, and all files with a test that needs the engine are one's: so each fixture of a file is made
once, and so is the engine. pytest-xdist's groups (`--dist loadgroup`) would say the same; pytest 9.2 does not see them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from xdist.scheduler import LoadScopeScheduling

from tests import ROOT

_ENGINE = "engine"
_LONG = (
    "tests/rollout/runtimes/test_contract.py",
    "tests/docs/test_commands.py",
    "tests/proxy/archive/test_archive.py",
    "tests/examples/test_tasks.py",
    "tests/cli/test_run.py",
    "tests/cli/test_serve.py",
    "tests/cli/generation/test_generate.py",
    "tests/end_to_end/test_crashes.py",
    "tests/proxy/store/test_faults.py",
    "tests/proxy/ui/test_browser.py",
    "tests/proxy/call/test_hot_path_cost.py",
    "tests/deploy/test_release.py",
)
_AGENTS = ("tests/harnesses/", "tests/joins/")
"""Real agents and frameworks, whose starts take seconds: few tests of theirs are as long as many others."""


class SharedTests(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return _ENGINE if _needs_engine(path) else path

    def _assign_work_unit(self, node: Any) -> None:
        # A long file that starts last leaves the other processes idle. The rest is in the order of how many tests a file has.
        if self.workqueue:
            self.workqueue.move_to_end(min(self.workqueue, key=_turn), last=False)
        super()._assign_work_unit(node)


def _turn(unit: str) -> int:
    """Of a file, or of all that need the engine: the lower, the earlier it is begun. What takes longest comes first."""
    if unit == _ENGINE:
        return 0
    if unit.startswith(_AGENTS):
        return 1
    return 2 if unit in _LONG else 3


@cache
def _needs_engine(path: str) -> bool:
    return "pytest.mark.engine" in (ROOT / path).read_text()
