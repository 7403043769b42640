"""A task: the one list of its fields, with their types, defaults and rules.

Everything else is read from these dataclasses: the JSON body of `POST /tasks`, its checks and messages, its schema in the OpenAPI
document, the task's form in the store, and its view in `GET /tasks/{id}`. A new field is one line here; one that its sessions have, too,
is a line of `contract.sessions.RunFields`.

In the store a field has its Python name. In JSON some are spelt otherwise (`spell`); uploads and prepare steps are spelt as `UploadBody`
and `StepBody`, and a name alone stands for a harness, an evaluator or a runtime that needs nothing else.
"""

from __future__ import annotations

import binascii
import re
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen

from contract.rules import (
    FINITE,
    LIST_OR_TUPLE,
    RULES,
    Checks,
    Expands,
    HttpUrl,
    InJson,
    Json,
    Name,
    Seconds,
    Wire,
    Writes,
    spell,
)
from contract.sessions import ForkRequest, GroupTerms, RunFields, SessionBudget

MOST_SAMPLES = 10_000
MOST_BYTES = 128 * 1024 - 1
"""The longest argument or environment variable Linux passes to a command (MAX_ARG_STRLEN), without its closing null byte."""
OUTLINE = "outline"
"""Context of a dump that gives the length of an upload in place of its content."""

_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
"""Short enough that the ids of the task's sessions, which append index and attempt, are valid too."""

Network = Literal["proxy", "full"]
LostNode = Literal["retry", "fail"]
AgentTimeout = Literal["reward", "evaluate", "fail"]


def _check_passable(text: str) -> str:
    if len(text.encode()) > MOST_BYTES - 256:
        raise ValueError(f"the system passes no argument or variable of more than {MOST_BYTES} bytes: upload it as a file")
    return text


def _check_variables(given: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in given.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be a variable")
    return given


def _check_mode(mode: str) -> str:
    if not re.match(r"0?[0-7]{3}\Z", mode):
        raise ValueError("should match pattern '^0?[0-7]{3}$', an octal number as chmod takes it")
    return mode


def _check_task_id(given: Any) -> Any:
    if isinstance(given, str) and not _TASK_ID.match(given):
        raise ValueError("1 to 100 of letters, digits, '.', '_' and '-', a letter or digit first")
    return uuid.uuid4().hex if given is None else given


def _expand(name: str) -> Callable[[Any], Any]:
    """A text stands for the object that has only this field."""
    return lambda given: {name: given} if isinstance(given, str) else given


def _name_harness(given: Any) -> Any:
    """The harness as an object with a name: its own, or its definition's."""
    if isinstance(given, dict) and "name" not in given:
        definition = given.get("definition")
        if definition is None:
            raise ValueError("a harness has a name or a definition")
        if isinstance(definition, dict) and isinstance(definition.get("name"), str):
            return {**given, "name": definition["name"]}
    return {"name": given} if isinstance(given, str) else given


Passed = Annotated[str, Checks(_check_passable)]
"""Becomes an argument or, behind its name, a variable of a command."""
Variables = Annotated[Mapping[str, Passed], Checks(_check_variables)]


@dataclass(frozen=True, slots=True)
class Upload(Wire):
    """A file or a folder (a tar archive to unpack) put into the runtime before the harness starts. Either `content` or `source` is
    given; `source` is a path that the node can read or an http(s) URL."""

    path: str
    """Absolute, or relative to the workdir."""
    content: bytes | None = None
    source: str | None = None
    mode: int = 0o644
    unpack: bool = False


@dataclass(frozen=True, slots=True)
class UploadBody(Wire):
    """An upload in JSON, with its content as text or as base64."""

    path: Name
    text: str | None = None
    base64: str | None = None
    source: str | None = None
    mode: Annotated[str, Checks(_check_mode, (("pattern", r"^0?[0-7]{3}\z"),))] = "0644"
    unpack: bool = False

    def value(self) -> Upload:
        if sum(given is not None for given in (self.text, self.base64, self.source)) != 1:
            raise ValueError("give exactly one of text, base64 and source")
        content = None if self.text is None else self.text.encode()
        if self.base64 is not None:
            try:
                content = b64decode(self.base64, validate=True)
            except binascii.Error as error:
                raise ValueError(f"base64: {error}") from error
        return Upload(self.path, content, self.source, int(self.mode, 8), self.unpack)


def _spell_upload(upload: Upload, info: Any) -> dict[str, Any]:
    """Its `UploadBody`, without nulls; in an outline with the length of the content in its place."""
    body: dict[str, Any] = {"path": upload.path}
    if upload.content is None:
        body |= {} if upload.source is None else {"source": upload.source}
    elif info.context == OUTLINE:
        body["bytes"] = len(upload.content)
    else:
        try:
            body["text"] = upload.content.decode()
        except UnicodeDecodeError:
            body["base64"] = b64encode(upload.content).decode()
    given = {"mode": f"{upload.mode:04o}", "unpack": upload.unpack}
    defaults = {"mode": "0644", "unpack": False} if info.exclude_defaults else {}
    return body | {name: value for name, value in given.items() if defaults.get(name) != value}


JsonUpload = Annotated[Upload, InJson(UploadBody), Writes(_spell_upload)]


@dataclass(frozen=True, slots=True)
class Exec(Wire):
    """A shell line that must exit with code 0; it is tried `1 + retries` times."""

    command: Annotated[Passed, MinLen(1)]
    timeout_seconds: Seconds = 600.0
    retries: Annotated[int, Ge(0), Le(100)] = 0
    network: Network | None = None
    """None: the runtime's."""


@dataclass(frozen=True, slots=True)
class StepBody(Wire):
    """A prepare step in JSON: `{"upload": …}`, or `{"exec": …}` with a command or an object."""

    upload: JsonUpload | None = None
    exec: Annotated[Exec | None, Expands(_expand("command"), str | Exec | None)] = None

    def value(self) -> Upload | Exec:
        step = self.upload or self.exec
        if step is None or (self.upload and self.exec):
            raise ValueError("a step is {upload} or {exec}")
        return step


def _spell_step(step: Upload | Exec, info: Any) -> dict[str, Any]:
    if isinstance(step, Upload):
        return {"upload": _spell_upload(step, info)}
    shown = {each.name: (getattr(step, each.name), each.default) for each in fields(step)}
    return {"exec": {name: value for name, (value, default) in shown.items() if not info.exclude_defaults or value != default}}


PrepareStep = Upload | Exec
PrepareSteps = Annotated[
    tuple[Annotated[PrepareStep, InJson(StepBody), Writes(_spell_step)], ...],
    LIST_OR_TUPLE,
]


@dataclass(frozen=True, slots=True)
class RuntimeSpec(Wire):
    """Where a rollout runs. `kind` is a name of `rollout.runtimes.catalogue`, which says what `options` there are."""

    kind: Name = "local"
    image: Name | None = None
    cpus: Annotated[Seconds, Le(4096)] = 1.0
    memory_mb: Annotated[int, Ge(16)] = 1024
    disk_mb: Annotated[int, Ge(1)] | None = None
    """The most that the rollout may write, where the runtime can enforce it."""
    network: Network = "proxy"
    """proxy: only the session's base URL. full: whatever the node reaches."""
    workdir: Name | None = None
    """Where the harness works; None: the runtime's default."""
    options: Json = field(default_factory=dict)


RuntimeField = Annotated[RuntimeSpec, Expands(_expand("kind"), str | RuntimeSpec)]


@dataclass(frozen=True, slots=True)
class McpServer(Wire):
    """A tool server configured in the harness: a command that speaks MCP on stdin and stdout, or a URL."""

    name: Name
    command: Annotated[tuple[str, ...], LIST_OR_TUPLE] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None

    def __post_init__(self) -> None:
        if bool(self.command) == (self.url is not None):
            raise ValueError("a server is reached by its command or by its url")


@dataclass(frozen=True, slots=True)
class HarnessSpec(Wire):
    """`name` of a built-in definition, or a whole `definition` as `rollout.harnesses.definition.parse` takes it."""

    name: Name = "custom"
    definition: Json | None = None
    env: Variables = field(default_factory=dict)
    mcp_servers: Annotated[tuple[McpServer, ...], LIST_OR_TUPLE] = ()
    skills: Annotated[tuple[JsonUpload, ...], LIST_OR_TUPLE] = ()
    """Folders (tar archives) of one skill each, put where the harness looks for skills."""
    install: bool = True
    """Whether to install a missing harness with the commands of its definition."""


@dataclass(frozen=True, slots=True)
class EvaluatorSpec(Wire):
    """`kind` is a name of `rollout.evaluators.catalogue`, which says what `options` there are."""

    kind: Name
    options: Json = field(default_factory=dict)
    fresh_runtime: bool | None = None
    """Whether to evaluate the collected files in a fresh runtime, or in the one that the agent left. None: a fresh one,
    unless the kind's default is otherwise; stored tasks have true or false."""
    runtime: RuntimeField | None = None
    """None: like the rollout's."""
    prepare: PrepareSteps = ()
    """Steps carried out in the fresh runtime before the collected files are put into it."""
    collect: Annotated[tuple[Name, ...], LIST_OR_TUPLE] = (".",)
    """Paths of the agent's runtime, absolute or relative to its workdir, that the evaluator gets."""


@dataclass(frozen=True, slots=True)
class Budgets(SessionBudget):
    """Limits of one attempt. Seconds count only the rollout's own work: waiting for a slot, the service or trainers is free. The `max_`
    fields are enforced by the service on the attempt's session; None: no limit."""

    __pydantic_config__ = RULES | spell(
        agent="agent_seconds", prepare="prepare_seconds", evaluation="evaluation_seconds", total="total_seconds"
    )

    agent: Seconds = 1800.0
    """Seconds that the harness may run."""
    prepare: Seconds = 1800.0
    evaluation: Seconds = 600.0
    total: Seconds = 7200.0
    """Seconds from the first prepare step."""


@dataclass(frozen=True, slots=True)
class TaskGroup(GroupTerms):
    """Which of the task's rollouts a trainer gets; None: the service's setting."""

    __pydantic_config__ = RULES | spell(group_policy="policy", group_minimum="minimum")


@dataclass(frozen=True, slots=True)
class Task(RunFields):
    """`num_samples` rollouts of one instruction; together they are a group, whose id is the task's."""

    __pydantic_config__ = RULES | spell(usable_samples="early_stop_usable_samples")

    task_id: Annotated[str, Expands(_check_task_id, str | None)] = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True)
    instruction: Annotated[str, MinLen(1)]
    harness: Annotated[HarnessSpec, Expands(_name_harness, str | HarnessSpec)]
    evaluator: Annotated[EvaluatorSpec | None, Expands(_expand("kind"), str | EvaluatorSpec | None)] = None
    """None: rollouts get no reward here; a trainer gets them once a reward is posted."""
    num_samples: Annotated[int, Ge(1), Le(MOST_SAMPLES)] = 1
    model: Name | None = None
    runtime: RuntimeField = RuntimeSpec()
    prepare: PrepareSteps = ()
    environment: Variables = field(default_factory=dict)
    """Variables of the harness and of the prepare steps."""
    budgets: Budgets = Budgets()
    priority: Annotated[int, Ge(0), Le(100)] = 50
    """Higher goes first."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """A node must have all of them."""
    usable_samples: Annotated[int, Ge(1)] | None = None
    """Stop the remaining rollouts once so many ended usable."""
    max_attempts: Annotated[int, Ge(1), Le(100)] = 3
    """Of one rollout, counting failures that are not the agent's (`rollout.attempts.RETRIED`)."""
    on_lost_node: LostNode = "retry"
    on_agent_timeout: AgentTimeout = "reward"
    agent_timeout_reward: Annotated[float, FINITE] = 0.0
    """With `reward`: the reward of a rollout whose agent ran out of its own budget."""
    group: TaskGroup = TaskGroup()
    fork: ForkRequest | None = None
    """A recorded session that every rollout replays as far as the pivot: see `replay` of `POST /sessions`."""
    callback_url: HttpUrl | None = None
    metadata: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        minimum = ("group.minimum", self.group.group_minimum)
        for name, count in (("early_stop_usable_samples", self.usable_samples), minimum):
            if count is not None and count > self.num_samples:
                raise ValueError(f"{name}: {count} of {self.num_samples} samples (num_samples) cannot be")

    @property
    def demand(self) -> tuple[float, int]:
        """CPUs and MB of memory that a rollout takes on a node: its runtime's, and the evaluation's where that has its own."""
        cpus, memory_mb = self.runtime.cpus, self.runtime.memory_mb
        if self.evaluator is not None and self.evaluator.fresh_runtime is not False:
            fresh = self.evaluator.runtime or self.runtime
            cpus, memory_mb = cpus + fresh.cpus, memory_mb + fresh.memory_mb
        return cpus, memory_mb

    def session_fields(self, index: int) -> dict[str, Any]:
        """The fields of `POST /sessions` that a rollout's session has from its task, as JSON takes them: all but its id and its role
        rules."""
        parts = ((self, RunFields), (self.group, GroupTerms), (self.budgets, SessionBudget))
        given = {each.name: getattr(part, each.name) for part, kind in parts for each in fields(kind)}
        return {
            **given,
            "lookahead": None if self.lookahead is None else asdict(self.lookahead),
            "replay": None if self.fork is None else asdict(self.fork),
            "task_id": self.task_id,
            "group_id": self.task_id,
            "group_size": self.num_samples,
            # Other sessions may not replace failed members.
            "group_replacements": False,
            "metadata": {**self.metadata, "rollout": index, "harness": self.harness.name},
        }
