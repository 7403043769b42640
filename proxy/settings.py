"""One settings object per process; the environment is read here and nowhere else.

Every field can be set as `VERBATIM_<NAME>` (for example `VERBATIM_KEEPALIVE_SECONDS=5`); `verbatim serve` sets the ones it
has flags for. Lists in the environment are JSON.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from reconstruct.roles import RoleRule

Role = Literal["main", "subagent", "compaction", "side"]


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"the expression {text!r} is broken: {error}") from error
    return text


Expression = Annotated[str, AfterValidator(_expression)]


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="VERBATIM_", extra="ignore", use_attribute_docstrings=True)

    engine: list[str] = Field(default_factory=list)
    """Base URLs of the engine's replicas, without /v1."""
    engine_api: Literal["auto", "token", "chat"] = "auto"
    """How to talk to them: token (vLLM with --enable-scale-out), chat (any OpenAI-compatible server), auto (probe)."""
    engine_api_key: SecretStr | None = None
    """Sent to the engines as a bearer token."""
    engine_timeout_seconds: float = 3600.0
    """Longest silence of an engine within one call."""
    engine_connect_seconds: float = 5.0
    """Longest wait for a connection to an engine."""

    redis: str | None = None
    """redis:// URL of the store; none: an embedded redis-server in `data_dir`."""
    data_dir: Path = Path("verbatim-data")
    """Where the embedded Redis keeps its append-only file."""
    fsync: Literal["everysec", "always"] = "everysec"
    """appendfsync of the embedded Redis: everysec can lose a second at a power cut, never at a kill."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8700
    """Port to listen on; 0 takes a free one."""
    public_url: str | None = None
    """What harnesses call this service, for the base_urls of new sessions; none: taken from the request."""
    admin_token: SecretStr | None = None
    """Opens the admin API; none: generated at start and printed once."""
    trainer_token: SecretStr | None = None
    """Opens leases and weight pushes; none: generated at start and printed once."""
    max_body_bytes: int = 64 * 2**20
    """Largest request body taken."""

    thinking: Literal["template", "retain"] = "template"
    """When the chat template drops earlier thinking at a new user turn: branch there as the deployed model would see it
    (template), or keep the sampled tokens in context (retain)."""
    volatile_lines: list[Expression] = Field(default_factory=lambda: [r"^x-anthropic-billing-header:.*$"])
    """Regular expressions for lines of system prompts that change with every request and mean nothing to the model; they are
    taken out before anything else sees the prompt."""
    role_rules: list[RoleRule] = Field(default_factory=list)
    """More rules for the role of a call, tried before the built-in ones; see reconstruct/roles.py."""
    train_roles: list[Role] = Field(default_factory=lambda: list[Role](("main", "subagent")))
    """Roles whose tokens are trained; calls of other roles are exported with their role and quarantined."""
    keepalive_seconds: float = 10.0
    """Longest silence towards a streaming harness before a typed keep-alive event."""
    drain_seconds: float = 20.0
    """At SIGTERM, how long calls in flight may finish; then they are cut and recorded as aborted."""
    session_cache: int = 4096
    """Sessions whose trees are kept in memory; others are read back from the store when needed."""

    group_policy: Literal["require_all", "allow_partial", "drop"] = "require_all"
    """What a group needs to be delivered: all members usable, at least `group_minimum` of them, or drop it when any failed."""
    group_minimum: int = 1
    """Usable members that allow_partial asks for."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """Whether groups whose rewards are all equal are delivered."""
    lease_seconds: float = 600.0
    """How long a trainer holds a batch before it is given to another."""
    max_deliveries: int = 5
    """Deliveries of one group before it goes to the dead letters."""

    weights_roots: list[Path] = Field(default_factory=list)
    """Folders that a weight push may read from; empty: any path (the engines open it, not the proxy)."""
    weights_timeout_seconds: float = 600.0
    """Longest time one replica may take for one step of a weight update."""
