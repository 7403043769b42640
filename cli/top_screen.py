"""What `verbatim top` shows of a snapshot: one screen, the rates those since the snapshot before."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.engines import replicas_table
from cli.sessions import sessions_table
from cli.snapshot import Snapshot
from cli.tables import whole_table

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
