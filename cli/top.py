"""`verbatim top`: a running service in a terminal, live."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.refusal import Refusal

if TYPE_CHECKING:
    from rich.live import Live

    from cli.control import Control
    from cli.snapshot import Snapshot


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it one time, with totals instead of rates, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="How often to look again.")] = 2.0,
    sessions: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="At most so many open sessions, the newest.")
    ] = 20,
) -> None:
    """Watch a running service: calls, engines with their weights, queues, groups and leases, nodes, open sessions. Ctrl-C ends it.

    It reads /metrics and the admin's endpoints (VERBATIM_URL, VERBATIM_ADMIN_TOKEN). Where several processes or machines serve one
    address, calls and waiting calls are those of the one that answers; groups, nodes and sessions are everybody's.
    """
    from cli.control import Control
    from cli.snapshot import look
    from cli.tables import standard_output
    from cli.top_screen import screen

    control = Control()
    with control.kept_open():
        # Before anything is drawn: a wrong address or token is told in one sentence.
        first = look(control, sessions)
        if as_json:
            typer.echo(json.dumps(asdict(first)))
        elif once:
            standard_output().print(screen(first, None))
        else:
            _watch(control, first, every, sessions)


def _watch(control: Control, first: Snapshot, every: float, sessions: int) -> None:
    """Until Ctrl-C or SIGTERM; then the terminal is as it was before."""
    from rich.live import Live

    from cli.top_screen import screen

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Live(screen(first, None), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            live.refresh()
            _follow(live, control, first, every, sessions)
    except KeyboardInterrupt:
        pass


def _follow(live: Live, control: Control, now: Snapshot, every: float, sessions: int) -> None:
    from cli.snapshot import look
    from cli.top_screen import screen

    shown: Any = screen(now, None)
    while True:
        time.sleep(every)
        try:
            before, now = now, look(control, sessions)
            shown = screen(now, before)
        except Refusal as refusal:
            # It may be restarting: what was last known stays, under the reason.
            shown = screen(now, None, str(refusal))
        live.update(shown, refresh=True)
