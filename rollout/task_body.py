"""The fields of a submitted task as they may be spelt in JSON. Outside data: pydantic, no unknown field, no coercion."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

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
from rollout.task_fields import Json, Name, Passed, Seconds, Variables

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
