"""A task as it was submitted: values only. `rollout.task_body` makes one from JSON and checks it; the store keeps it as msgpack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Network = Literal["proxy", "full"]
EchoPolicy = Literal["strict", "minted"]
LostNode = Literal["retry", "fail"]
AgentTimeout = Literal["reward", "evaluate", "fail"]


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """Where a rollout runs. `kind` is a name of `rollout.runtimes.catalogue`; `options` belong to it."""

    kind: str = "local"
    image: str | None = None
    cpus: float = 1.0
    memory_mb: int = 1024
    disk_mb: int | None = None
    """Greatest size of what it writes, where the runtime can hold it to that."""
    network: Network = "proxy"
    """proxy: it reaches the session's base URL and nothing else. full: as the node does."""
    workdir: str | None = None
    """Where the harness works; None: the runtime's own choice."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Upload:
    """A file or a folder (a tar archive that is unpacked) put into the runtime before the harness starts. Just one of `content`
    and `source` is given; `source` is a path that the node can read or an http(s) URL."""

    path: str
    """Absolute, or relative to the workdir."""
    content: bytes | None = None
    source: str | None = None
    mode: int = 0o644
    unpack: bool = False


@dataclass(frozen=True, slots=True)
class Exec:
    """A shell line that must end with exit code 0; it is tried `1 + retries` times."""

    command: str
    timeout_seconds: float = 600.0
    retries: int = 0
    network: Network | None = None
    """None: the runtime's own."""


PrepareStep = Upload | Exec


@dataclass(frozen=True, slots=True)
class McpServer:
    """A tool server that the harness is told of: a command that speaks on stdin and stdout, or a URL."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None


@dataclass(frozen=True, slots=True)
class HarnessSpec:
    """`name` of a built-in definition, or `definition`, a whole one as `rollout.harnesses.definition.parsed` takes it."""

    name: str
    definition: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    mcp_servers: tuple[McpServer, ...] = ()
    skills: tuple[Upload, ...] = ()
    """Folders (tar archives) that each hold one skill; put where the harness looks for them."""
    install: bool = True
    """Whether a harness that is missing is installed by its definition's lines."""


@dataclass(frozen=True, slots=True)
class EvaluatorSpec:
    """`kind` is a name of `rollout.evaluators.catalogue`; `options` belong to it."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fresh_runtime: bool = True
    """Whether it works in a runtime of its own, into which the collected files are put, or in the one the agent left."""
    runtime: RuntimeSpec | None = None
    """None: as the rollout's own."""
    prepare: tuple[PrepareStep, ...] = ()
    """What is put into the fresh runtime before the collected files."""
    collect: tuple[str, ...] = (".",)
    """Paths of the agent's runtime, absolute or relative to its workdir, that reach the evaluator."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Four times in seconds: `agent` is the harness's alone; `total` counts from the first prepare step, without what is waited for: a
    slot of the node, the service, trainers that are behind. And what the session of each attempt may spend, which the service holds;
    None: any number."""

    agent: float = 1800.0
    prepare: float = 1800.0
    evaluation: float = 600.0
    total: float = 7200.0
    max_calls: int | None = None
    max_completion_tokens: int | None = None
    max_total_tokens: int | None = None

    @property
    def of_session(self) -> dict[str, int]:
        """The budgets that a session is created with, by their names in `POST /sessions`."""
        spending = {
            "max_calls": self.max_calls,
            "max_completion_tokens": self.max_completion_tokens,
            "max_total_tokens": self.max_total_tokens,
        }
        return {name: most for name, most in spending.items() if most is not None}


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What a trainer gets of the task's rollouts; None of a field: the service's setting."""

    policy: Literal["require_all", "allow_partial", "drop"] | None = None
    minimum: int | None = None
    zero_variance: Literal["keep", "drop"] | None = None
    max_quarantined_share: float | None = None
    """The most of its sampled tokens that a rollout may have in quarantine to be usable."""


@dataclass(frozen=True, slots=True)
class Task:
    """`num_samples` rollouts of one instruction; they are one group, whose id is the task's."""

    task_id: str
    instruction: str
    harness: HarnessSpec
    evaluator: EvaluatorSpec | None = None
    """None: rollouts get no reward from here; a trainer gets them once somebody posts one."""
    num_samples: int = 1
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    runtime: RuntimeSpec = RuntimeSpec()
    prepare: tuple[PrepareStep, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the harness and of the prepare steps."""
    budgets: Budgets = Budgets()
    priority: int = 50
    """0 to 100; greater goes first."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """A node must have all of them."""
    usable_samples: int | None = None
    """Early stop: once so many rollouts ended usable, the others are not run to their end."""
    max_attempts: int = 3
    """Of one rollout, over failures that are nothing of the agent's (`failures.RETRIED`)."""
    on_lost_node: LostNode = "retry"
    on_agent_timeout: AgentTimeout = "reward"
    agent_timeout_reward: float = 0.0
    """With `reward`: what a rollout gets whose agent ran out of its own budget."""
    group: GroupRule = GroupRule()
    echo_policy: EchoPolicy | None = None
    """What becomes of a reply that the harness replays with an edit; None: the service's setting."""
    callback_url: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def demand(self) -> tuple[float, int]:
        """CPUs and MB of memory that a rollout takes up on a node: of its runtime, and of the evaluation's where that is another."""
        cpus, memory_mb = self.runtime.cpus, self.runtime.memory_mb
        if self.evaluator is not None and self.evaluator.fresh_runtime:
            fresh = self.evaluator.runtime or self.runtime
            cpus, memory_mb = cpus + fresh.cpus, memory_mb + fresh.memory_mb
        return cpus, memory_mb
