"""`verbatim top`: a running service in a terminal, live."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.engines import replicas_table
from cli.refusal import Refusal
from cli.sessions import sessions_table
from cli.tables import whole_table

if TYPE_CHECKING:
    from rich.live import Live

    from cli.control import Control


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
    from cli.tables import standard_output

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

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Live(screen(first, None), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            live.refresh()
            _follow(live, control, first, every, sessions)
    except KeyboardInterrupt:
        pass


def _follow(live: Live, control: Control, now: Snapshot, every: float, sessions: int) -> None:

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


# What `verbatim top` shows of a snapshot: one screen, the rates those since the snapshot before.


_STATES = ("opened", "filling", "ready", "leased", "acked", "stale", "dropped", "dead")


def screen(now: Snapshot, before: Snapshot | None, trouble: str = "") -> RenderableType:
    """`trouble`: why there is nothing newer."""
    parts: list[RenderableType] = [_head(now, before)]
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    parts += [_titled("engines", replicas_table(now.engines)), Text(_waiting(now)), _titled("groups", _groups(now))]
    if now.nodes or now.queues:
        parts += [_titled("nodes", _nodes(now)), Text(_queued(now))]
    more = ", the newest of more" if now.more else ""
    return Group(*parts, _titled(f"{len(now.sessions)} open sessions{more}", sessions_table(now.sessions)))


def _head(now: Snapshot, before: Snapshot | None) -> Text:
    """Rates where there is something to compare with, totals otherwise."""
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    told = [f"{now.url}  {clock}", f"{now.calls['in_flight']:.0f} calls in flight"]
    for name, what in (("recorded", "calls"), ("refused", "refused"), ("sampled_tokens", "tokens sampled")):
        rate = now.rate(name, before)
        told.append(f"{now.calls[name]:.0f} {what}" if rate is None else f"{rate:.1f} {what}/s")
    own, engine, timed = (now.rate(name, before) for name in ("own_seconds", "engine_seconds", "timed"))
    if timed and own is not None and engine is not None:
        told.append(f"{own / timed * 1000:.1f} ms own, {engine / timed:.2f} s engine per call")
    return Text("  |  ".join(told), style="bold")


def _waiting(now: Snapshot) -> str:
    waiting = {policy: calls for policy, calls in now.waiting.items() if calls}
    if not waiting:
        return "no call waits for an engine"
    return ", ".join(f"{calls} calls wait for {policy or 'the default policy'}" for policy, calls in waiting.items())


def _groups(now: Snapshot) -> Table:
    table = whole_table(*_STATES)
    table.add_row(*(str(now.groups.get(state, 0)) for state in _STATES))
    return table


def _nodes(now: Snapshot) -> Table:
    table = whole_table("node", "runtimes", "prepare", "ready", "run", "evaluate", "free CPUs", "free MB", "last sign")
    for node in now.nodes:
        used = [
            f"{node['busy'].get(stage, 0)} of {node['slots'].get(stage, 0)}"
            for stage in ("prepare", "ready", "run", "evaluate")
        ]
        free = (f"{node['free_cpus']:g} of {node['cpus']:g}", f"{node['free_memory_mb']} of {node['memory_mb']}")
        sign = "draining" if node["draining"] else f"{max(0.0, now.at - node['seen_at']):.0f} s ago"
        table.add_row(escape(node["name"]), ", ".join(node["runtimes"]), *used, *free, sign)
    return table


def _queued(now: Snapshot) -> str:
    """How many rollouts wait, and for what."""
    queues = [queue for queue in now.queues if queue["waiting"]]
    if not queues:
        return "no rollout waits for a node"
    wants = (f"{queue['waiting']} ({', '.join(queue['runtimes'])}, {queue['cpus']:g} CPUs)" for queue in queues)
    return f"{sum(queue['waiting'] for queue in queues)} rollouts wait for a node: {'; '.join(wants)}"


def _titled(title: str, table: Table) -> Table:
    table.title, table.title_justify, table.title_style = title, "left", "dim"
    return table


# A service at one moment, put together from its metrics and its admin endpoints.


_COUNTED = {
    "recorded": ("verbatim_calls_total", {}),
    "refused": ("verbatim_refused_total", {}),
    "prompt_tokens": ("verbatim_tokens_total", {"kind": "prompt"}),
    "sampled_tokens": ("verbatim_tokens_total", {"kind": "sampled"}),
    "timed": ("verbatim_call_seconds_count", {"part": "own"}),
    "own_seconds": ("verbatim_call_seconds_sum", {"part": "own"}),
    "engine_seconds": ("verbatim_call_seconds_sum", {"part": "engine"}),
}
"""Totals since the process began, and where they are read."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`calls`: those of the process that answered, in totals and in flight. `groups`: by state. `sessions`: the newest open ones;
    `more`: there are others. `engines`, `nodes` and `queues` as the API shows them."""

    at: float
    url: str
    calls: dict[str, float]
    engines: list[dict[str, Any]]
    waiting: dict[str, int]
    groups: dict[str, int]
    sessions: list[dict[str, Any]]
    more: bool
    nodes: list[dict[str, Any]] = field(default_factory=list)
    queues: list[dict[str, Any]] = field(default_factory=list)

    def rate(self, of: str, before: Snapshot | None) -> float | None:
        """Per second since `before`; None without one, or when another process answered or it began anew."""
        if before is None or self.at <= before.at or self.calls[of] < before.calls[of]:
            return None
        return (self.calls[of] - before.calls[of]) / (self.at - before.at)


def look(control: Control, sessions: int) -> Snapshot:
    """The service now, with at most so many of its open sessions. Raises `Refusal`."""
    engines = control.get("/engines")
    page = Exposition(control.text("/metrics"))
    if "replicas" not in engines or "verbatim_calls_in_flight" not in page:
        raise Refusal(f"what answers at {control.url} is no Verbatim service (set VERBATIM_URL to where it is)")
    opened, nodes = control.get("/sessions", status="open", limit=sessions), control.get("/nodes")
    calls = {name: page.total(series, **labels) for name, (series, labels) in _COUNTED.items()}
    return Snapshot(
        at=time.time(),
        url=control.url,
        calls={**calls, "in_flight": page.total("verbatim_calls_in_flight")},
        engines=engines["replicas"],
        waiting=engines["waiting"],
        groups={state: int(number) for state, number in page.by("verbatim_store_groups", "state").items()},
        sessions=opened["sessions"],
        more=opened.get("cursor") is not None,
        nodes=nodes["nodes"],
        queues=nodes["queues"],
    )


# What a page of Prometheus text says, as far as it is read here: series and their values. Comments are left out.


_SERIES = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? +(\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_MEANT = {"n": "\n"}


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    value: float


class Exposition:
    def __init__(self, page: str) -> None:
        self._found: dict[str, list[Series]] = {}
        for line in page.splitlines():
            if (match := _SERIES.match(line)) is not None:
                name, labels, value = match.groups()
                self._found.setdefault(name, []).append(Series(_labels(labels or ""), float(value)))

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def series(self, name: str) -> Sequence[Series]:
        return self._found.get(name, ())

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels; 0 where there are none."""
        return sum(series.value for series in self.series(name) if labels.items() <= series.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The value of each series by what it has for the label."""
        return {series.labels.get(label, ""): series.value for series in self.series(name)}


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(lambda found: _MEANT.get(found[1], found[1]), value) for name, value in _LABEL.findall(text)}
