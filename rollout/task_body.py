"""The fields of a submitted task as they may be spelt in JSON. Outside data: pydantic, no unknown field, no coercion."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import urlsplit

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from rollout.attempts import FailureRecord, RolloutState, Verdict
from rollout.evaluators.base import BadEvaluator
from rollout.harnesses import catalogue as harnesses
from rollout.harnesses.definition import MOST_BYTES, check_taken, parsed
from rollout.harnesses.prepared import HarnessError, PromptTooLong
from rollout.runtimes.base import BadRuntime
from rollout.store.base import Callback, Event, NodeState, TaskState, encode
from rollout.task import (
    AgentTimeout,
    Budgets,
    EchoPolicy,
    EvaluatorSpec,
    Exec,
    GroupRule,
    HarnessSpec,
    LostNode,
    McpServer,
    Network,
    PrepareStep,
    RuntimeSpec,
    Task,
    Upload,
)

MOST_SAMPLES = 10_000
TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
"""Short enough that the ids of its sessions, which say index and attempt too, are such."""

EXEC, RUNTIME, BUDGETS = Exec(""), RuntimeSpec(), Budgets()
TASK = Task("", "", HarnessSpec(""))
"""With the defaults of `rollout.task`, which are said only there."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _short(field: str) -> Callable[[Any], Any]:
    """A text stands for the object that has just this field."""
    return lambda given: {field: given} if isinstance(given, str) else given


Name = Annotated[str, Field(min_length=1, max_length=256)]


class UploadBody(Body):
    path: Name
    text: str | None = None
    base64: str | None = None
    source: str | None = None
    mode: Annotated[str, Field(pattern=r"^[0-7]{3,4}\z")] = "0644"
    unpack: bool = False

    @model_validator(mode="after")
    def _one_content(self) -> UploadBody:
        if sum(given is not None for given in (self.text, self.base64, self.source)) != 1:
            raise ValueError("just one of text, base64 and source says what is in it")
        self.upload()
        return self

    def upload(self) -> Upload:
        content = self.text.encode() if self.text is not None else None
        if self.base64 is not None:
            try:
                content = base64.b64decode(self.base64, validate=True)
            except binascii.Error as error:
                raise ValueError(f"base64: {error}") from error
        return Upload(self.path, content, self.source, int(self.mode, 8), self.unpack)


def _passable(text: str) -> str:
    if len(text.encode()) > MOST_BYTES - 256:
        raise ValueError(f"the system passes no argument or variable of more than {MOST_BYTES} bytes: upload it as a file")
    return text


Passed = Annotated[str, AfterValidator(_passable)]
"""What becomes an argument or, behind its name, a variable of a command."""

# What a field of a submitted task may hold, as types for pydantic.


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ExecBody(Body):
    command: Passed = Field(min_length=1)
    timeout_seconds: Seconds = EXEC.timeout_seconds
    retries: Annotated[int, Field(ge=0, le=100)] = EXEC.retries
    network: Network | None = EXEC.network


class StepBody(Body):
    upload: UploadBody | None = None
    exec: Annotated[ExecBody | None, BeforeValidator(_short("command"), str | ExecBody | None)] = None

    @model_validator(mode="after")
    def _one_step(self) -> StepBody:
        if (self.upload is None) == (self.exec is None):
            raise ValueError("a step is {upload} or {exec}")
        return self

    def step(self) -> PrepareStep:
        if self.upload is not None:
            return self.upload.upload()
        assert self.exec is not None, "it is one of the two"
        return Exec(**self.exec.model_dump())


class McpServerBody(Body):
    name: Name
    command: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    url: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> McpServerBody:
        if bool(self.command) == (self.url is not None):
            raise ValueError("a server is reached by its command or by its url")
        return self


def _writable(given: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(given, allow_nan=False)
    except ValueError as error:
        raise ValueError("numbers must be finite: the service takes no others, and answers could not be read") from error
    return given


Json = Annotated[dict[str, Any], AfterValidator(_writable)]
"""An object of which only its reader knows the fields."""


def _settable(given: dict[str, str]) -> dict[str, str]:
    for name, value in given.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be a variable")
    return given


Variables = Annotated[dict[str, Passed], AfterValidator(_settable)]


class HarnessBody(Body):
    name: Name = "custom"
    definition: Json | None = None
    env: Variables = Field(default_factory=dict)
    mcp_servers: list[McpServerBody] = Field(default_factory=list)
    skills: list[UploadBody] = Field(default_factory=list)
    install: bool = True

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if isinstance(given, dict) and "name" not in given:
            definition = given.get("definition")
            if definition is None:
                raise ValueError("a harness has a name or a definition")
            if isinstance(definition, dict) and isinstance(definition.get("name"), str):
                return {**given, "name": definition["name"]}
        return given

    def spec(self) -> HarnessSpec:
        servers = tuple(McpServer(server.name, tuple(server.command), server.env, server.url) for server in self.mcp_servers)
        skills = tuple(skill.upload() for skill in self.skills)
        return HarnessSpec(self.name, self.definition, self.env, servers, skills, self.install)


class RuntimeBody(Body):
    kind: Name = RUNTIME.kind
    image: Name | None = None
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] = RUNTIME.cpus
    memory_mb: Annotated[int, Field(ge=16)] = RUNTIME.memory_mb
    disk_mb: Annotated[int | None, Field(ge=1)] = None
    network: Network = RUNTIME.network
    workdir: Name | None = None
    options: Json = Field(default_factory=dict)

    def spec(self) -> RuntimeSpec:
        return RuntimeSpec(**self.model_dump())


class EvaluatorBody(Body):
    kind: Name
    options: Json = Field(default_factory=dict)
    fresh_runtime: bool | None = None
    """None: as the kind has it by itself."""
    runtime: Annotated[RuntimeBody | None, BeforeValidator(_short("kind"), str | RuntimeBody | None)] = None
    prepare: list[StepBody] = Field(default_factory=list)
    collect: list[Name] = Field(default_factory=lambda: ["."])

    def spec(self) -> EvaluatorSpec:
        return EvaluatorSpec(
            kind=self.kind,
            options=self.options,
            fresh_runtime=self.fresh_runtime is not False,
            runtime=self.runtime.spec() if self.runtime else None,
            prepare=tuple(step.step() for step in self.prepare),
            collect=tuple(self.collect),
        )


class BudgetsBody(Body):
    agent_seconds: Seconds = BUDGETS.agent
    prepare_seconds: Seconds = BUDGETS.prepare
    evaluation_seconds: Seconds = BUDGETS.evaluation
    total_seconds: Seconds = BUDGETS.total
    max_calls: Annotated[int | None, Field(ge=1, lt=2**31)] = BUDGETS.max_calls
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**53)] = BUDGETS.max_completion_tokens
    max_total_tokens: Annotated[int | None, Field(ge=1, lt=2**53)] = BUDGETS.max_total_tokens

    def budgets(self) -> Budgets:
        return Budgets(**{name.removesuffix("_seconds"): value for name, value in self.model_dump().items()})


class SamplingBody(Body):
    temperature: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None


class GroupBody(Body):
    policy: Literal["require_all", "allow_partial", "drop"] | None = None
    minimum: Annotated[int | None, Field(ge=1)] = None
    zero_variance: Literal["keep", "drop"] | None = None
    max_quarantined_share: Annotated[float | None, Field(ge=0, le=1)] = None

    def rule(self) -> GroupRule:
        return GroupRule(**self.model_dump())


def _named(task_id: Any) -> Any:
    if isinstance(task_id, str) and not TASK_ID.match(task_id):
        raise ValueError("1 to 100 of letters, digits, '.', '_' and '-', a letter or digit first")
    return task_id


def _callable_back(url: Any) -> Any:
    if isinstance(url, str):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https URL")
    return url


class TaskBody(Body):
    task_id: Annotated[str | None, BeforeValidator(_named)] = None
    instruction: str = Field(min_length=1)
    harness: Annotated[HarnessBody, BeforeValidator(_short("name"), str | HarnessBody)]
    evaluator: Annotated[EvaluatorBody | None, BeforeValidator(_short("kind"), str | EvaluatorBody | None)] = None
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = TASK.num_samples
    model: Name | None = None
    sampling: SamplingBody = Field(default_factory=SamplingBody)
    runtime: Annotated[RuntimeBody, BeforeValidator(_short("kind"), str | RuntimeBody)] = Field(default_factory=RuntimeBody)
    prepare: list[StepBody] = Field(default_factory=list)
    environment: Variables = Field(default_factory=dict)
    budgets: BudgetsBody = Field(default_factory=BudgetsBody)
    priority: Annotated[int, Field(ge=0, le=100)] = TASK.priority
    labels: dict[str, str] = Field(default_factory=dict)
    early_stop_usable_samples: Annotated[int | None, Field(ge=1)] = None
    max_attempts: Annotated[int, Field(ge=1, le=100)] = TASK.max_attempts
    on_lost_node: LostNode = TASK.on_lost_node
    on_agent_timeout: AgentTimeout = TASK.on_agent_timeout
    agent_timeout_reward: FiniteFloat = TASK.agent_timeout_reward
    group: GroupBody = Field(default_factory=GroupBody)
    echo_policy: EchoPolicy | None = None
    callback_url: Annotated[str | None, BeforeValidator(_callable_back)] = None
    metadata: Json = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> TaskBody:
        for field, count in (
            ("early_stop_usable_samples", self.early_stop_usable_samples),
            ("group.minimum", self.group.minimum),
        ):
            if count is not None and count > self.num_samples:
                raise ValueError(f"{field}: {count} of {self.num_samples} samples (num_samples) cannot be")
        return self

    def _group(self) -> GroupRule:
        """With an early stop the group is never whole: unless something else is said, the samples that were wanted are enough."""
        group, wanted = self.group.rule(), self.early_stop_usable_samples
        if wanted is not None and group.policy is None and group.minimum is None:
            return replace(group, policy="allow_partial", minimum=wanted)
        return group

    def task(self, task_id: str) -> Task:
        return Task(
            task_id=task_id,
            instruction=self.instruction,
            harness=self.harness.spec(),
            evaluator=self.evaluator.spec() if self.evaluator else None,
            num_samples=self.num_samples,
            model=self.model,
            sampling=self.sampling.model_dump(exclude_none=True),
            runtime=self.runtime.spec(),
            prepare=tuple(step.step() for step in self.prepare),
            environment=self.environment,
            budgets=self.budgets.budgets(),
            priority=self.priority,
            labels=self.labels,
            usable_samples=self.early_stop_usable_samples,
            max_attempts=self.max_attempts,
            on_lost_node=self.on_lost_node,
            on_agent_timeout=self.on_agent_timeout,
            agent_timeout_reward=self.agent_timeout_reward,
            group=self._group(),
            echo_policy=self.echo_policy,
            callback_url=self.callback_url,
            metadata=self.metadata,
        )


# The JSON body of `POST /tasks`, and the `Task` it makes. Here a task is checked whole; whatever is wrong names its field.
#
#     {"instruction": "…", "harness": "pi" | {"name": …, "definition": …, "env": …, "mcp_servers": […], "skills": […], "install": …},
#      "task_id"?, "num_samples"?, "model"?, "sampling"?, "runtime"? ("local" | {"kind": …, "image": …, "cpus": …, …}),
#      "prepare"? [{"upload": {"path": …, "text" | "base64" | "source": …}} | {"exec": "make" | {"command": …, "retries": …}}],
#      "environment"?, "evaluator"? ("pytest" | {"kind": …, "options": …, …}), "budgets"? {"agent_seconds": …, "max_calls": …, …},
#      "priority"?, "labels"?, "early_stop_usable_samples"?, "max_attempts"?, "on_lost_node"?, "on_agent_timeout"?, "agent_timeout_reward"?,
#      "group"? {"policy": …, "minimum": …, "zero_variance": …, "max_quarantined_share": …}, "echo_policy"?, "callback_url"?,
#      "metadata"?}
#
# What a field means, and what it is when left out, is said at the types of `rollout.task`.


SHOWN = 5
"""Problems of one body that its message lists."""

_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")


class BadTask(Exception):
    """What is wrong, with the field it is about first; `param` is that field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ChecksRuntime(Protocol):
    def check(self, spec: RuntimeSpec) -> None:
        """Raises `BadRuntime`."""


class ChecksEvaluator(Protocol):
    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        """Raises `BadEvaluator`."""


@dataclass(frozen=True, slots=True)
class Known:
    """The kinds of runtimes and evaluators that a task may name."""

    runtimes: Callable[[], Sequence[str]]
    runtime: Callable[[str], ChecksRuntime]
    evaluators: Callable[[], Sequence[str]]
    evaluator: Callable[[str], ChecksEvaluator]


def submitted(raw: bytes, known: Known) -> tuple[Task, bytes]:
    """The task and the digest of its body, which is the same for bodies that mean the same. Raises `BadTask`."""
    try:
        body = TaskBody.model_validate_json(raw)
        task = body.task(body.task_id or uuid.uuid4().hex)
        encode(task)
    except ValidationError as error:
        raise _bad(error) from error
    except (OverflowError, ValueError) as error:
        raise BadTask(f"the task cannot be stored: {error}") from error
    _check_harness(task.harness, task.instruction)
    _check_runtime(task.runtime, "runtime", known)
    if task.evaluator is not None:
        _check_evaluator(task.evaluator, task, known)
        task = replace(task, evaluator=_placed(task.evaluator, body, known))
    return task, digest(body)


def _placed(spec: EvaluatorSpec, body: TaskBody, known: Known) -> EvaluatorSpec:
    """With no runtime of its own where none is of use to its kind: it would be made for nothing, and half of a node be kept free for
    it."""
    kind = known.evaluator(spec.kind)
    said = body.evaluator.fresh_runtime if body.evaluator else None
    # What is to be prepared, or another image, was asked for to be worked in.
    asked_for = said or (said is None and bool(spec.prepare or spec.runtime))
    by_itself = said is None and getattr(kind, "fresh_runtime", True)
    fresh = getattr(kind, "needs_runtime", True) and (asked_for or by_itself)
    return replace(spec, fresh_runtime=fresh, runtime=spec.runtime if fresh else None)


def digest(body: BaseModel) -> bytes:
    """Of what differs from the defaults: a field that a later build adds changes no digest."""
    return hashlib.sha256(_CANONICAL.encode(body.model_dump(exclude_defaults=True))).digest()


def _check_harness(harness: HarnessSpec, instruction: str) -> None:
    try:
        if harness.definition is None and harness.name not in harnesses.names():
            raise _unknown("harness", harness.name, harnesses.names(), ", or give a definition")
        given = harnesses.load(harness.name) if harness.definition is None else parsed(harness.definition, harness.name)
        check_taken(given, harness)
        given.check_prompt(instruction)
    except PromptTooLong as error:
        raise BadTask(f"instruction: {error}", "instruction") from error
    except HarnessError as error:
        raise BadTask(f"harness: {error}", "harness") from error


def _check_runtime(spec: RuntimeSpec, field: str, known: Known) -> None:
    if spec.kind not in known.runtimes():
        raise _unknown(field, spec.kind, known.runtimes(), what="runtime")
    try:
        known.runtime(spec.kind).check(spec)
    except BadRuntime as error:
        raise BadTask(f"{field}: {error}", field) from error


def _check_evaluator(spec: EvaluatorSpec, task: Task, known: Known) -> None:
    if spec.kind not in known.evaluators():
        raise _unknown("evaluator", spec.kind, known.evaluators())
    if spec.runtime is not None:
        _check_runtime(spec.runtime, "evaluator.runtime", known)
    try:
        known.evaluator(spec.kind).check(spec, task)
    except BadEvaluator as error:
        raise BadTask(f"evaluator: {error}", "evaluator") from error


def _unknown(field: str, name: str, names: Sequence[str], rest: str = "", what: str = "") -> BadTask:
    return BadTask(f"{field}: there is no {what or field} {name!r}: choose one of {', '.join(names)}{rest}", field)


def _bad(error: ValidationError) -> BadTask:
    problems = [(".".join(map(str, each["loc"])), _said(each["type"], each["msg"])) for each in error.errors()]
    said = "; ".join(f"{where}: {message}" if where else message for where, message in problems[:SHOWN])
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return BadTask(said + more, problems[0][0] or None)


def _said(kind: str, message: str) -> str:
    return "there is no such field" if kind == "extra_forbidden" else message.removeprefix("Value error, ")


# Tasks, rollouts and nodes as the API shows them. Fields are named one by one: one that comes to be is not shown by itself.


def summary_as_wire(state: TaskState) -> dict[str, Any]:
    """A task in a list."""
    task, counts = state.task, state.counts
    return {
        "task_id": task.task_id,
        "status": state.status,
        "instruction": task.instruction,
        "harness": task.harness.name,
        "num_samples": task.num_samples,
        "priority": task.priority,
        "rollouts": dict(counts.by_status),
        "usable": counts.usable,
        "lacks": state.lacks,
        "created_at": state.created_at,
        "ended_at": state.ended_at,
        "callback": callback_as_wire(state.callback),
        "metadata": dict(task.metadata),
    }


def task_as_wire(state: TaskState) -> dict[str, Any]:
    """A task by itself: with `task`, the body it was submitted with, defaults filled in; of uploads only how long they are."""
    return summary_as_wire(state) | {"task": body_as_wire(state.task)}


def body_as_wire(task: Task) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "instruction": task.instruction,
        "harness": _harness(task.harness),
        "evaluator": None if task.evaluator is None else _evaluator(task.evaluator),
        "num_samples": task.num_samples,
        "model": task.model,
        "sampling": dict(task.sampling),
        "runtime": asdict(task.runtime),
        "prepare": [_step(step) for step in task.prepare],
        "environment": dict(task.environment),
        "budgets": _budgets(task.budgets),
        "priority": task.priority,
        "labels": dict(task.labels),
        "early_stop_usable_samples": task.usable_samples,
        "max_attempts": task.max_attempts,
        "on_lost_node": task.on_lost_node,
        "on_agent_timeout": task.on_agent_timeout,
        "agent_timeout_reward": task.agent_timeout_reward,
        "group": asdict(task.group),
        "echo_policy": task.echo_policy,
        "callback_url": task.callback_url,
        "metadata": dict(task.metadata),
    }


def rollout_as_wire(state: RolloutState) -> dict[str, Any]:
    return {
        "index": state.index,
        "status": state.status,
        "attempt": state.attempt,
        "node": state.node,
        "session_id": state.session_id,
        "calls": state.calls,
        "exit_code": state.exit_code,
        "verdict": _verdict(state.verdict),
        "failures": [_failure(failure) for failure in state.failures],
        "times": dict(state.times),
        "logs": state.logs,
    }


def event_as_wire(event: Event) -> dict[str, Any]:
    return {"kind": event.kind, "at": event.at, **event.data}


def node_as_wire(state: NodeState) -> dict[str, Any]:
    return asdict(state)


def callback_as_wire(callback: Callback | None) -> dict[str, Any] | None:
    return None if callback is None else asdict(callback)


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "status": verdict.status,
        "reward": verdict.reward,
        "per_call": dict(verdict.per_call),
        "per_branch": dict(verdict.per_branch),
        "feedback": verdict.feedback,
        "metadata": dict(verdict.metadata),
        "failure": None if verdict.failure is None else _failure(verdict.failure),
        "usable": verdict.usable,
    }


def _failure(record: FailureRecord) -> dict[str, str]:
    return {"failure": record.failure.value, "message": record.message, "look": record.look}


def _harness(harness: HarnessSpec) -> dict[str, Any]:
    return {
        "name": harness.name,
        "definition": harness.definition,
        "env": dict(harness.env),
        "mcp_servers": [asdict(server) for server in harness.mcp_servers],
        "skills": [_upload(skill) for skill in harness.skills],
        "install": harness.install,
    }


def _evaluator(evaluator: EvaluatorSpec) -> dict[str, Any]:
    return {
        "kind": evaluator.kind,
        "options": dict(evaluator.options),
        "fresh_runtime": evaluator.fresh_runtime,
        "runtime": None if evaluator.runtime is None else asdict(evaluator.runtime),
        "prepare": [_step(step) for step in evaluator.prepare],
        "collect": list(evaluator.collect),
    }


def _budgets(budgets: Budgets) -> Mapping[str, float | None]:
    return {name if name.startswith("max_") else f"{name}_seconds": most for name, most in asdict(budgets).items()}


def _step(step: PrepareStep) -> dict[str, Any]:
    return {"exec": asdict(step)} if isinstance(step, Exec) else {"upload": _upload(step)}


def _upload(upload: Upload) -> dict[str, Any]:
    held = {"source": upload.source} if upload.content is None else {"bytes": len(upload.content)}
    return {"path": upload.path, **held, "mode": f"{upload.mode:04o}", "unpack": upload.unpack}
