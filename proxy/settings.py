"""The settings of one process. The environment is read here and nowhere else.

Set any field with `VERBATIM_<NAME>`, for example `VERBATIM_KEEPALIVE_SECONDS=5`. Lists and mappings in the environment are JSON. A
field marked `Flag` is also a flag of `verbatim serve`; its type, default and text stand here alone. Traces have OpenTelemetry's variables.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from contract.plugins import UnknownPlugin
from contract.sessions import EchoPolicy
from proxy.addresses import AllowList
from proxy.auth import Role as TokenRole
from proxy.auth import check_token, is_loopback, token_in, tokens_in
from proxy.builders import plugins as builders
from proxy.engine.kinds import plugins as engine_kinds
from proxy.engine.wire.tls import build_client_tls
from proxy.scoring.scorers import AnyScorer, ScorerName, ScoringLimits
from reconstruct.extras import how_to_install
from reconstruct.roles import RoleRule

TrainedRole = Literal["main", "subagent", "compaction", "side", "inferred_side"]
LogprobMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
TrainedMode = Literal["raw", "processed", "masked", "unknown"]


def _check_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"the expression {text!r} is broken: {error}") from error
    return text


Expression = Annotated[str, AfterValidator(_check_expression)]


@dataclass(frozen=True, slots=True)
class Flag:
    """Marks a setting that is also a flag of `verbatim serve`."""

    metavar: str = ""
    """What its help calls the value. Empty: the values that there are, or none."""


def find_collector() -> str | None:
    """The variable of OpenTelemetry that names a collector of traces; None where there is none, or traces are turned off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    return next((name for name in _COLLECTORS if os.environ.get(name)), None)


_COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class GivenToken(BaseModel, frozen=True):
    """A token as it is given: by itself, in a file, or both. In the environment the file's variable ends in `_FILE`."""

    token: SecretStr | None = None
    file: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_one(cls, given: Any) -> Any:
        return {"token": given} if given is None or isinstance(given, (str, SecretStr)) else given

    @field_validator("token")
    @classmethod
    def _check_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            check_token(token.get_secret_value())
        return token

    @field_validator("file")
    @classmethod
    def _check_file(cls, path: Path | None) -> Path | None:
        if path is not None and not tokens_in(path):
            raise ValueError("there is no token in it")
        return path

    def read(self) -> list[str]:
        """Every token, that given by itself first. Raises ValueError for a file that cannot be read any more."""
        own = [self.token.get_secret_value()] if self.token else []
        return own + (tokens_in(self.file) if self.file is not None else [])


class Kept(BaseModel, frozen=True, extra="forbid"):
    """What is recorded for the trainer and no harness sees."""

    top_logprobs: int = Field(default=0, ge=0, le=128)
    prompt_logprobs: bool = False
    routed_experts: bool = False


class EngineRouter(BaseModel, frozen=True, extra="forbid"):
    """How a router in front of engines learns which session a request is of, and that one is over."""

    session_header: str = Field(default="", pattern=r"^[A-Za-z0-9-]*$")
    release_path: str = Field(default="", pattern=r"^(/.*)?$")


class AdmissionSettings(BaseModel, frozen=True, extra="forbid"):
    """How far groups may run ahead of trainers: so many undelivered ones, or as estimated, leased so many versions later."""

    undelivered_groups: int = Field(default=0, ge=0)
    staleness: int | None = Field(default=None, ge=0)
    groups_per_version: int | None = Field(default=None, ge=1, validate_default=True)
    hold_seconds: float = Field(default=0.0, ge=0, le=3600)

    @field_validator("groups_per_version")
    @classmethod
    def _check_groups_per_version(cls, groups: int | None, others: ValidationInfo) -> int | None:
        if (groups is None) is not (others.data.get("staleness") is None):
            raise ValueError("staleness and groups_per_version are set together: the one is estimated from the other")
        return groups


class GroupSettings(BaseModel, frozen=True, extra="forbid"):
    """How groups are delivered whose sessions say nothing else."""

    policy: Literal["require_all", "allow_partial", "drop"] = "require_all"
    minimum: int = Field(default=1, ge=1)
    zero_variance: Literal["keep", "drop"] = "keep"
    max_quarantined_share: float | None = Field(default=None, ge=0, le=1)
    timeout_seconds: float = Field(default=86400.0, ge=0, allow_inf_nan=False)
    stale: Literal["keep", "drop", "flag"] = "keep"
    max_deliveries: int = Field(default=5, ge=1)


class CallLimits(BaseModel, frozen=True, extra="forbid"):
    """Calls that one process takes; 0: no limit."""

    at_once: int = Field(default=0, ge=0)
    per_session: int = Field(default=0, ge=0)
    per_second: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class RedisWait(BaseModel, frozen=True, extra="forbid"):
    """What a write must have reached before it counts."""

    replicas: int = Field(default=0, ge=0)
    aof: bool = False


class RetentionSettings(BaseModel, frozen=True, extra="forbid"):
    """When closed sessions are deleted, and what becomes of them before."""

    archive_dir: Path | None = None
    without_archive: bool = False
    seconds: float | None = Field(default=None, gt=0)
    bytes: int | None = Field(default=None, gt=0)

    @field_validator("seconds", "bytes")
    @classmethod
    def _check_limit(cls, limit: float | None, others: ValidationInfo) -> float | None:
        if limit is not None and others.data.get("archive_dir") is None and not others.data.get("without_archive"):
            raise ValueError("it deletes sessions: say where they are archived (archive_dir), or set without_archive to true")
        return limit

    @field_validator("archive_dir")
    @classmethod
    def _check_archive_dir(cls, folder: Path | None) -> Path | None:
        if folder is not None and find_spec("pyarrow") is None:
            raise ValueError(f"pyarrow is missing: {how_to_install('archive')}")
        return folder


class _Environment(EnvSettingsSource):
    """The variables of the settings; those of a token and of its file make one."""

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        if field.annotation is not GivenToken:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        file = self.env_vars.get(f"{self.env_prefix}{field_name}_file".lower())
        return None if value is None and not file else {"token": value, "file": file or None}


def list_variables(settings: type[BaseSettings]) -> dict[str, list[str]]:
    """The names of the environment variables of each setting."""
    fields, prefix = settings.model_fields, settings.model_config["env_prefix"]
    return {
        name: [f"{prefix}{name}{end}".upper() for end in (("", "_FILE") if field.annotation is GivenToken else ("",))]
        for name, field in fields.items()
    }


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="VERBATIM_", extra="forbid", use_attribute_docstrings=True)

    engine: Annotated[list[str], Flag("URL")] = Field(default_factory=list)
    """Base URL of an engine, for example http://127.0.0.1:8000, one for each replica of the model. NAME=URL adds a replica to the policy
    NAME; dns://NAME:PORT adds every address that the name resolves to, and follows its changes. An engine may start later: until then
    calls get 503 and /readyz says what is missing."""
    policy_models: dict[str, list[str]] = Field(default_factory=dict)
    """Model names that each policy serves: {"judge": ["large"]}. Calls for them are routed to the policy even before one of its engines
    has been reached. "" is the default policy. A LoRA adapter of that name is the policy."""
    strict_models: bool = False
    """Answer 404 for a model name that no policy or engine serves. Otherwise the default policy answers, under the requested name, or the
    only LoRA adapter of its engines."""
    engine_api: Annotated[str, Flag("auto|token|completions|sglang|chat")] = "auto"
    """How to talk to the engines. token: vLLM since 0.24, since 0.30 with --enable-scale-out; token ids in and out, with a weight version
    per token (0.32) or call. completions: an older vLLM's /v1/completions with ids; sglang: SGLang's /generate; both need `renderer`.
    chat: any server of /v1/chat/completions. auto: probe each engine. Other installed kinds go by their names."""
    renderer: Annotated[str | None, Flag("MODEL")] = Field(None, validate_default=True)
    """For engines that take token ids but no messages: the model whose chat format the service renders and parses. A Hugging Face name, or
    a folder with its tokenizer."""
    renderer_options: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the renderers package, for example {"name": "qwen3"} for a model whose name it does not know."""
    engine_api_key: GivenToken = GivenToken()
    """Bearer token for the engines; in place of it, a file of it. Read at start."""
    engine_ca_file: Path | None = None
    """PEM file with certificate authorities to trust, besides the system's, for engines whose URL is https. Read at start."""
    engine_client_cert: Path | None = Field(None, validate_default=True)
    """The certificate that the service shows to such engines: a PEM file with it, its chain and its unencrypted key, or a folder with
    tls.crt and tls.key, as Kubernetes mounts a Secret. Read at start."""
    engine_router: EngineRouter = EngineRouter()
    """For routers in front of engines. {"session_header": "X-Session-ID"}: the header in which all requests of a call carry the session's
    id. {"release_path": "/finish_session"}: where the router is told that a session is over, with POST /finish_session?session_id=ID."""
    engine_stall_seconds: float = Field(120.0, ge=0)
    """How long an engine with calls in flight may sample nothing before it gets no more calls until it does, and how long it may take over
    a request that samples nothing. Must be longer than its longest step. 0: for ever."""
    engine_connect_seconds: float = Field(5.0, gt=0)
    """Timeout for connecting to an engine."""
    engine_max_calls: int = Field(0, ge=0)
    """Concurrent calls that each process sends to one replica; further calls go to the session's next replica, or wait. 0: no limit."""
    queue_seconds: float = Field(300.0, ge=0)
    """How long a call waits for a replica with room before it gets 503. 0: for ever."""
    frozen_models: list[str] = Field(default_factory=list)
    """Models that are never trained, such as judges: names of policies or of served models. Their calls are recorded and quarantined."""

    engine_logprob_modes: dict[str, LogprobMode] = Field(default_factory=dict)
    """vLLM's --logprobs-mode of engines that do not report it, by policy; "" is the default policy. vLLM reports it when started with
    this project's worker extension. Otherwise the mode of calls is unknown, or masked under a grammar."""
    train_logprob_modes: list[TrainedMode] = Field(default_factory=lambda: list[TrainedMode](get_args(TrainedMode)))
    """What trained logprobs may have been taken from; calls of another mode are recorded and quarantined as `logprob_mode`. A lease may
    want fewer. Logits are never trained."""
    keep: Kept = Kept()
    """What to store of every call besides the sampled tokens and their logprobs; a session's `sampling` has the same fields and wins.
    {"top_logprobs": 5}: so many of the most probable tokens for each sampled one, of which the engine must allow one more (vLLM's
    --max-logprobs). {"prompt_logprobs": true}: those of prompts; the engine then cannot use its prefix cache, and a reply arrives only
    when it is complete. {"routed_experts": true}: where each token was routed to (vLLM's --enable-return-routed-experts)."""

    redis: Annotated[str | None, Flag("URL")] = None
    """The store, shared by all processes that serve the same sessions: redis://HOST:PORT/0 of a Redis 6.2 or newer,
    redis+cluster://HOST:PORT,HOST:PORT, or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE; rediss for TLS. Unset: an embedded redis-server
    that starts and stops with the service and has its files in `data_dir`."""
    redis_retry_seconds: float = Field(10.0, ge=0)
    """How long to retry storing the record of a finished call while Redis restarts or fails over; then the call fails. At start the
    service waits this long for Redis."""
    redis_wait: RedisWait = RedisWait()
    """What must have a record, a close or an acknowledgement before it counts. {"replicas": 1}: so many replicas (WAIT). {"aof": true}: the
    disk of the primary, and those of as many replicas (WAITAOF, Redis 7.2 or newer)."""
    data_dir: Annotated[Path, Flag("DIR")] = Path("verbatim-data")
    """Folder for the append-only file of the embedded Redis; sessions survive a restart with the same one. One service per folder."""
    fsync: Annotated[Literal["everysec", "always"], Flag()] = "everysec"
    """When the embedded Redis syncs its file to disk. everysec can lose a second of data on a power failure, or two if Redis is killed
    while the disk is slow; always loses nothing and is slower."""

    host: Annotated[str, Flag("HOST")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts other machines."""
    port: Annotated[int, Flag("PORT")] = Field(8700, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and prints it."""
    control_port: Annotated[int | None, Flag("PORT")] = Field(None, ge=0, le=65535)
    """A separate port, on the same address, for the control side: sessions, batches, weights, tasks, pages and metrics. `port` then serves
    only harnesses, /healthz and /readyz. 0 takes a free one. Unset: both share `port`."""
    public_url: str | None = None
    """The URL at which harnesses reach this service, for the base_urls of new sessions. Unset: taken from the request."""
    admin_token: GivenToken = GivenToken()
    """Token for the admin API, and a file with further ones, one per line, which is reread when it changes: to exchange a token, add the
    new one there, switch the clients, remove the old one. Neither: generated at start and printed once."""
    trainer_token: GivenToken = GivenToken()
    """The same for leases and weight pushes."""
    node_token: GivenToken = GivenToken()
    """The same for `verbatim node`: it opens the sessions of rollouts and nothing else. Neither: nodes need an admin token."""
    open: Annotated[bool, Flag()] = False
    """Accept every program on this machine without a token or key. Only with a loopback `host`."""
    tls_cert: Annotated[Path | None, Flag("FILE")] = None
    """Serve HTTPS with the certificate and chain of this PEM file; a renewed one is picked up without a restart."""
    tls_key: Annotated[Path | None, Flag("FILE")] = None
    """PEM file with the unencrypted key of that certificate."""

    outbound_allow: list[str] | None = None
    """What the service may connect to for a URL that a session or a task names (a lookahead's chooser, a task's callback): networks
    (10.0.0.0/8), host names, and "public" for all public addresses; nothing else is called. Unset: public addresses, and those of this
    machine if `host` is a loopback address."""

    max_body_bytes: int = Field(64 * 2**20, ge=1)
    """Largest request body accepted."""
    call_limits: CallLimits = CallLimits()
    """Calls in one process beyond which callers get 429: `at_once` of all sessions, `per_session` of one at once, and `per_second` that one
    may start. 0: no limit."""
    max_session_bytes: int = Field(128 * 2**20, ge=0)
    """Uncompressed size of the messages and tokens of one session, after which its calls get 413; the call that reaches the limit is still
    recorded. A process that serves the session needs up to four times as much memory. 0: no limit."""

    thinking: Annotated[Literal["template", "retain"], Flag()] = "template"
    """What to do when the chat template drops earlier thinking at a new user turn. template: branch, and train on what the deployed model
    would see. retain: keep the sampled tokens in context."""
    echo_policy: EchoPolicy = "strict"
    """What to do when a harness replays a reply with an edit: branch there (strict), or continue from the sampled tokens if an id minted
    into the reply proves which one is meant, and record the edit as the call's projection (minted). A session may override it."""
    volatile_lines: list[Expression] = Field(default_factory=lambda: [r"^x-anthropic-billing-header:.*$"])
    """Regular expressions for lines of a system prompt that change with every request and mean nothing to the model. They are removed
    before the prompt is matched or rendered. A fork under `minted` may also differ from what it replays in such lines of a user."""
    later_system_role: Literal["system", "user"] = "user"
    """The role used to render a system or developer message that is not at the start of a Responses or Messages history: many chat
    templates refuse a later system message."""
    role_rules: list[RoleRule] = Field(default_factory=list)
    """Rules that assign a role to a call, tried before those of the session's harness and the built-in ones; see reconstruct/roles.py."""
    train_roles: list[TrainedRole] = Field(default_factory=lambda: list[TrainedRole](("main", "subagent", "inferred_side")))
    """Roles that are trained; calls in other roles are exported with their role and quarantined. inferred_side: calls that are only
    inferred to be side calls, which means without tools, in a separate conversation beside one with tools. An inference can be wrong,
    so they are trained by default."""
    keepalive_seconds: float = Field(10.0, ge=0)
    """A streaming harness that has received nothing for this long gets a typed keep-alive event. 0: never."""
    drain_seconds: float = Field(20.0, ge=0, allow_inf_nan=False)
    """After SIGTERM, how long calls in flight may take to finish; then they are cut and recorded as aborted."""
    session_cache_bytes: int | None = Field(None, ge=0)
    """Estimated memory for these trees in one process; the least recently used go first, their texts before the rest. Default: a quarter of
    the memory of the machine, or of its container, divided among the processes."""

    scorers: dict[ScorerName, AnyScorer] = Field(default_factory=dict)
    """Who is asked about what was sampled, by names that sessions use in `scores`. For the logprobs of sampled tokens:
    {"teacher": {"policy": "teacher", "top_k": 8, "at": "close", "required": true}}. `policy`: whose engines; "" is the default policy.
    `at`: close, of sessions that name it; demand; or call, which asks the policy that sampled while its version serves. `when`: always, or
    of calls under a grammar. `prompt`: sampled, or hindsight, which has the call's hint, too. `top_k`: so many alternatives a token.
    `required`: a session without its scores is not usable. For a reward of each call, once the session is closed: {"prm": {"url":
    "http://judge:9000/turn"}}, or a frozen `model` of the pool with so many `votes`, which is asked for `hints`, too. `required`: a session
    without its verdicts is not usable. `timeout_seconds`: of one question to a url."""
    scoring: ScoringLimits = ScoringLimits()
    """What scoring may take. `at_once`: sessions that one process scores at a time, each with one request to an engine. `share`: of an
    engine's time, while it has calls of harnesses from this process. `timeout_seconds`: how long a session is tried without getting on;
    then its tokens stay without, and the reason is stored. `request_seconds`: how long one request may take."""

    builder: str = Field("merged", validate_default=True)
    """How sessions become training rows: merged (one row per branch), per_call (one per call), or the name of your own in the entry-point
    group verbatim.builders. Groups are counted by its rows; a lease may ask for another builder."""
    session_idle_seconds: float = Field(0.0, ge=0)
    """Sessions without a call for this long are closed as timeout, so that their groups need not wait. 0: never."""
    close_wait_seconds: float = Field(10.0, ge=0)
    """When a session is closed or deleted, how long its calls in flight, in all processes, may take to end and be recorded."""

    group: GroupSettings = GroupSettings()
    """When a group is delivered. A task's `group` has the first four of these fields, and wins. `policy`: all members usable
    (require_all), at least `minimum` usable (allow_partial), or drop it when any member failed (drop). `zero_variance`: keep or drop groups
    whose rewards are all equal. `max_quarantined_share`: the largest share of a session's sampled tokens that may be quarantined for it
    to be usable, not counting roles and models that are not trained; null: any. `timeout_seconds`: how long an incomplete group waits for
    its next member, 0 for ever; then require_all makes it a dead letter, drop drops it, and allow_partial delivers the members there are
    if `minimum` of them are usable. `stale`: what a lease does with groups staler than its max_staleness: keep them for others, drop them,
    or deliver them flagged as stale. `max_deliveries`: deliveries of one group before it becomes a dead letter."""
    solved_reward: float = Field(1.0, allow_inf_nan=False)
    """The reward from which on the numbers of the run count a session as solved."""
    admission: AdmissionSettings = AdmissionSettings()
    """How far rollouts may run ahead of trainers; opening a session that would start a group beyond it gets 429. `undelivered_groups`: how
    many groups may be open, filling or ready at once; 0: any number. {"staleness": 1, "groups_per_version": 32}: how many versions behind
    a group started now may be by the time it is leased, as estimated; 0: all groups of a version are trained before the next starts.
    `groups_per_version` is the most groups that trainers take between two versions, including those acknowledged untrained: if it is less
    than a step needs, trainer and rollouts can wait for each other for ever. `hold_seconds`: how long such a request is held before it
    gets that 429."""

    retention: RetentionSettings = RetentionSettings()
    """What happens to closed sessions. None is deleted that is leased or whose group may still be delivered. `seconds`: how long to keep
    one. `bytes`: memory that the store may use before the oldest are deleted. Neither: all are kept for ever. `archive_dir`: a folder
    where they are archived before, as `verbatim import` reads them; needs pyarrow. `without_archive`: true deletes without one."""

    log_calls: Annotated[bool, Flag()] = False
    """Log one line per call: session, outcome and times, never content."""
    log_format: Annotated[Literal["human", "json"], Flag()] = "human"
    """Lines for people, or one JSON object per line."""

    weights_roots: list[Path] = Field(default_factory=list)
    """Folders that weight pushes may use; empty: any path. The engines open it, not the service."""
    weights_timeout_seconds: float = Field(600.0, gt=0)
    """How long one replica may take for one step of a weight push."""

    @field_validator("engine_api")
    @classmethod
    def _check_engine_api(cls, name: str) -> str:
        if name != "auto":
            try:
                engine_kinds().load(name)
            except UnknownPlugin as error:
                raise ValueError(f"{error}, or auto") from error
        return name

    @field_validator("engine_api_key")
    @classmethod
    def _check_engine_key(cls, key: GivenToken) -> GivenToken:
        if key.file is not None and key.token:
            raise ValueError("VERBATIM_ENGINE_API_KEY_FILE is set, too: set one of the two")
        if key.file is not None:
            try:
                token_in(key.file)
            except ValueError as error:
                raise ValueError(f"{key.file}: {error}") from error
        return key

    def find_engine_key(self) -> str | None:
        """The bearer token for the engines. Raises ValueError for a file that cannot be read any more."""
        return next(iter(self.engine_api_key.read()), None)

    @field_validator("engine_client_cert")
    @classmethod
    def _check_engine_tls(cls, cert: Path | None, others: ValidationInfo) -> Path | None:
        build_client_tls(others.data.get("engine_ca_file"), cert)
        return cert

    @field_validator("renderer")
    @classmethod
    def _check_renderer(cls, model: str | None, others: ValidationInfo) -> str | None:
        name = others.data.get("engine_api", "auto")
        if model is None and name != "auto" and engine_kinds().load(name).needs_renderer:
            raise ValueError(f"engines of the {name} API cannot render messages: name the model whose chat format to use")
        if model is not None and find_spec("renderers") is None:
            raise ValueError(f"the renderers package is missing: {how_to_install('renderers')}")
        return model

    @field_validator("builder")
    @classmethod
    def _check_builder(cls, name: str) -> str:
        builders().load(name)
        return name

    @field_validator("policy_models")
    @classmethod
    def _check_policy_models(cls, models: dict[str, list[str]]) -> dict[str, list[str]]:
        found: dict[str, str] = {}
        for policy, names in models.items():
            for name in names:
                if found.setdefault(name, policy) != policy or (name in models and name != policy):
                    raise ValueError(f"the model {name!r} is declared for two policies")
        return models

    @property
    def tokens(self) -> dict[TokenRole, GivenToken]:
        return {TokenRole.TRAINER: self.trainer_token, TokenRole.NODE: self.node_token, TokenRole.ADMIN: self.admin_token}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)

    @field_validator("open")
    @classmethod
    def _check_open(cls, chosen: bool, others: ValidationInfo) -> bool:
        host = str(others.data.get("host"))
        if chosen and not is_loopback(host):
            raise ValueError(f"the service would listen on {host}, where other machines reach it without a token")
        return chosen

    @field_validator("outbound_allow")
    @classmethod
    def _check_outbound_allow(cls, entries: list[str] | None) -> list[str] | None:
        AllowList(entries or [])
        return entries

    @field_validator("control_port")
    @classmethod
    def _check_control_port(cls, port: int | None, others: ValidationInfo) -> int | None:
        if port and port == others.data.get("port"):
            raise ValueError("harnesses are served there (VERBATIM_PORT): choose another, or leave it out to share the port")
        return port
