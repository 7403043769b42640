"""A session's fields: the one list, for whoever opens, stores, shows or archives a session.

A field that is shown is one line of `SessionFields`, or of `RunFields` if tasks have it too; one that is not shown is a line of
`OpeningFields`. From there it is in the body of `POST /sessions` (`NewSession`), its checks and messages, in the store, in
`GET /sessions` (`SessionView`) and in archives, each with its description in the OpenAPI document. Three fields have one form when
asked for and another once the session is open: see `SettledFields`.

Instances made in Python are not validated, except by what a class checks itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from contract.rules import FINITE, LIST_OR_TUPLE, RULES, Checks, HttpUrl, Metadata, Name, SpeltAs, Wire, show
from reconstruct.roles import RoleRule

SESSION_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")
"""What a session id may be. Not "." and "..", which clients fold away in a URL path."""

SessionStatus = Literal["open", "closing", "completed", "failed", "timeout", "cancelled"]
DEFAULT_RUN = "default"
"""The run of whatever names none."""


def check_run(name: str) -> str:
    """The name. Raises ValueError for one that would not be plain in a URL path, a file name and a metric's label."""
    if not SESSION_ID.match(name):
        raise ValueError("a run's name has 1 to 128 letters, digits, '.', '_' and '-'")
    return name


RunName = Annotated[str, Checks(check_run, (("pattern", r"^[A-Za-z0-9._-]{1,128}$"),))]
EchoPolicy = Literal["strict", "minted"]
Role = Literal["main", "subagent", "compaction", "side"]


# Parts of a session's fields.


@dataclass(frozen=True, slots=True)
class SamplingOverrides(Wire):
    temperature: Annotated[float, Ge(0), FINITE] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(-1), Lt(2**31)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Gt(0), FINITE] | None = None
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)] | None = None
    max_tokens: Annotated[int, Ge(1), Lt(2**31)] | None = None
    top_logprobs: Annotated[int, Ge(0), Le(128)] | None = None
    """How many of the most probable tokens to keep at each sampled position. For the trainer; harnesses do not see them."""
    prompt_logprobs: bool | None = None
    """Keep the logprobs of prompts."""
    routed_experts: bool | None = None
    """Keep the experts each token was routed to."""


@dataclass(frozen=True, slots=True)
class Lookahead(Wire):
    """How many candidates are sampled for one reply, and who chooses."""

    n: Annotated[int, Ge(2), Le(64)]
    """Candidates that are sampled for each reply; the harness sees the chosen one."""
    choose: Literal["logprob", "model", "http"] = "logprob"
    """Who chooses: the highest mean logprob, a model as judge, or an HTTP endpoint."""
    model: Name | None = None
    """The judge: a frozen model that an engine serves."""
    url: HttpUrl | None = None
    """The endpoint."""
    roles: Annotated[tuple[Role, ...], LIST_OR_TUPLE] = ()
    """Of which calls. Default: of all."""
    timeout_seconds: Annotated[float, Gt(0), Le(3600)] = 60.0
    """How long the chooser may take."""

    def __post_init__(self) -> None:
        for name, chooser in (("model", "model"), ("url", "http")):
            if (getattr(self, name) is not None) != (self.choose == chooser):
                raise ValueError(f"{name}: goes with choose {chooser!r}, and that with it")


@dataclass(frozen=True, kw_only=True)
class ForkTerms(Wire):
    on_divergence: Literal["live", "fail"] = "live"
    """What becomes of a request before the pivot that was not recorded: it is sampled, or refused as `replay_diverged`."""
    tokens_per_second: Annotated[float, Gt(0), FINITE] | None = None
    """The pace of replayed replies that are streamed. Default: at once."""


@dataclass(frozen=True, slots=True)
class ForkRequest(ForkTerms):
    """A recorded session to replay, and how far."""

    session_id: Name
    """The recorded session: open, closed, or archived by this service."""
    until: Annotated[int, Ge(0)] | str | None = None
    """The pivot, from which the model samples: a call's id, or how many recorded requests to replay. Default: all."""


@dataclass(frozen=True, slots=True)
class Fork(ForkTerms):
    """What a session replays before it samples: the first `calls` records of the session `session_id`, its origin."""

    session_id: str
    created_at: float
    """The recorded session's: no other session of that id is meant."""
    calls: int
    """How many calls it had when the fork was opened."""
    until: str | None = None
    """The pivot's call id; null: all is replayed."""


# The fields.


@dataclass(frozen=True, kw_only=True)
class RunFields(Wire):
    """What a task and a session are both asked for, under one name."""

    sampling: Annotated[Mapping[str, Any], SpeltAs(SamplingOverrides, or_null=True)] = field(default_factory=dict)
    """Overrides what the harness sends."""
    echo_policy: EchoPolicy | None = None
    """How to treat a reply that the harness replays with an edit. strict: as a branch. minted: as the reply that was sampled, where an
    id minted into it proves which one is meant. Default: the service's setting."""
    lookahead: Lookahead | None = None
    """Samples several candidates for each reply and gives the harness the best of them."""
    scores: Annotated[tuple[Name, ...], MaxLen(16), LIST_OR_TUPLE] = ()
    """The scorers that are asked about its sampled tokens: names of the service's setting `scorers`. Its group waits for them."""
    run: RunName = DEFAULT_RUN
    """The training run or experiment that it belongs to: what `GET /run` counts separately."""


@dataclass(frozen=True, kw_only=True)
class SessionBudget(Wire):
    max_calls: Annotated[int, Ge(1), Lt(2**31)] | None = None
    """Calls it may make, counting every choice of a request. Further calls are refused as `budget_exhausted`, and the row they would have
    extended is marked `finish_reason: budget`. Null: unlimited."""
    max_completion_tokens: Annotated[int, Ge(1), Lt(2**53)] | None = None
    """Tokens all its calls together may sample."""
    max_total_tokens: Annotated[int, Ge(1), Lt(2**53)] | None = None
    """Tokens all its calls together may have, prompts and replies, each call counted in full."""


@dataclass(frozen=True, kw_only=True)
class SessionFields(RunFields, SessionBudget):
    """What is said of a session when it is opened, and shown from then on."""

    task_id: Name | None = None
    """The task it attempts."""
    group_id: Name | None = None
    """The group it is compared in. Default: a group with no other session."""
    group_size: Annotated[int, Ge(1), Le(65536)] = 1
    """Sessions in a complete group."""
    metadata: Metadata = field(default_factory=dict)
    """Stored with the session and its rows."""
    project: Annotated[str, MinLen(1), MaxLen(40)] | None = None
    """The project it belongs to, whose token may read, reward and close it."""
    trained: bool = True
    """False: it is never delivered to a trainer and never held back. For judges."""


@dataclass(frozen=True, kw_only=True)
class GroupTerms(Wire):
    """Which sessions of a group a trainer gets; None: the service's setting."""

    group_policy: Literal["require_all", "allow_partial", "drop"] | None = None
    """What the group needs to be delivered. Default, here and below: the service's setting."""
    group_minimum: Annotated[int, Ge(1), Le(65536)] | None = None
    """Usable sessions that allow_partial requires."""
    zero_variance: Literal["keep", "drop"] | None = None
    """Whether a group whose rewards are all equal is delivered."""
    max_quarantined_share: Annotated[float, Ge(0), Le(1)] | None = None
    """The largest share of its sampled tokens that may be quarantined if it is to be usable in its group, not counting roles and models
    that are not trained."""


@dataclass(frozen=True, kw_only=True)
class GroupRule(GroupTerms):
    """What the sessions of a group set themselves; None: the service's setting."""

    group_replacements: bool | None = None
    """False: no session replaces a failed one, so the group is decided by its last member."""


@dataclass(frozen=True, kw_only=True)
class OpeningFields(SessionFields, GroupRule):
    """What is said when a session is opened, and is not shown: it is its group's, or stands in its calls. Archives do not have it."""

    role_rules: Annotated[tuple[RoleRule, ...], MaxLen(64), LIST_OR_TUPLE] = ()
    """The harness definition's rules for the roles of calls. The service's own rules take precedence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession(OpeningFields):
    __pydantic_config__ = RULES | show(
        {"session_id": "first", "group_id": "task-1", "group_size": 1, "sampling": {"temperature": 1.0}}
    )

    session_id: str | None = None
    """1 to 128 letters, digits, '.', '_' and '-'. Default: a generated id."""
    replay: ForkRequest | None = None
    """Makes the session a fork: its harness gets the replies that another session's got, as far as the pivot."""

    def __post_init__(self) -> None:
        if self.session_id is not None and not SESSION_ID.match(self.session_id):
            raise ValueError("session_id: 1 to 128 letters, digits, '.', '_' and '-'")
        if self.group_size > 1 and self.group_id is None:
            raise ValueError("group_size: more than 1 needs a group_id")
        if not self.trained and self.group_id is not None:
            raise ValueError("trained: a session of a group cannot be left out of training")


@dataclass(frozen=True, kw_only=True)
class SettledFields(SessionFields):
    """Those of a session that is open: with the service's setting where it asked for none, and with the calls that it replays."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Overrides what the harness sends."""
    echo_policy: EchoPolicy = "strict"
    """How a reply that the harness replays with an edit is treated."""
    replay: Fork | None = None
    """What it replays, if it is a fork."""


@dataclass(frozen=True, slots=True)
class Unserved(Wire):
    """A call that the service or its engine failed. `at`: when the harness got the error, in epoch seconds; `code` is the error's."""

    at: float
    call_id: str
    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class SessionProgress(Wire):
    """How far a session is, and what was said of it since it was opened."""

    status: Literal[SessionStatus, "restoring"] = "open"
    calls: int = 0
    """Recorded calls."""
    reward: float | None = None
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    reward_metadata: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    flag: str | None = None
    """A person's mark on it, as `good`, by which exports choose."""
    note: str | None = None
    """What that person wrote."""
    closed_at: float | None = None
    updated_at: float = 0.0
    scored: int = 0
    """How often a scorer's numbers of one call were stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums(Wire):
    """What became of what a closed session sampled: sampled_tokens = exported_tokens + quarantined tokens."""

    sampled_tokens: int
    exported_tokens: int
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Tokens by reason; a reason whose calls have none is there with 0."""
    dangling_calls: int = 0
    """Calls whose process died while the engine was sampling."""
    complete: bool = True
    """No call is dangling or damaged, and no call that the outcome depends on is quarantined."""
    truncated: bool = False
    """The reply that ends a trained row was cut short."""
    versions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By policy, the default one's name being empty: the oldest and the newest weight version of what it sampled."""


@dataclass(frozen=True, kw_only=True)
class LastEvents(Wire):
    """What matters only as long as a session is open."""

    unserved: Unserved | None = None
    """The last call that the service or the engine failed, even if later calls succeeded; null: none known. It may have no record."""
    replayed_at: float | None = None
    """When a recorded reply was last given to a fork's harness. A replayed call itself keeps the start that it had."""


_EXAMPLE: dict[str, Any] = {
    **{"session_id": "first", "created_at": 1767225600.0, "task_id": None, "group_id": "task-1", "group_size": 1},
    **{
        "run": "default",
        "metadata": {},
        "project": None,
        "sampling": {},
        "trained": True,
        "echo_policy": "strict",
        "replay": None,
        "lookahead": None,
        "scores": [],
    },
    **{"max_calls": None, "max_completion_tokens": None, "max_total_tokens": None, "status": "completed", "calls": 2},
    **{"reward": 1.0, "per_call": {}, "per_branch": {}, "reward_metadata": {}, "error": None, "flag": None, "note": None},
    **{"closed_at": 1767225700.0, "updated_at": 1767225700.0, "scored": 0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView(SettledFields, SessionProgress):
    """A session as it is shown."""

    __pydantic_config__ = RULES | show(_EXAMPLE)

    session_id: str
    created_at: float
    """Epoch seconds, like all times here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSession(SessionView):
    """A session as it is listed."""

    __pydantic_config__ = RULES | show({**_EXAMPLE, "accounting": None})

    accounting: TokenSums | None = None
    """Of a trained session that was closed here and has its reward; null otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDetail(SessionView, LastEvents):
    """A session by itself."""

    __pydantic_config__ = RULES | show({**_EXAMPLE, "unserved": None, "replayed_at": None})


@dataclass(frozen=True, slots=True)
class SessionPage(Wire):
    __pydantic_config__ = RULES | show({"sessions": [{**_EXAMPLE, "accounting": None}], "cursor": None})

    sessions: Sequence[ListedSession]
    cursor: str | None
    """For the next page; null: this is the last one."""


@dataclass(frozen=True, slots=True)
class BaseUrls(Wire):
    """By the kind of client. Dialects of other packages may add some."""

    __pydantic_config__ = RULES | {"extra": "allow"}

    openai: str
    """For OpenAI clients: ends in /v1."""
    anthropic: str
    gemini: str


@dataclass(frozen=True, slots=True)
class OpenedSession(Wire):
    __pydantic_config__ = RULES | show(
        {
            "session_id": "first",
            "api_key": "vb-0123456789abcdef0123456789abcdef01234567-first",
            "base_urls": {
                "openai": "http://127.0.0.1:8700/s/first/v1",
                "anthropic": "http://127.0.0.1:8700/s/first",
                "gemini": "http://127.0.0.1:8700/s/first",
            },
        }
    )

    session_id: str
    api_key: str = field(repr=False)
    """Shown only here."""
    base_urls: Annotated[Mapping[str, str], SpeltAs(BaseUrls)]
