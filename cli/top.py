"""`verbatim top`: a live view of a running service in the terminal."""

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
from cli.options import ServiceUrl
from cli.refusal import CommandError
from cli.sessions import sessions_table
from cli.tables import make_table

if TYPE_CHECKING:
    from rich.live import Live

    from cli.control import CommandClient


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot, with totals instead of rates, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as a JSON object and exit.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="The refresh interval.")] = 2.0,
    sessions: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="How many open sessions to show, newest first.")
    ] = 20,
    url: ServiceUrl = None,
) -> None:
    """Watch calls, engines and their weights, queues, groups and leases, nodes, and open sessions live. Ctrl-C ends it.

    Reads /metrics and the admin API. If several processes or machines serve one address, calls
    in flight and waiting are those of the process that answers; groups, nodes and sessions are those of the whole service.

    \b
    verbatim top
    verbatim top --once --json | jq .engines
    """
    from cli.control import CommandClient
    from cli.tables import standard_output

    control = CommandClient(url)
    # Before anything is drawn, so that a wrong address or token is reported as one sentence.
    first = take_snapshot(control, sessions)
    if as_json:
        typer.echo(json.dumps(asdict(first)))
    elif once:
        standard_output().print(render(first, None))
    else:
        _watch(control, first, every, sessions)


def _watch(control: CommandClient, first: Snapshot, every: float, sessions: int) -> None:
    """Refresh until Ctrl-C or SIGTERM, then restore the terminal."""
    from rich.live import Live

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Live(render(first, None), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            live.refresh()
            _follow(live, control, first, every, sessions)
    except KeyboardInterrupt:
        pass


def _follow(live: Live, control: CommandClient, now: Snapshot, every: float, sessions: int) -> None:
    while True:
        time.sleep(every)
        try:
            before, now = now, take_snapshot(control, sessions)
            shown = render(now, before)
        except CommandError as refusal:
            # The service may be restarting: show the last snapshot under the reason.
            shown = render(now, None, str(refusal))
        live.update(shown, refresh=True)


_STATES = ("opened", "filling", "ready", "leased", "acked", "stale", "dropped", "dead")


def render(now: Snapshot, before: Snapshot | None, trouble: str = "") -> RenderableType:
    """One screen. Rates are relative to the snapshot `before`; `trouble` says why there is no newer one."""
    parts: list[RenderableType] = [_head(now, before)]
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    parts += [
        _set_title("engines", replicas_table(now.engines)),
        Text(_describe_waiting(now)),
        _set_title("groups", _groups(now)),
    ]
    if now.nodes or now.queues:
        parts += [_set_title("nodes", _nodes(now)), Text(_describe_queues(now))]
    more = ", the newest of more" if now.more else ""
    return Group(*parts, _set_title(f"{len(now.sessions)} open sessions{more}", sessions_table(now.sessions)))


def _head(now: Snapshot, before: Snapshot | None) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(now.at))
    parts = [f"{now.url}  {clock}", f"{now.calls['in_flight']:.0f} calls in flight"]
    for name, what in (("recorded", "calls"), ("refused", "refused"), ("sampled_tokens", "tokens sampled")):
        rate = now.rate(name, before)
        parts.append(f"{now.calls[name]:.0f} {what}" if rate is None else f"{rate:.1f} {what}/s")
    own, engine, timed = (now.rate(name, before) for name in ("own_seconds", "engine_seconds", "timed"))
    if timed and own is not None and engine is not None:
        parts.append(f"{own / timed * 1000:.1f} ms own, {engine / timed:.2f} s engine per call")
    return Text("  |  ".join(parts), style="bold")


def _describe_waiting(now: Snapshot) -> str:
    waiting = {policy: calls for policy, calls in now.waiting.items() if calls}
    if not waiting:
        return "no call is waiting for an engine"
    return ", ".join(f"{calls} calls are waiting for {policy or 'the default policy'}" for policy, calls in waiting.items())


def _groups(now: Snapshot) -> Table:
    table = make_table(*_STATES)
    table.add_row(*(str(now.groups.get(state, 0)) for state in _STATES))
    return table


def _nodes(now: Snapshot) -> Table:
    table = make_table("node", "runtimes", "prepare", "ready", "run", "evaluate", "free CPUs", "free MB", "last seen")
    for node in now.nodes:
        used = [
            f"{node['busy'].get(stage, 0)} of {node['slots'].get(stage, 0)}"
            for stage in ("prepare", "ready", "run", "evaluate")
        ]
        free = (f"{node['free_cpus']:g} of {node['cpus']:g}", f"{node['free_memory_mb']} of {node['memory_mb']}")
        sign = "draining" if node["draining"] else f"{node['silent_seconds']:.0f} s ago"
        table.add_row(escape(node["name"]), ", ".join(node["runtimes"]), *used, *free, sign)
    return table


def _describe_queues(now: Snapshot) -> str:
    queues = [queue for queue in now.queues if queue["waiting"]]
    if not queues:
        return "no rollout is waiting for a node"
    wants = (f"{queue['waiting']} ({', '.join(queue['runtimes'])}, {queue['cpus']:g} CPUs)" for queue in queues)
    return f"{sum(queue['waiting'] for queue in queues)} rollouts are waiting for a node: {'; '.join(wants)}"


def _set_title(title: str, table: Table) -> Table:
    table.title, table.title_justify, table.title_style = title, "left", "dim"
    return table


_COUNTED = {
    "recorded": ("verbatim_calls_total", {}),
    "refused": ("verbatim_refused_total", {}),
    "prompt_tokens": ("verbatim_tokens_total", {"kind": "prompt"}),
    "sampled_tokens": ("verbatim_tokens_total", {"kind": "sampled"}),
    "timed": ("verbatim_call_seconds_count", {"part": "own"}),
    "own_seconds": ("verbatim_call_seconds_sum", {"part": "own"}),
    "engine_seconds": ("verbatim_call_seconds_sum", {"part": "engine"}),
}
"""Totals since the process started: the metric and labels of each."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The service at one moment. `calls` are of the process that answered; `groups` count by state; `sessions` are the newest open
    ones, `more` says there are others; `engines`, `nodes` and `queues` are in the API's shape."""

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
        """Per second since `before`; None without one, or if another process answered or it restarted."""
        if before is None or self.at <= before.at or self.calls[of] < before.calls[of]:
            return None
        return (self.calls[of] - before.calls[of]) / (self.at - before.at)


def take_snapshot(control: CommandClient, sessions: int) -> Snapshot:
    """The service now, with at most `sessions` of its open sessions. Raises `CommandError`."""
    engines = control.get("/engines")
    page = Exposition(control.fetch("/metrics").text)
    if "replicas" not in engines or "verbatim_calls_in_flight" not in page:
        raise CommandError(f"what answers at {control.url} is no Verbatim service (set VERBATIM_URL to where it is)")
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


# Prometheus text format


_SERIES = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? +(\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    value: float


class Exposition:
    """The series of a page in Prometheus text format."""

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
        """The sum of the series that have these labels; 0 if there are none."""
        return sum(series.value for series in self.series(name) if labels.items() <= series.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The value of each series by its value of `label`."""
        return {series.labels.get(label, ""): series.value for series in self.series(name)}


def _labels(text: str) -> dict[str, str]:
    return {
        name: _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], value) for name, value in _LABEL.findall(text)
    }
