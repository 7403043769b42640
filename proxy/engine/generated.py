"""vLLM's generate endpoint: what it is asked for, and what its answers say beside the tokens (usage, the weights behind them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.engine.base import Job
from proxy.engine.replica import Replica
from reconstruct.records import Span

GENERATE = "/inference/v1/generate"


class Version(msgspec.Struct):
    version: str | int | None
    start: int
    end: int


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None

    def take(self, said: Usage | None) -> None:
        """What an answer or the last event of a stream said."""
        if said is not None and said.prompt_tokens_details is not None:
            self.prompt_tokens_details = said.prompt_tokens_details

    @property
    def cached_tokens(self) -> int:
        """0 where the engine does not say."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


def generate_body(replica: Replica, job: Job, stream: bool) -> dict[str, Any]:
    """The rendering's generate body with the job's ids, under the sampling in effect; logprobs always, and what is wanted beside
    them."""
    assert job.body is not None and job.prompt_ids is not None
    sampling = {**job.body.get("sampling_params", {}), **job.sampling, **job.wanted.parameters}
    sampling["logprobs"] = job.wanted.logprobs(job.request.top_logprobs)
    if job.request.n > 1:
        sampling["n"] = job.request.n
    return {
        **job.body,
        "token_ids": job.prompt_json,
        "sampling_params": sampling,
        "request_id": job.call_id,
        "model": replica.model_for(job.request.model),
        "stream": stream,
        # A stream tells of cached tokens in its last event, and only when asked to.
        "stream_options": {"include_usage": True} if stream else None,
        "return_token_ids": False,
    }


def streamed(job: Job, stream: bool) -> bool:
    """Whether the engine is asked to stream: only whole answers tell the logprobs of the prompt."""
    return stream and not job.wanted.prompt_logprobs


def spans_of(replica: Replica, versions: Sequence[Version]) -> tuple[Span, ...]:
    """Spans with integer versions; none at all when one of them is unknown: an unversioned token is never trained."""
    spans = []
    for item in versions:
        version = replica.version_of(None if item.version is None else str(item.version))
        if version is None:
            return ()
        spans.append(Span(version, item.start, item.end))
    return tuple(spans)
