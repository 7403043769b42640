"""One settings object per process; the environment is read here and nowhere else.

Every field can be set as `VERBATIM_<NAME>` (for example `VERBATIM_KEEPALIVE_SECONDS=5`); `verbatim serve` sets the ones it
has flags for. Lists in the environment are JSON.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.auth import GivenTokens, check_token, is_loopback, tokens_in
from proxy.auth import Role as TokenRole
from reconstruct.builders import builder_named
from reconstruct.errors import ReconstructError
from reconstruct.roles import RoleRule

Role = Literal["main", "subagent", "compaction", "side"]
LogprobMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
TrainedMode = Literal["raw_logprobs", "processed_logprobs", "unknown"]


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"the expression {text!r} is broken: {error}") from error
    return text


Expression = Annotated[str, AfterValidator(_expression)]


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # Of what it lies in.
        return False


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="VERBATIM_", extra="ignore", use_attribute_docstrings=True)

    engine: list[str] = Field(default_factory=list)
    """Base URLs of the engines' replicas, without /v1. `NAME=URL` puts one into the policy NAME; `dns://name:port` stands for every
    address of a name that is watched."""
    policy_models: dict[str, list[str]] = Field(default_factory=dict)
    """Names under which the engines of a policy serve, by policy: {"judge": ["large"]}. Calls for them go to it also before any of its
    engines was reached. "" is the default policy."""
    strict_models: bool = False
    """Refuse with 404 the names of models that no policy or engine goes by. Otherwise the default policy answers to them, under the
    name that was asked for."""
    engine_api: Literal["auto", "token", "completions", "sglang", "chat"] = "auto"
    """How to talk to them: token (vLLM with --enable-scale-out), completions (vLLM's /v1/completions with token ids), sglang
    (SGLang's /generate), chat (any OpenAI-compatible server), auto (probe). completions and sglang need `renderer`."""
    renderer: str | None = Field(None, validate_default=True)
    """The model whose chat format this service renders and reads for engines that take token ids only: a Hugging Face name or a
    folder with its tokenizer."""
    renderer_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the renderers package's configuration, for example {"name": "qwen3"} for a model it does not know by its name."""
    engine_api_key: SecretStr | None = None
    """Sent to the engines as a bearer token."""
    engine_timeout_seconds: float = 3600.0
    """Longest silence of an engine within one call."""
    engine_connect_seconds: float = 5.0
    """Longest wait for a connection to an engine."""
    engine_max_calls: int = Field(0, ge=0)
    """Calls under way at once at one replica, of each process; more go to the session's next replica, or wait. 0: any number."""
    queue_seconds: float = Field(300.0, ge=0)
    """How long a call may wait for a replica with room, then it gets 503; 0: for ever."""
    engine_watch_seconds: float = Field(3.0, gt=0)
    """How often watched names are resolved again, and engines that were added at run time looked up."""
    engine_failures: int = Field(3, ge=1)
    """Calls that break, or probes that fail, in a row until a replica gets no more calls. A refused connection needs only one, and
    broken calls never take out the last replica of a policy."""
    engine_return_probes: int = Field(3, ge=1)
    """Good probes in a row until a replica that fails repeatedly gets calls again; one that failed once needs one."""
    engine_flap_seconds: float = Field(60.0, ge=0)
    """How close two failures of a replica must be to count as repeated."""
    frozen_models: list[str] = Field(default_factory=list)
    """Models whose tokens are never trained, judges for example: names of policies or of served models. Their calls are recorded and
    quarantined."""

    engine_logprob_modes: dict[str, LogprobMode] = Field(default_factory=dict)
    """The logprob mode (vLLM's --logprobs-mode) of engines that do not tell it, by policy; "" is the default one. vLLM tells it when it
    was started with this project's worker extension. What neither says is recorded as unknown."""
    train_logprob_modes: list[TrainedMode] = Field(default_factory=lambda: list[TrainedMode](get_args(TrainedMode)))
    """Modes whose tokens are trained; calls of other modes are recorded and quarantined. Logits are never trained."""
    keep_top_logprobs: int = Field(0, ge=0, le=128)
    """The most probable tokens to keep of each sampled one, with their logprobs; a session's `sampling` may say otherwise. The engine
    must allow one more (vLLM's --max-logprobs)."""
    keep_prompt_logprobs: bool = False
    """Keep the logprobs of prompts as well. The engine then reads no prompt from its prefix cache, and replies come with their end."""
    keep_routed_experts: bool = False
    """Keep which experts every token was routed to, where the engine tells (vLLM's --enable-return-routed-experts)."""

    redis: str | None = None
    """URL of the store: redis://, redis+cluster://, redis+sentinel://, each also with rediss; none: an embedded redis-server in
    `data_dir`."""
    redis_timeout_seconds: float = Field(10.0, gt=0)
    """Longest wait for an answer of Redis, a new connection included."""
    redis_retry_seconds: float = Field(10.0, ge=0)
    """How long the record of a finished call is offered again while Redis restarts or fails over; then the call fails. A service that
    starts waits as long for its Redis."""
    redis_wait_replicas: int = Field(0, ge=0)
    """Replicas that must hold a record, a close or an acknowledgement before it counts (WAIT)."""
    redis_wait_aof: bool = False
    """Whether each of those must also be on the disk of the Redis, and of that many replicas (WAITAOF, Redis 7.2 or newer)."""
    data_dir: Path = Path("verbatim-data")
    """Where the embedded Redis keeps its append-only file."""
    fsync: Literal["everysec", "always"] = "everysec"
    """When the file of the embedded Redis is synced: everysec can lose a second at a power cut, always loses nothing."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8700, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    control_port: int | None = Field(None, ge=0, le=65535)
    """Port of the control side, pages, metrics and probes, on the same address: `port` then serves harnesses, /healthz and /readyz alone.
    0 takes a free one; none: both sides share `port`."""
    public_url: str | None = None
    """What harnesses call this service, for the base_urls of new sessions; none: taken from the request."""
    admin_token: SecretStr | None = None
    """Opens the admin API; none: generated at start and printed once."""
    trainer_token: SecretStr | None = None
    """Opens leases and weight pushes; none: generated at start and printed once."""
    node_token: SecretStr | None = None
    """Opens what `verbatim node` asks for, the sessions of rollouts; none: nodes need an admin token."""
    admin_tokens: list[SecretStr] = Field(default_factory=list)
    """More admin tokens that are valid beside it, so that one can be exchanged for another."""
    trainer_tokens: list[SecretStr] = Field(default_factory=list)
    """More trainer tokens."""
    node_tokens: list[SecretStr] = Field(default_factory=list)
    """More node tokens."""
    admin_token_file: Path | None = None
    """A file of admin tokens, one per line, valid beside the others; read again when it changes."""
    trainer_token_file: Path | None = None
    """The same for trainer tokens."""
    node_token_file: Path | None = None
    """The same for node tokens."""
    open: bool = False
    """Let every program on this machine in without a token or key; only for a service that listens on loopback."""
    tls_cert: Path | None = None
    """PEM file with the certificate, and its chain, to serve HTTPS with; read again when it changes."""
    tls_key: Path | None = None
    """PEM file with the certificate's key, not encrypted."""

    max_body_bytes: int = Field(64 * 2**20, ge=1)
    """Largest request body taken."""
    body_room_bytes: int = Field(256 * 2**20, ge=1)
    """Room in one process for the bodies of calls under way; further ones wait, and get 429 after `body_timeout_seconds`. Small ones, up
    to 256 KiB, find room always."""
    body_room_per_session_bytes: int = Field(64 * 2**20, ge=1)
    """The same of one session."""
    max_header_bytes: int = Field(64 * 2**10, ge=1024)
    """Largest head of a request, all its headers together; beyond it 431."""
    max_headers: int = Field(128, ge=16)
    """Most headers of a request."""
    header_timeout_seconds: float = Field(15.0, ge=0)
    """Longest time for the head of a request to arrive; 0: any."""
    body_timeout_seconds: float = Field(120.0, ge=0)
    """Longest time for the body of a request to arrive; 0: any."""
    write_timeout_seconds: float = Field(120.0, ge=0)
    """How long a client may take nothing of an answer before its connection is cut; 0: for ever."""
    max_calls: int = Field(0, ge=0)
    """Calls under way at once in one process, beyond which callers get 429; 0: any number."""
    max_calls_per_session: int = Field(0, ge=0)
    """Calls under way at once of one session in one process, beyond which it gets 429; 0: any number."""
    calls_per_second: float = Field(0.0, ge=0)
    """Calls that a session may begin per second in one process, beyond which it gets 429; 0: any number."""
    max_session_bytes: int = Field(128 * 2**20, ge=0)
    """What the calls of one session may hold, messages and tokens as they are before they are compressed; then its calls get 413. The
    call that reaches it is still recorded. A process that works for the session needs up to four times as much. 0: any."""
    remote_media: bool = False
    """Take messages that name an image or other media by its address. The engine, not this service, then fetches it from its own
    network; otherwise media come as data URLs only."""

    thinking: Literal["template", "retain"] = "template"
    """When the chat template drops earlier thinking at a new user turn: branch there as the deployed model would see it
    (template), or keep the sampled tokens in context (retain)."""
    echo_policy: Literal["strict", "minted"] = "strict"
    """What becomes of a reply that its harness replays with an edit: branch there (strict), or go on from what was sampled where an id
    that was minted into the reply proves which one is meant, and record the edit as the call's projection (minted). A session may say
    otherwise."""
    volatile_lines: list[Expression] = Field(default_factory=lambda: [r"^x-anthropic-billing-header:.*$"])
    """Regular expressions for lines of system prompts that change with every request and mean nothing to the model; they are
    taken out before anything else sees the prompt."""
    later_system_role: Literal["system", "user"] = "user"
    """The role under which a system or developer message that is not at the head of a Responses or Messages history is rendered:
    many chat templates refuse a later system message."""
    role_rules: list[RoleRule] = Field(default_factory=list)
    """Rules for the role of a call, tried before those of the session's harness and the built-in ones; see reconstruct/roles.py."""
    train_roles: list[Role] = Field(default_factory=lambda: list[Role](("main", "subagent")))
    """Roles whose tokens are trained; calls of other roles are exported with their role and quarantined."""
    train_inferred: bool = True
    """Whether a call is trained that is only inferred to be a side call: one that offers no tools and begins a conversation of its own,
    beside one with tools. False: as `train_roles` says of `side`."""
    keepalive_seconds: float = 10.0
    """Longest silence towards a streaming harness before a typed keep-alive event."""
    drain_seconds: float = 20.0
    """At SIGTERM, how long calls in flight may finish; then they are cut and recorded as aborted."""
    session_cache: int = 4096
    """Sessions whose trees are kept in memory; others are read back from the store when needed."""
    session_cache_bytes: int = Field(256 * 2**20, ge=0)
    """The memory that these trees may take in one process, as estimated from what their calls brought; those used least recently go
    first."""

    builder: str = Field("merged", validate_default=True)
    """How sessions are made into rows for trainers: merged (one row per branch), per_call (one per call), or one of your own, of the
    entry-point group verbatim.builders. Groups are counted by its rows; a lease may ask for another one."""
    session_idle_seconds: float = Field(0.0, ge=0)
    """Sessions without a call for so long are closed as timeout, so that their groups need not wait; 0: never."""
    close_wait_seconds: float = Field(10.0, ge=0)
    """At a close or delete, how long the calls in flight, in all processes, may take to end and be recorded."""

    group_policy: Literal["require_all", "allow_partial", "drop"] = "require_all"
    """What a group needs to be delivered: all members usable, at least `group_minimum` of them, or drop it when any failed."""
    group_minimum: int = 1
    """Usable members that allow_partial asks for."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Whether groups whose rewards are all equal are delivered."""
    max_quarantined_share: float | None = Field(None, ge=0, le=1)
    """The most of a session's sampled tokens that may be in quarantine, those of roles and models that are not trained left out, for it to
    be usable in its group; a session may say otherwise for itself. None: any."""
    group_timeout_seconds: float = Field(86400.0, ge=0, allow_inf_nan=False)
    """How long an incomplete group waits for its next member; 0: for ever. Then require_all makes it a dead letter, drop drops
    it, and allow_partial delivers the members that have come if `group_minimum` of them are usable."""
    stale_groups: Literal["keep", "drop", "flag"] = "keep"
    """What a lease does with groups older than its max_staleness: keep them for others, drop them, or give them marked stale."""
    max_undelivered_groups: int = Field(0, ge=0)
    """Groups that may be open, filling or ready at once; a session that would begin another one gets 429. 0: any number."""
    groups_per_version: int | None = Field(None, ge=1)
    """The most groups that the trainers take between two weight versions, those acknowledged untrained included; for
    `admission_staleness`. With fewer than a step needs, trainer and rollouts can wait for each other for ever."""
    admission_staleness: int | None = Field(None, ge=0)
    """Most versions that a group begun now may probably lie behind when it is leased; a session that would begin one that lies
    further behind gets 429. None: any number. 0: all groups of a version are trained before the next is begun."""
    admission_hold_seconds: float = Field(0.0, ge=0, le=3600)
    """How long a session that may not be opened now is held before it gets its 429."""
    lease_seconds: float = 600.0
    """How long a trainer holds a batch before it is given to another."""
    max_deliveries: int = 5
    """Deliveries of one group before it goes to the dead letters."""

    archive_dir: Path | None = None
    """Where sessions are written before retention deletes them; an archive that `verbatim import` reads."""
    archive_format: Literal["parquet", "jsonl"] = Field("parquet", validate_default=True)
    """Files of the archive; parquet needs pyarrow."""
    retain_without_archive: bool = False
    """Let retention delete sessions that no archive holds."""
    retain_seconds: float | None = Field(None, gt=0)
    """How long a closed session is kept; none: for ever. Never deleted: one that is open, leased, or whose group may still be
    delivered."""
    retain_bytes: int | None = Field(None, gt=0)
    """Memory that the store may use before the oldest closed sessions go; none: all it has. The same are never deleted."""
    retain_check_seconds: float = Field(900.0, gt=0)
    """How often retention looks."""

    log_calls: bool = False
    """Write a line of every call into the log: who, what became of it, how long it took; never what was said."""
    log_format: Literal["human", "json"] = "human"
    """How the log is written: lines for people, or one JSON object per line."""
    trace_endpoint: str | None = None
    """Where OpenTelemetry traces of calls are sent, by OTLP over HTTP: the whole URL, http://collector:4318/v1/traces; none: no
    traces. The SDK's own OTEL_ variables (headers, certificates, service name) count."""
    trace_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the calls that are traced, of those that come without a traceparent; with one the harness has decided."""

    weights_roots: list[Path] = Field(default_factory=list)
    """Folders that a weight push may read from; empty: any path (the engines open it, not the proxy)."""
    weights_timeout_seconds: float = 600.0
    """Longest time one replica may take for one step of a weight update."""
    weights_lock_seconds: float = Field(30.0, gt=0)
    """How long the right to push outlives a process that died in the middle of a push; then another puts right what it left."""

    @field_validator("renderer")
    @classmethod
    def _can_render(cls, model: str | None, others: ValidationInfo) -> str | None:
        if model is None and others.data.get("engine_api") in ("completions", "sglang"):
            raise ValueError(
                f"engines of the {others.data['engine_api']} API render no messages: say whose chat format is rendered here"
            )
        if model is not None and find_spec("renderers") is None:
            raise ValueError("the renderers package is missing: pip install 'verbatim-rl[renderers]'")
        return model

    @field_validator("builder")
    @classmethod
    def _can_build(cls, name: str) -> str:
        try:
            builder_named(name)
        except ReconstructError as error:
            raise ValueError(str(error)) from error
        return name

    @field_validator("trace_endpoint")
    @classmethod
    def _can_be_traced(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.match(r"https?://[^/]+/", endpoint):
            raise ValueError("it is the whole URL of a collector, for example http://collector:4318/v1/traces")
        if endpoint is not None and not _installed("opentelemetry.exporter.otlp.proto.http"):
            raise ValueError("the OpenTelemetry SDK is missing: pip install 'verbatim-rl[otel]'")
        return endpoint

    @field_validator("policy_models")
    @classmethod
    def _are_each_of_one(cls, models: dict[str, list[str]]) -> dict[str, list[str]]:
        found: dict[str, str] = {}
        for policy, names in models.items():
            for name in names:
                if found.setdefault(name, policy) != policy or (name in models and name != policy):
                    raise ValueError(f"the model {name!r} is declared for two policies")
        return models

    @property
    def given_tokens(self) -> list[GivenTokens]:
        return [
            GivenTokens(TokenRole.TRAINER, (self.trainer_token, *self.trainer_tokens), self.trainer_token_file),
            GivenTokens(TokenRole.NODE, (self.node_token, *self.node_tokens), self.node_token_file),
            GivenTokens(TokenRole.ADMIN, (self.admin_token, *self.admin_tokens), self.admin_token_file),
        ]

    @field_validator("admin_token", "trainer_token", "node_token", "admin_tokens", "trainer_tokens", "node_tokens")
    @classmethod
    def _can_be_sent(cls, given: SecretStr | list[SecretStr] | None) -> SecretStr | list[SecretStr] | None:
        for token in given if isinstance(given, list) else [given]:
            if token is not None:
                check_token(token.get_secret_value())
        return given

    @field_validator("admin_token_file", "trainer_token_file", "node_token_file")
    @classmethod
    def _holds_tokens(cls, path: Path | None) -> Path | None:
        if path is not None and not tokens_in(path):
            raise ValueError("there is no token in it")
        return path

    @field_validator("open")
    @classmethod
    def _is_for_this_machine(cls, chosen: bool, others: ValidationInfo) -> bool:
        host = str(others.data.get("host"))
        if chosen and not is_loopback(host):
            raise ValueError(f"the service would listen on {host}, where other machines reach it without a token")
        return chosen

    @field_validator("control_port")
    @classmethod
    def _is_another_port(cls, port: int | None, others: ValidationInfo) -> int | None:
        if port and port == others.data.get("port"):
            raise ValueError("harnesses are served there (VERBATIM_PORT): choose another, or leave it out to share the port")
        return port

    @field_validator("admission_staleness")
    @classmethod
    def _knows_the_batch(cls, most_behind: int | None, others: ValidationInfo) -> int | None:
        if most_behind is not None and others.data.get("groups_per_version") is None:
            raise ValueError("say how many groups the trainers take between two versions (VERBATIM_GROUPS_PER_VERSION)")
        return most_behind

    @field_validator("retain_seconds", "retain_bytes")
    @classmethod
    def _has_an_archive(cls, limit: float | None, others: ValidationInfo) -> float | None:
        if limit is not None and others.data.get("archive_dir") is None and not others.data.get("retain_without_archive"):
            raise ValueError(
                "it deletes sessions: say where they are archived (VERBATIM_ARCHIVE_DIR), or that they need not be "
                "(VERBATIM_RETAIN_WITHOUT_ARCHIVE=true)"
            )
        return limit

    @field_validator("archive_format")
    @classmethod
    def _can_be_written(cls, chosen: str, others: ValidationInfo) -> str:
        if chosen == "parquet" and others.data.get("archive_dir") and find_spec("pyarrow") is None:
            raise ValueError("pyarrow is missing: pip install 'verbatim-rl[archive]', or choose jsonl")
        return chosen
