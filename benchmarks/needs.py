"""What a run of many sessions needs, and where the design ends: the arithmetic, from the costs of one call, session and token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Run:
    """Every session has `turns` calls, one each `turn_seconds`, and `context_tokens` at its end."""

    sessions: int
    turns: int = 50
    context_tokens: int = 64_000
    sampled_tokens: int = 256
    """Sampled per turn; the rest of what a turn adds is prompt."""
    turn_seconds: float = 30.0
    """From one call of a session to its next: sampling, and what the agent does in between."""

    @property
    def calls_per_second(self) -> float:
        return self.sessions / self.turn_seconds

    @property
    def sessions_per_second(self) -> float:
        """That end, and are followed by new ones."""
        return self.calls_per_second / self.turns

    @property
    def prompt_tokens(self) -> float:
        """Of a call, in the mean: the context grows by the same each turn, and a call's prompt lacks what it samples itself."""
        return self.context_tokens * (self.turns + 1) / (2 * self.turns) - self.sampled_tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured (see `benchmarks.capacity.MEASURED`), then what is assumed of machines and limits."""

    cpu_ms_per_call: float
    cpu_ms_per_thousand_tokens: float
    text_bytes_per_token: float
    redis_cpu_ms_per_session: float
    redis_cpu_ms_per_call: float
    redis_cpu_ms_per_thousand_tokens: float
    redis_bytes_per_session: float
    redis_bytes_per_call: float
    redis_bytes_per_token: float
    redis_wire_bytes_per_call: float
    redis_wire_bytes_per_token: float
    file_bytes_per_call: float
    file_bytes_per_token: float
    id_bytes: float = 6.0
    """A token id as JSON, with its comma."""
    ids_sent: float = 3.0
    """How often a call's ids go over the wire between proxy and engine: rendered, sampled after, interpreted. The plugin sends them once,
    in four bytes each."""
    sampled_bytes: float = 80.0
    """A sampled token in an engine's answer: id, logprob and their names."""
    row_bytes: float = 9.0
    """A token in a leased row: id, mask, logprob."""
    kept: float = 2.0
    """Sessions in the store for each that goes on, itself included: the others wait for their trainer."""
    busy: float = 0.6
    """How much of a core may be used where calls are not to wait for each other."""
    cores: int = 32
    """Of a machine of proxies; each process uses one."""
    nic_gbit: float = 25.0
    """Of every machine, each way."""
    primary_gib: float = 32.0
    """That one Redis primary may hold; a fork for its file needs as much again."""
    most_primaries: int = 500
    """Of one Redis Cluster: its documentation recommends at most about 1,000 nodes, half of them replicas."""
    most_clients: int = 10_000
    """Connections that one Redis takes (its default)."""
    clients_per_process: float = 4.0
    """Connections of one proxy process to each primary."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a run needs. Bytes and bits are per second; `share_of_*` are of what there can be at most, 1.0 being all of it."""

    run: Run
    cpu_cores: float
    processes: int
    harness_gbit: float
    engine_gbit: float
    redis_gib: float
    redis_cores: float
    redis_mb: float
    file_mb: float
    trainer_gbit: float
    machines_for_cpu: float
    machines_for_network: float
    primaries_for_memory: float
    primaries_for_cpu: float
    share_of_cluster: float
    share_of_first_primary: float
    share_of_clients: float

    @property
    def machines(self) -> int:
        return math.ceil(max(self.machines_for_cpu, self.machines_for_network))

    @property
    def primaries(self) -> int:
        return math.ceil(max(self.primaries_for_memory, self.primaries_for_cpu))

    @property
    def first_bottleneck(self) -> str:
        """What is used up first: what more machines or primaries have to be bought for."""
        wanted = {
            "proxies' cores": self.machines_for_cpu,
            "proxies' network": self.machines_for_network,
            "Redis memory": self.primaries_for_memory,
            "Redis cores": self.primaries_for_cpu,
        }
        return max(wanted, key=lambda name: wanted[name])


def need(run: Run, cost: Costs) -> Need:
    calls, new = run.calls_per_second, run.context_tokens / run.turns
    cores = calls * (cost.cpu_ms_per_call + cost.cpu_ms_per_thousand_tokens * run.prompt_tokens / 1000) / 1000
    processes = cores / cost.busy
    text = run.prompt_tokens * cost.text_bytes_per_token
    harness = _gbit(calls * (text + run.sampled_tokens * cost.text_bytes_per_token))
    engine = _gbit(calls * (text + run.prompt_tokens * cost.id_bytes * cost.ids_sent + run.sampled_tokens * cost.sampled_bytes))
    each = (
        cost.redis_bytes_per_session + run.turns * cost.redis_bytes_per_call + run.context_tokens * cost.redis_bytes_per_token
    )
    memory = run.sessions * cost.kept * each / GIB
    of_calls = calls * (cost.redis_cpu_ms_per_call + new / 1000 * cost.redis_cpu_ms_per_thousand_tokens) / 1000
    of_sessions = run.sessions_per_second * cost.redis_cpu_ms_per_session / 1000
    trainer = _gbit(run.sessions_per_second * run.context_tokens * cost.row_bytes)
    primaries_for_memory = memory / cost.primary_gib
    primaries_for_cpu = (of_calls + of_sessions) / cost.busy
    return Need(
        run=run,
        cpu_cores=cores,
        processes=math.ceil(processes),
        harness_gbit=harness,
        engine_gbit=engine,
        redis_gib=memory,
        redis_cores=of_calls + of_sessions,
        redis_mb=calls * (cost.redis_wire_bytes_per_call + new * cost.redis_wire_bytes_per_token) / 1e6,
        file_mb=calls * (cost.file_bytes_per_call + new * cost.file_bytes_per_token) / 1e6,
        trainer_gbit=trainer,
        machines_for_cpu=processes / cost.cores,
        # Both sides go through the same card; what comes in from one goes out to the other.
        machines_for_network=(harness + engine) / cost.nic_gbit / cost.busy,
        primaries_for_memory=primaries_for_memory,
        primaries_for_cpu=primaries_for_cpu,
        share_of_cluster=max(primaries_for_memory, primaries_for_cpu) / cost.most_primaries,
        # The list of sessions and all of delivery lie in one slot each, on the same primary if it comes to the worst.
        share_of_first_primary=of_sessions / cost.busy,
        share_of_clients=processes * cost.clients_per_process / cost.most_clients,
    )


def _gbit(bytes_per_second: float) -> float:
    return bytes_per_second * 8 / 1e9


ENDS: Mapping[str, tuple[str, str]] = {
    "share_of_cluster": (
        "one Redis Cluster has no more primaries",
        "Larger primaries or a shorter retention move that end; beyond it, a second service with a Redis of its own.",
    ),
    "share_of_first_primary": (
        "delivery lies in one slot, and one core serves it",
        "What counts is how many sessions end per second, so a faster core moves that end in proportion, and so do longer sessions; beyond "
        "it, a second service with a Redis and trainers of its own. One service would need its groups divided among several slots, "
        "and every lease to ask all of them: that is not built.",
    ),
    "share_of_clients": (
        "a Redis takes no more connections",
        "A higher `maxclients` moves that end; beyond it, a second service with a Redis of its own.",
    ),
}
"""What cannot be had more of, why, and what moves that end."""


@dataclass(frozen=True, slots=True)
class End:
    sessions: int
    reason: str
    remedy: str


def end(run: Run, cost: Costs) -> End:
    """The number of sessions at which the design gives out, and over what: nothing that is proportional to them can be added."""
    used = need(replace(run, sessions=1_000_000), cost)
    name = max(ENDS, key=lambda each: float(getattr(used, each)))
    share: float = getattr(used, name)
    return End(int(1_000_000 / share), *ENDS[name])
