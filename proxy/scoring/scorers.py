"""What an operator says of scorers and judges, and which of them a session may name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag, model_validator

from proxy.errors import RequestError

ScorerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""It becomes part of the names of columns."""


class Scorer(BaseModel, frozen=True, extra="forbid"):
    """A policy of the pool, and how it is asked for the logprobs of sampled tokens."""

    policy: str = ""
    top_k: int = Field(default=0, ge=0, le=128)
    at: Literal["call", "close", "demand"] = "close"
    prompt: Literal["sampled", "hindsight"] = "sampled"
    required: bool = True
    when: Literal["always", "grammar"] = "always"

    @model_validator(mode="after")
    def _check_call(self) -> Scorer:
        if self.at == "call" and self.policy:
            raise ValueError("at call the policy that sampled is asked, while its version serves: leave policy out")
        if self.at == "call" and self.when != "grammar":
            raise ValueError("at call raw logprobs are asked for where a grammar masked them: set when to grammar")
        if self.at == "call" and self.prompt == "hindsight":
            raise ValueError("hints are known once a session is closed: hindsight is scored at close or on demand")
        return self

    @property
    def in_hindsight(self) -> bool:
        """Whether the prompt has the call's hint, too."""
        return self.prompt == "hindsight"

    @property
    def same_version(self) -> bool:
        """Whether only the weights that sampled a token may score it."""
        return self.at == "call"


class TurnJudge(BaseModel, frozen=True, extra="forbid"):
    """Who is asked about a call: an endpoint, or a frozen model of the pool, so often."""

    url: str | None = Field(default=None, pattern=r"^https?://")
    model: str | None = Field(default=None, min_length=1)
    votes: int = Field(default=1, ge=1, le=32)
    hints: bool = False
    required: bool = False
    timeout_seconds: float = Field(default=60.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _check_one(self) -> TurnJudge:
        if (self.url is None) == (self.model is None):
            raise ValueError("a judge is an endpoint or a model: set url or model")
        if self.hints and self.model is None:
            raise ValueError("an endpoint gives hints when it likes: hints is for a model")
        return self


class ScoringLimits(BaseModel, frozen=True, extra="forbid"):
    """What scoring may take."""

    at_once: int = Field(default=2, ge=1, le=1024)
    share: float = Field(default=0.5, gt=0, le=1)
    timeout_seconds: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    request_seconds: float = Field(default=300.0, gt=0, allow_inf_nan=False)


def _tell_kind(given: Any) -> str:
    asked = given if isinstance(given, Mapping) else vars(given) if isinstance(given, BaseModel) else {}
    return "judge" if asked.keys() & {"url", "model"} else "scorer"


AnyScorer = Annotated[Annotated[Scorer, Tag("scorer")] | Annotated[TurnJudge, Tag("judge")], Discriminator(_tell_kind)]
"""A judge names a `url` or a `model`; what does not is a scorer."""
Kind = TypeVar("Kind", Scorer, TurnJudge)


def select(scorers: Mapping[str, Scorer | TurnJudge], kind: type[Kind]) -> dict[str, Kind]:
    """Those of one kind."""
    return {name: scorer for name, scorer in scorers.items() if isinstance(scorer, kind)}


def check_known(scorers: Mapping[str, Scorer | TurnJudge], name: str, param: str) -> None:
    """Raises RequestError if nothing is set under the name."""
    if name not in scorers:
        known = ", ".join(sorted(scorers)) or "none"
        raise RequestError(f"{param}: there is no scorer {name!r} in VERBATIM_SCORERS; there are: {known}", param=param)


def check_scores(scorers: Mapping[str, Scorer | TurnJudge], names: Sequence[str]) -> None:
    """Raises RequestError for a scorer or judge that a session or a task cannot name."""
    for name in names:
        check_known(scorers, name, "scores")
        scorer = scorers[name]
        if isinstance(scorer, Scorer) and scorer.at == "demand":
            raise RequestError(
                f"scores: {name!r} is asked on demand alone: POST /sessions/ID/scores once the session is closed",
                param="scores",
            )
