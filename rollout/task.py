"""A task: the one list of its fields, with their types, defaults and rules.

Everything else is read from these dataclasses: the JSON body of `POST /tasks`, its checks and messages, its schema in the OpenAPI
document, the task's form in the store, and its view in `GET /tasks/{id}`. A new field is one line here.

In the store a field has its Python name. In JSON it has its alias, where one is given; uploads and prepare steps are spelt as
`UploadBody` and `StepBody`, and a name alone stands for a harness, an evaluator or a runtime that needs nothing else. Instances made
in Python are not validated.
"""

from __future__ import annotations

import binascii
import json
import re
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    RootModel,
    SerializationInfo,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapSerializer,
    model_serializer,
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from rollout.harnesses.prepared import MOST_BYTES

MOST_SAMPLES = 10_000

_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
"""Short enough that the ids of the task's sessions, which append index and attempt, are valid too."""

_RULES = ConfigDict(extra="forbid", strict=True, validate_by_name=True, use_attribute_docstrings=True)

Network = Literal["proxy", "full"]
EchoPolicy = Literal["strict", "minted"]
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


def _check_finite(given: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
    if info.mode == "json":
        try:
            json.dumps(given, allow_nan=False)
        except ValueError as error:
            raise ValueError("numbers must be finite: JSON has no others, so answers could not be read") from error
    return given


def _check_task_id(given: Any) -> Any:
    if isinstance(given, str) and not _TASK_ID.match(given):
        raise ValueError("1 to 100 of letters, digits, '.', '_' and '-', a letter or digit first")
    return uuid.uuid4().hex if given is None else given


def _check_url(url: Any) -> Any:
    if isinstance(url, str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https URL")
    return url


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


def _in_json(body: Any) -> GetPydanticSchema:
    """Marks a type that JSON spells as `body`, a model whose `value()` is of the type."""

    def build(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        read = core_schema.no_info_after_validator_function(lambda given: given.value(), handler.generate_schema(body))
        return core_schema.json_or_python_schema(read, handler(source))

    return GetPydanticSchema(build)


def _build_sampling(_: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Checks a plain mapping as `Sampling`, without its nulls."""
    schema = handler.generate_schema(Sampling)
    return core_schema.no_info_after_validator_function(
        lambda given: {name: value for name, value in given.items() if value is not None}, schema
    )


Name = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Passed = Annotated[str, AfterValidator(_check_passable)]
"""Becomes an argument or, behind its name, a variable of a command."""
Variables = Annotated[Mapping[str, Passed], AfterValidator(_check_variables)]
Json = Annotated[Mapping[str, Any], AfterValidator(_check_finite)]
"""An object whose fields only its reader knows."""


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Upload:
    """A file or a folder (a tar archive to unpack) put into the runtime before the harness starts. Either `content` or `source` is
    given; `source` is a path that the node can read or an http(s) URL."""

    path: str
    """Absolute, or relative to the workdir."""
    content: bytes | None = None
    source: str | None = None
    mode: int = 0o644
    unpack: bool = False

    @model_serializer
    def _spell(self, info: SerializationInfo) -> dict[str, Any]:
        body = UploadBody.spell(self).model_dump(exclude_none=True, exclude_defaults=info.exclude_defaults)
        if info.context != OUTLINE or self.content is None:
            return body
        shown = {"path": self.path, "bytes": len(self.content)}
        return shown | {name: value for name, value in body.items() if name in ("mode", "unpack")}


class UploadBody(BaseModel):
    """An upload in JSON, with its content as text or as base64."""

    model_config = _RULES

    path: Name
    text: str | None = None
    base64: str | None = None
    source: str | None = None
    mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}\z")] = "0644"
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

    @classmethod
    def spell(cls, upload: Upload) -> Self:
        given: dict[str, Any] = {"source": upload.source}
        if upload.content is not None:
            try:
                given = {"text": upload.content.decode()}
            except UnicodeDecodeError:
                given = {"base64": b64encode(upload.content).decode()}
        return cls.model_construct(path=upload.path, mode=f"{upload.mode:04o}", unpack=upload.unpack, **given)


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Exec:
    """A shell line that must exit with code 0; it is tried `1 + retries` times."""

    command: Annotated[Passed, Field(min_length=1)]
    timeout_seconds: Seconds = 600.0
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    network: Network | None = None
    """None: the runtime's."""


class StepBody(BaseModel):
    """A prepare step in JSON: `{"upload": …}`, or `{"exec": …}` with a command or an object."""

    model_config = _RULES

    upload: Annotated[Upload, _in_json(UploadBody)] | None = None
    exec: Annotated[Exec | None, BeforeValidator(_expand("command"), str | Exec | None)] = None

    def value(self) -> Upload | Exec:
        step = self.upload or self.exec
        if step is None or (self.upload and self.exec):
            raise ValueError("a step is {upload} or {exec}")
        return step


def _spell_step(step: Any, spell: Callable[[Any], Any]) -> Any:
    return {"exec" if isinstance(step, Exec) else "upload": spell(step)}


PrepareStep = Upload | Exec
PrepareSteps = Annotated[tuple[Annotated[PrepareStep, _in_json(StepBody), WrapSerializer(_spell_step)], ...], Strict(False)]


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """Where a rollout runs. `kind` is a name of `rollout.runtimes.catalogue`, which says what `options` there are."""

    kind: Name = "local"
    image: Name | None = None
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] = 1.0
    memory_mb: Annotated[int, Field(ge=16)] = 1024
    disk_mb: Annotated[int | None, Field(ge=1)] = None
    """The most that the rollout may write, where the runtime can enforce it."""
    network: Network = "proxy"
    """proxy: only the session's base URL. full: whatever the node reaches."""
    workdir: Name | None = None
    """Where the harness works; None: the runtime's default."""
    options: Json = field(default_factory=dict)


RuntimeField = Annotated[RuntimeSpec, BeforeValidator(_expand("kind"), str | RuntimeSpec)]


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class McpServer:
    """A tool server configured in the harness: a command that speaks MCP on stdin and stdout, or a URL."""

    name: Name
    command: Annotated[tuple[str, ...], Strict(False)] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("a server is reached by its command or by its url")
        return self


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class HarnessSpec:
    """`name` of a built-in definition, or a whole `definition` as `rollout.harnesses.definition.parse` takes it."""

    name: Name = "custom"
    definition: Json | None = None
    env: Variables = field(default_factory=dict)
    mcp_servers: Annotated[tuple[McpServer, ...], Strict(False)] = ()
    skills: Annotated[tuple[Annotated[Upload, _in_json(UploadBody)], ...], Strict(False)] = ()
    """Folders (tar archives) of one skill each, put where the harness looks for skills."""
    install: bool = True
    """Whether to install a missing harness with the commands of its definition."""


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class EvaluatorSpec:
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
    collect: Annotated[tuple[Name, ...], Strict(False)] = (".",)
    """Paths of the agent's runtime, absolute or relative to its workdir, that the evaluator gets."""


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of one attempt. Seconds count only the rollout's own work: waiting for a slot, the service or trainers is free. The `max_`
    fields are enforced by the service on the attempt's session; None: no limit."""

    agent: Annotated[Seconds, Field(alias="agent_seconds")] = 1800.0
    """Seconds that the harness may run."""
    prepare: Annotated[Seconds, Field(alias="prepare_seconds")] = 1800.0
    evaluation: Annotated[Seconds, Field(alias="evaluation_seconds")] = 600.0
    total: Annotated[Seconds, Field(alias="total_seconds")] = 7200.0
    """Seconds from the first prepare step."""
    max_calls: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**53)] = None
    max_total_tokens: Annotated[int | None, Field(ge=1, lt=2**53)] = None

    @property
    def of_session(self) -> dict[str, int]:
        """The budgets of the session, by their names in `POST /sessions`."""
        names = ("max_calls", "max_completion_tokens", "max_total_tokens")
        return {name: most for name in names if (most := getattr(self, name)) is not None}


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class GroupRule:
    """Which of the task's rollouts a trainer gets; None: the service's setting."""

    policy: Literal["require_all", "allow_partial", "drop"] | None = None
    minimum: Annotated[int | None, Field(ge=1)] = None
    zero_variance: Literal["keep", "drop"] | None = None
    max_quarantined_share: Annotated[float | None, Field(ge=0, le=1)] = None
    """The largest share of sampled tokens that may be in quarantine for a rollout to be usable."""


@with_config(_RULES)
class Sampling(TypedDict, total=False):
    """Overrides that win over what the harness sends."""

    temperature: Annotated[float | None, Field(ge=0, allow_inf_nan=False)]
    top_p: Annotated[float | None, Field(gt=0, le=1)]
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)]
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)]
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)]


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Fork:
    """A recorded session that every rollout replays as far as the pivot `until`: see `replay` of `POST /sessions`."""

    session_id: Name
    until: Annotated[int, Field(ge=0)] | str | None = None
    on_divergence: Literal["live", "fail"] = "live"


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Lookahead:
    """Candidates for each reply, of which a chooser picks one: see `lookahead` of `POST /sessions`."""

    n: Annotated[int, Field(ge=2, le=64)]
    choose: Literal["logprob", "model", "http"] = "logprob"
    model: Name | None = None
    url: Annotated[str | None, BeforeValidator(_check_url, str | None)] = None
    roles: Annotated[tuple[Literal["main", "subagent", "compaction", "side"], ...], Strict(False)] = ()
    timeout_seconds: Annotated[Seconds, Field(le=3600)] = 60.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, chooser in (("model", "model"), ("url", "http")):
            if (getattr(self, name) is not None) != (self.choose == chooser):
                raise ValueError(f"{name}: goes with choose {chooser!r}, and that with it")
        return self


@with_config(_RULES)
@dataclass(frozen=True, slots=True)
class Task:
    """`num_samples` rollouts of one instruction; together they are a group, whose id is the task's."""

    task_id: Annotated[str, BeforeValidator(_check_task_id, str | None)] = field(
        default_factory=lambda: uuid.uuid4().hex, kw_only=True
    )
    instruction: Annotated[str, Field(min_length=1)]
    harness: Annotated[HarnessSpec, BeforeValidator(_name_harness, str | HarnessSpec)]
    evaluator: Annotated[EvaluatorSpec | None, BeforeValidator(_expand("kind"), str | EvaluatorSpec | None)] = None
    """None: rollouts get no reward here; a trainer gets them once a reward is posted."""
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    model: Name | None = None
    sampling: Annotated[Mapping[str, Any], GetPydanticSchema(_build_sampling)] = field(default_factory=dict)
    runtime: RuntimeField = RuntimeSpec()
    prepare: PrepareSteps = ()
    environment: Variables = field(default_factory=dict)
    """Variables of the harness and of the prepare steps."""
    budgets: Budgets = Budgets()
    priority: Annotated[int, Field(ge=0, le=100)] = 50
    """Higher goes first."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """A node must have all of them."""
    usable_samples: Annotated[int | None, Field(alias="early_stop_usable_samples", ge=1)] = None
    """Stop the remaining rollouts once so many ended usable."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Of one rollout, counting failures that are not the agent's (`rollout.attempts.RETRIED`)."""
    on_lost_node: LostNode = "retry"
    on_agent_timeout: AgentTimeout = "reward"
    agent_timeout_reward: FiniteFloat = 0.0
    """With `reward`: the reward of a rollout whose agent ran out of its own budget."""
    group: GroupRule = GroupRule()
    echo_policy: EchoPolicy | None = None
    """What to do with a reply that the harness replays edited; None: the service's setting."""
    fork: Fork | None = None
    lookahead: Lookahead | None = None
    callback_url: Annotated[str | None, BeforeValidator(_check_url, str | None)] = None
    metadata: Json = field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, count in (("early_stop_usable_samples", self.usable_samples), ("group.minimum", self.group.minimum)):
            if count is not None and count > self.num_samples:
                raise ValueError(f"{name}: {count} of {self.num_samples} samples (num_samples) cannot be")
        return self

    @property
    def demand(self) -> tuple[float, int]:
        """CPUs and MB of memory that a rollout takes on a node: its runtime's, and the evaluation's where that has its own."""
        cpus, memory_mb = self.runtime.cpus, self.runtime.memory_mb
        if self.evaluator is not None and self.evaluator.fresh_runtime is not False:
            fresh = self.evaluator.runtime or self.runtime
            cpus, memory_mb = cpus + fresh.cpus, memory_mb + fresh.memory_mb
        return cpus, memory_mb


class TaskBody(RootModel[Task]):
    """A task as the model of a request, for the OpenAPI document."""


PROBLEMS_SHOWN = 5
OUTLINE = "outline"
"""Context of a dump that gives the length of an upload in place of its content."""


@cache
def task_adapter() -> TypeAdapter[Task]:
    return TypeAdapter(Task)


def read_json(raw: bytes) -> Task:
    """Raises `pydantic.ValidationError`."""
    return task_adapter().validate_json(raw, by_alias=True, by_name=False)


def describe_problems(error: ValidationError) -> str:
    """Each problem with its place, the first `PROBLEMS_SHOWN` of them."""
    problems = error.errors()
    told = []
    for each in problems[:PROBLEMS_SHOWN]:
        unknown = each["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        message = "there is no such field" if unknown else each["msg"].removeprefix("Value error, ")
        told.append(": ".join([*filter(None, [".".join(map(str, each["loc"]))]), message]))
    if len(problems) > PROBLEMS_SHOWN:
        told.append(f"and {len(problems) - PROBLEMS_SHOWN} more")
    return "; ".join(told)


def dump_given(task: Task) -> dict[str, Any]:
    """The task's JSON body without fields at their default."""
    body: dict[str, Any] = task_adapter().dump_python(task, by_alias=True, exclude_defaults=True)
    return body


def dump_outline(task: Task) -> dict[str, Any]:
    """The task's JSON body with defaults filled in; of an upload only its length."""
    body: dict[str, Any] = task_adapter().dump_python(task, mode="json", by_alias=True, context=OUTLINE)
    return body


def settle_group(task: Task) -> Task:
    """With an early stop a group is never whole: unless the task says otherwise, the samples it wanted are enough."""
    if task.usable_samples is None or task.group.policy is not None or task.group.minimum is not None:
        return task
    return replace(task, group=replace(task.group, policy="allow_partial", minimum=task.usable_samples))
