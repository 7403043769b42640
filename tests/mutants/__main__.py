"""Faults planted into the product one at a time, to see that the tests notice: `make mutants`."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests import ROOT
from tests.mutants.fault import Fault, NotPlaced, read_faults, sources
from tests.mutants.workshop import Run, Stopped, Workshop

_HELP = """\
Each fault is a small change of the code that would hurt a user. It is planted into a copy of the tree in a temporary folder, never into
the checkout, and the few tests that must notice run there. First they run without a fault, and must pass.

A fault that is NOT caught is a finding: either another test notices it (name that one), or a test is missing (write it). The exit code
is 1 when a fault was not caught, no longer applies to the code, or could not be tested.

Faults are paragraphs in tests/mutants/faults/*.diff: the harm, the tests, the lines as in a diff. The old lines must occur exactly once
in the product, in whichever file.
"""
_EXAMPLES = """\
examples:
  make mutants                                  all of them, about a quarter of an hour on two cores
  make mutants ARGS="--only lease"              those with "lease" in their description or their tests
  make mutants ARGS="--only bridge template"    those with both
  make mutants ARGS="--list"                    list them, and where each would be planted
  make mutants ARGS="--only intent --output"    with the output of pytest for each
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why` it does not count as caught; "" if it does."""

    fault: Fault
    run: Run | None
    why: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse_arguments(arguments)
    faults = [fault for fault in read_faults() if _mentions(fault, options.only)]
    texts = sources(ROOT)
    lost = {fault: why for fault in faults if (why := _find_misplaced(fault, texts))}
    for fault, why in lost.items():
        say(f"cannot be planted: {fault.harm}\n    {why}")
    faults = [fault for fault in faults if fault not in lost]
    if options.list or not faults:
        for fault in faults:
            say(f"{fault.harm}\n    {fault.place(texts)}: {fault.tests}")
        say(f"{len(faults)} faults")
        return 1 if lost or not faults else 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            verdicts = try_out(Path(folder).resolve(), options.jobs, faults, output=options.output)
    except KeyboardInterrupt:
        say("stopped; nothing is left behind")
        return 130
    except (OSError, RuntimeError) as error:
        say(str(error))
        return 1
    missed = sum(bool(verdict.why) for verdict in verdicts)
    say(f"{len(verdicts) - missed} of {len(verdicts) + len(lost)} faults were caught")
    return 1 if missed or lost else 0


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutants", description=_HELP, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only faults that mention all of these words")
    parser.add_argument("--list", action="store_true", help="list the faults, and run nothing")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, choices=range(1, 65), default=cores, metavar="N", help="how many copies to work in")
    parser.add_argument("--output", action="store_true", help="show the output of pytest, also for faults that were caught")
    return parser.parse_args(arguments)


def _mentions(fault: Fault, words: Iterable[str]) -> bool:
    said = f"{fault.harm} {fault.tests}".lower()
    return all(word.lower() in said for word in words)


def _find_misplaced(fault: Fault, texts: dict[Path, str]) -> str:
    """Why it no longer applies to the tree; "" if it does."""
    try:
        fault.place(texts)
    except NotPlaced as error:
        return str(error)
    gone = [path for path in fault.paths if not (ROOT / path).exists()]
    return f"there is no {', '.join(gone)}" if gone else ""


def try_out(folder: Path, number: int, faults: Sequence[Fault], *, output: bool) -> list[Verdict]:
    """A verdict per fault, each said as it comes, from so many copies of the tree, of which each does one task at a time. Raises
    KeyboardInterrupt, and RuntimeError unless the copies are what is imported."""
    files = sorted({path for fault in faults for path in fault.paths})
    free: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
    with ExitStack() as stack:
        workshops = [stack.enter_context(Workshop(folder / str(each), files)) for each in range(number)]
        for workshop in workshops:
            free.put(workshop)
        threads = stack.enter_context(ThreadPoolExecutor(number))
        try:
            broken = _run_without_faults(faults, files, threads, free)
            asked = [threads.submit(_judge, fault, broken, free) for fault in faults]
            verdicts = []
            for done in as_completed(asked):
                verdicts.append(done.result())
                _report(verdicts[-1], output=output)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for workshop in workshops:
                workshop.stop()
            raise
    return verdicts


def _run_without_faults(
    faults: Sequence[Fault], files: Sequence[str], threads: ThreadPoolExecutor, free: queue.SimpleQueue[Workshop]
) -> set[str]:
    """The test files that fail without a fault. Raises RuntimeError when they cannot be run."""
    number = free.qsize()
    # All tests of one file run in one workshop.
    shares = [share for share in (files[start::number] for start in range(number)) if share]
    broken: set[str] = set()
    for done in as_completed([threads.submit(_test, select_tests(faults, share), free) for share in shares]):
        run = done.result()
        if not run.whole:
            raise RuntimeError(f"without a fault pytest ended with exit code {run.code}:\n{_tail(run)}")
        if run.failed:
            say(f"fails without a fault:\n{_tail(run)}")
        broken |= {test.partition("::")[0] for test in run.failed}
    return broken


def _test(arguments: Sequence[str], free: queue.SimpleQueue[Workshop]) -> Run:
    workshop = free.get()
    try:
        return workshop.test(arguments, limited=False)
    finally:
        free.put(workshop)


def _judge(fault: Fault, broken: set[str], free: queue.SimpleQueue[Workshop]) -> Verdict:
    if broken.intersection(fault.paths):
        return Verdict(fault, None, "its tests fail without it")
    workshop = free.get()
    try:
        with workshop.planted(fault):
            run = workshop.test(["-x", *fault.arguments], limited=True)
    finally:
        free.put(workshop)
    why = "the tests pass" if not run.failed else ""
    if not run.whole:
        why = "the tests did not end and were killed" if run.code < 0 else f"pytest ended with exit code {run.code}"
    return Verdict(fault, run, why)


def select_tests(faults: Iterable[Fault], files: Sequence[str]) -> list[str]:
    """Arguments of pytest for every test in these files that some fault names: one `-k` expression for all of them."""
    wanted: dict[str, set[str]] = {file: set() for file in files}
    for fault in faults:
        expression = fault.arguments[-1] if "-k" in fault.arguments else ""
        for path in fault.paths:
            if path in wanted:
                wanted[path].add(expression)
    terms = []
    for path, expressions in wanted.items():
        name, either = Path(path).stem, " or ".join(f"({each})" for each in sorted(expressions))
        terms.append(name if "" in expressions else f"({name} and ({either}))")
    return [*files, "-k", " or ".join(terms)]


def _report(verdict: Verdict, *, output: bool) -> None:
    run, harm = verdict.run, verdict.fault.harm
    noticed = f"{run.seconds:.0f} s, {run.failed[0]}" if run is not None and run.failed else ""
    say(f"NOT caught ({verdict.why}): {harm}" if verdict.why else f"caught: {harm}\n    {noticed}")
    if run is not None and (output or not run.whole):
        say(_tail(run))


def _tail(run: Run) -> str:
    return "\n".join(run.output.strip().splitlines()[-40:])


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stopped:
        sys.exit(130)
