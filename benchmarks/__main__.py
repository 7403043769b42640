"""What the service costs, section by section: `make bench`.

    python -m benchmarks [--quick] [--only calls,streams] [--out DIR]

Each section writes its own `results/SECTION.json` and plot as soon as it has them, and at the end the tables of the Markdown files are
made from all of them: a run that is broken off keeps what it has. What one section cannot do is said and the others go on; then the exit
code is 1. Ctrl-C ends all processes, and the run with 130.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import capacity, tables
from benchmarks.processes import ROOT, end
from benchmarks.results import interruptible


def main() -> None:
    options = _options()
    interruptible()
    flags = [*(["--quick"] if options.quick else []), *(["--out", str(options.out.resolve())] if options.out else [])]
    failed: list[str] = []
    broken_off = False
    for place, name in enumerate(options.only):
        left = "" if options.quick else f", about {sum(tables.MINUTES[each] for each in options.only[place:]):g} minutes left"
        print(f"== {name}: {place + 1} of {len(options.only)}{left}", flush=True)
        began = time.monotonic()
        try:
            code = _run([sys.executable, "-m", f"benchmarks.{name}", *flags])
        except KeyboardInterrupt:
            broken_off = True
            break
        failed += [name] if code else []
        print(f"== {name}: {'failed' if code else 'done'} after {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    if not options.quick and options.out is None and (why := tables.write() | capacity.write()):
        print(tables.refusal(why), file=sys.stderr)
    if broken_off:
        print("== broken off; the results of the sections before are kept", file=sys.stderr)
        raise SystemExit(130)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see that all of them work; writes nothing without --out")
    parser.add_argument("--only", action="append", type=_names, help=f"these, with commas: {', '.join(tables.MINUTES)}")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results, instead of benchmarks/results")
    options = parser.parse_args()
    default = [name for name in tables.MINUTES if name not in tables.APART]
    options.only = [name for names in options.only or [default] for name in names]
    return options


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in tables.MINUTES:
            raise argparse.ArgumentTypeError(f"there is no section {name!r}: choose from {', '.join(tables.MINUTES)}")
    return names


def _run(argv: Sequence[str]) -> int:
    """The exit code of one section. It is a process of its own, so that none inherits what another left in memory, and in a session
    of its own, so that Ctrl-C reaches it alone and it can end in order what it started."""
    process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        end(process, signal.SIGINT)
        raise


if __name__ == "__main__":
    main()
