"""A process that runs pytest again and again, each time in a fork, so that other people's libraries are imported once.

Orders are lines of JSON on standard input, `{"arguments": [...], "output": path}`; it answers each with `{"pid": n}` at once and
`{"code": n}` at the end. It runs in a copy of the tree, its arguments the tests to come; it imports neither them nor the product itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_OURS = ("contract", "proxy", "reconstruct", "rollout", "trainer_client", "cli", "tests", "examples", "benchmarks")
_LISTED = (
    "import sys, pytest; out = sys.stdout; sys.stdout = sys.stderr;"
    "pytest.main(['--collect-only', '-qq', '--assert=plain', '-p', 'no:cacheprovider', *sys.argv[1:]]);"
    "print(*sys.modules, sep='\\n', file=out)"
)


def main() -> None:
    _import_what_is_imported_by(sys.argv[1:])
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(order["arguments"], order["output"])
        print(json.dumps({"pid": pid}), flush=True)  # noqa: T201
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)  # noqa: T201


def _import_what_is_imported_by(tests: Sequence[str]) -> None:
    look = [sys.executable, "-c", _LISTED, *tests]
    listed = subprocess.run(look, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout.split()
    for name in listed:
        if name.partition(".")[0] not in (*_OURS, "__main__"):
            # Some names in sys.modules cannot be imported: another module puts them there.
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _become(arguments: Sequence[str], output: str) -> None:
    """In the fork: run pytest and exit with its code."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    told = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    silent = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((silent, told, told)):
        os.dup2(descriptor, number)
    sys.path.insert(0, str(Path.cwd()))
    import pytest

    sys.exit(pytest.main(list(arguments)))


if __name__ == "__main__":
    main()
