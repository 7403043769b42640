"""Faults planted into the product one at a time, to see that the tests notice: `make mutants`."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

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
    console = Console()
    faults = [fault for fault in read_faults() if _mentions(fault, options.only)]
    if not faults:
        console.print(f"no fault mentions all of: {', '.join(options.only)}")
        return 1
    lost = _find_misplaced(faults)
    for fault, why in lost.items():
        console.print(f"[red]cannot be planted:[/] {escape(fault.harm)}\n    {escape(why)}", highlight=False)
    if options.list:
        return _show(faults, lost, console)
    faults = [fault for fault in faults if fault not in lost]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            verdicts = Workshops(Path(folder).resolve(), options.jobs, console).try_out(faults)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left behind")
        return 130
    except (OSError, RuntimeError) as error:
        console.print(f"[red]{escape(str(error))}[/]", highlight=False)
        return 1
    return _report(verdicts, lost, console, output=options.output)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutants", description=_HELP, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only faults that mention all of these words")
    parser.add_argument("--list", action="store_true", help="list the faults, and run nothing")
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="how many copies to work in at a time",
    )
    parser.add_argument("--output", action="store_true", help="show the output of pytest, also for faults that were caught")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _mentions(fault: Fault, words: Iterable[str]) -> bool:
    said = f"{fault.harm} {fault.tests}".lower()
    return all(word.lower() in said for word in words)


def _find_misplaced(faults: Iterable[Fault]) -> dict[Fault, str]:
    """Faults that no longer apply to the tree, and why."""
    texts, lost = sources(ROOT), {}
    for fault in faults:
        try:
            fault.place(texts)
        except NotPlaced as error:
            lost[fault] = str(error)
        if gone := [path for path in fault.paths if not (ROOT / path).exists()]:
            lost[fault] = f"there is no {', '.join(gone)}"
    return lost


def _show(faults: Sequence[Fault], lost: dict[Fault, str], console: Console) -> int:
    texts = sources(ROOT)
    table = Table("what it would do", "where", "tests", show_lines=True)
    for fault in faults:
        table.add_row(escape(fault.harm), "nowhere" if fault in lost else str(fault.place(texts)), escape(fault.tests))
    console.print(table)
    console.print(f"{len(faults)} faults")
    return 1 if lost else 0


class Workshops:
    """Several copies of the tree, each of which does one task at a time."""

    def __init__(self, folder: Path, number: int, console: Console) -> None:
        self._free: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
        self._all: list[Workshop] = []
        self._console = console
        self._folder = folder
        self._number = number

    def try_out(self, faults: Sequence[Fault]) -> list[Verdict]:
        """A verdict per fault. Raises KeyboardInterrupt, and RuntimeError unless the copies are what is imported."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with ExitStack() as stack:
            self._open(faults, stack)
            threads = stack.enter_context(ThreadPoolExecutor(self._number))
            progress = stack.enter_context(Progress(*columns, console=self._console))
            try:
                broken = self._run_without_faults(faults, threads, progress)
                return self._judge_all(faults, broken, threads, progress)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for workshop in self._all:
                    workshop.stop()
                raise

    def _open(self, faults: Sequence[Fault], stack: ExitStack) -> None:
        files = sorted({path for fault in faults for path in fault.paths})
        with self._console.status("copying the tree"):
            for number in range(self._number):
                workshop = stack.enter_context(Workshop(self._folder / str(number), files))
                self._all.append(workshop)
                self._free.put(workshop)

    def _run_without_faults(self, faults: Sequence[Fault], threads: ThreadPoolExecutor, progress: Progress) -> set[str]:
        """The test files that fail without a fault. Raises RuntimeError when they cannot be run."""
        # All tests of one file run in one workshop.
        files = sorted({path for fault in faults for path in fault.paths})
        shares = [share for share in (files[start :: self._number] for start in range(self._number)) if share]
        bar = progress.add_task("without a fault", total=len(shares))
        broken: set[str] = set()
        for done in as_completed([threads.submit(self._test, select_tests(faults, share)) for share in shares]):
            run = done.result()
            if not run.whole:
                raise RuntimeError(f"without a fault pytest ended with exit code {run.code}:\n{_tail(run)}")
            if run.failed:
                progress.console.print(f"[red]fails without a fault:[/]\n{escape(_tail(run))}", highlight=False)
            broken |= {test.partition("::")[0] for test in run.failed}
            progress.advance(bar)
        return broken

    def _test(self, arguments: Sequence[str]) -> Run:
        workshop = self._free.get()
        try:
            return workshop.test(arguments, limited=False)
        finally:
            self._free.put(workshop)

    def _judge_all(
        self, faults: Sequence[Fault], broken: set[str], threads: ThreadPoolExecutor, progress: Progress
    ) -> list[Verdict]:
        bar = progress.add_task("faults", total=len(faults))
        asked: dict[Future[Verdict], Fault] = {}
        found: dict[Fault, Verdict] = {}
        for fault in faults:
            if not broken.intersection(fault.paths):
                asked[threads.submit(self._judge, fault)] = fault
            else:
                found[fault] = Verdict(fault, None, "its tests fail without it")
                progress.advance(bar)
        for done in as_completed(asked):
            found[asked[done]] = verdict = done.result()
            if verdict.why:
                progress.console.print(f"[red]NOT caught[/] ({verdict.why}): {escape(verdict.fault.harm)}", highlight=False)
            elif not progress.console.is_terminal:
                progress.console.print(f"caught: {escape(verdict.fault.harm)}", highlight=False)
            progress.advance(bar)
        return [found[fault] for fault in faults]

    def _judge(self, fault: Fault) -> Verdict:
        workshop = self._free.get()
        try:
            with workshop.planted(fault):
                run = workshop.test(["-x", *fault.arguments], limited=True)
        finally:
            self._free.put(workshop)
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
        name = Path(path).stem
        terms.append(
            name if "" in expressions else f"({name} and ({' or '.join(f'({each})' for each in sorted(expressions))}))"
        )
    return [*files, "-k", " or ".join(terms)]


def _report(verdicts: Sequence[Verdict], lost: dict[Fault, str], console: Console, *, output: bool) -> int:
    table = Table("fault", "", "s", "noticed by", show_lines=True)
    for verdict in verdicts:
        run = verdict.run
        state = "[red]NOT caught[/]" if verdict.why else "[green]caught[/]"
        seconds = f"{run.seconds:.0f}" if run is not None else ""
        noticed = run.failed[0] if run is not None and run.failed else ""
        table.add_row(escape(verdict.fault.harm), state, seconds, escape(verdict.why or noticed))
        if run is not None and (output or not run.whole):
            console.rule(escape(verdict.fault.harm))
            console.print(_tail(run), markup=False, highlight=False)
    console.print(table)
    missed = sum(bool(verdict.why) for verdict in verdicts)
    console.print(f"{len(verdicts) - missed} of {len(verdicts) + len(lost)} faults were caught", highlight=False)
    return 1 if missed or lost else 0


def _tail(run: Run) -> str:
    return "\n".join(run.output.strip().splitlines()[-40:])


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stopped:
        sys.exit(130)
