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


class SharedTests(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return _ENGINE if _needs_engine(path) else path

    def _assign_work_unit(self, node: Any) -> None:
        # What takes longest is begun first.
        if _ENGINE in self.workqueue:
            self.workqueue.move_to_end(_ENGINE, last=False)
        super()._assign_work_unit(node)


@cache
def _needs_engine(path: str) -> bool:
    return "pytest.mark.engine" in (ROOT / path).read_text()
