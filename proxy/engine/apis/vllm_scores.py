"""What vLLM says of ids that it did not sample, and how much of it is believed.

An engine may answer 200 with numbers that it never computed: vLLM 0.32 fills the positions of a prefix that it had cached with whatever
was in memory, ends an aborted request with a list of one entry, and writes -9999.0 for a probability of 0. So nothing is believed by its
place alone: `Scored` has one number for each id that was sent, of that id, behind what was cached, and NaN elsewhere.

Source: vLLM 0.32, v1/worker/gpu_model_runner.py (_get_prompt_logprobs_dict).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from proxy.engine.apis.reply import Usage, Version
from proxy.engine.apis.scores import Scored, ScoringJob
from proxy.engine.apis.vllm_reply import GENERATE, Placeholders, read_ranges
from proxy.engine.in_vllm.frames import MEDIA_TYPE, SCORE, ScoreAsk, ScoreFrame, read_ids, read_logprobs, to_bytes, write_ask
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineAnswer, EngineHttp
from proxy.errors import EngineFailed, RequestError
from proxy.images import data_url, media_type
from proxy.timeline import CancelScope
from reconstruct.details import NO_TOKEN
from reconstruct.media import collapse
from reconstruct.records import Logprobs
from reconstruct.spans import Span

NO_PROBABILITY = -9999.0
"""What vLLM writes for a logprob of minus infinity."""
_ROUNDING = 1e-4
"""How far above 0 the logprob of a certain token may be."""


async def score_by_plugin(http: EngineHttp, replica: Replica, job: ScoringJob, scope: CancelScope) -> Scored:
    """By the plugin inside vLLM, in packed arrays: 4 bytes an id, and 8 for each alternative. Raises as `EngineKind.score`."""
    images = [(media_type(data), data) for data in job.images]
    ask = ScoreAsk(job.request_id, job.served.name, to_bytes(job.ids), job.top_k, job.reads_cache, [*job.media], images)
    data = await http.sample_whole(replica, SCORE, write_ask(ask), scope, {"Content-Type": MEDIA_TYPE})
    try:
        told = msgspec.msgpack.decode(data, type=ScoreFrame)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"engine {replica.name} answered {SCORE} with something unexpected: {error}") from error
    shape = (-1, told.width) if told.width else (len(told.logprobs) // 4, 0)
    arrays = _Arrays(
        read_logprobs(told.logprobs), read_ids(told.top_ids).reshape(shape), read_logprobs(told.top_logprobs).reshape(shape)
    )
    versions = [Version(*span) for span in told.versions or ()]
    return _check(replica, job, arrays, told.finish_reason, versions, told.cached_tokens)


async def score_by_generate(http: EngineHttp, replica: Replica, job: ScoringJob, scope: CancelScope) -> Scored:
    """By vLLM's own `/inference/v1/generate`, which answers JSON: 75 bytes an id, and 65 for each alternative."""
    sampling: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": job.top_k, "detokenize": False}
    if job.reads_cache:
        sampling["skip_reading_prefix_cache"] = False
    body = {
        "model": job.served.name,
        "request_id": job.request_id,
        "token_ids": job.ids.tolist(),
        "sampling_params": sampling,
        **(_place_images(job) if job.media else {}),
    }
    before = replica.host.weight_version
    data = await http.sample_whole(replica, GENERATE, msgspec.json.encode(body), scope, {})
    # A long list takes a second to decode, beside everybody's calls.
    told, arrays = await asyncio.to_thread(_read_answer, replica, job, data)
    if job.media:
        _check_images(replica, job, told)
    if told.choices and told.choices[0].weight_versions is None and told.choices[0].finish_reason != "abort":
        # vLLM before 0.32 does not tell.
        version = await http.find_version(replica, before, scope)
        told.choices[0].weight_versions = [] if version is None else [Version(str(version), 0, 1)]
    choice = told.choices[0] if told.choices else _Choice()
    cached = told.usage.prompt_tokens_details.cached_tokens if told.usage and told.usage.prompt_tokens_details else None
    return _check(replica, job, arrays, choice.finish_reason, choice.weight_versions or [], cached)


def _place_images(job: ScoringJob) -> dict[str, Any]:
    ids = collapse(job.ids, job.media)
    if ids is None:
        raise RequestError("an id that stands for an image is in the text, too: the row cannot be scored")
    parts = [{"type": "image_url", "url": data_url(data)} for data in job.images]
    return {"token_ids": ids.tolist(), "content_parts": parts, "return_token_ids": True}


def _check_images(replica: Replica, job: ScoringJob, told: _Answer) -> None:
    if told.prompt_token_ids != job.ids.tolist() or read_ranges(told.mm_placeholders) != job.media:
        raise RequestError(
            f"engine {replica.name} places the row's images differently than its policy did: it cannot score them"
        )


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None
    rank: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    weight_versions: list[Version] | None = None


class _Answer(EngineAnswer):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: Placeholders | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Arrays:
    """As an engine tells them, of whatever length."""

    logprobs: Logprobs
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


def _read_answer(replica: Replica, job: ScoringJob, data: bytes) -> tuple[_Answer, _Arrays]:
    try:
        told = msgspec.json.decode(data, type=_Answer)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"engine {replica.name} answered {GENERATE} with something unexpected: {error}") from error
    if told.error:
        told.check(replica, GENERATE, data)
    entries = told.prompt_logprobs or []
    arrays = _Arrays(
        np.full(len(entries), np.nan, np.float32),
        np.full((len(entries), job.top_k), NO_TOKEN, np.int32),
        np.full((len(entries), job.top_k), np.nan, np.float32),
    )
    for at, (token, entry) in enumerate(zip(job.ids.tolist(), entries, strict=False)):
        if entry is None:
            continue
        own = entry.get(str(token))
        if own is not None and own.logprob is not None:
            arrays.logprobs[at] = own.logprob
        if job.top_k:
            _read_tops(entry, arrays.top_ids[at], arrays.top_logprobs[at])
    return told, arrays


def _read_tops(entry: Mapping[str, _Entry], ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
    """The likeliest, by their ranks: the given token stands among them where it is not one of them."""
    ranked = sorted((one.rank, token, one.logprob) for token, one in entry.items() if one.rank and one.logprob is not None)
    for at, (rank, token, logprob) in enumerate(ranked[: len(ids)]):
        if rank <= len(ids) and 0 <= int(token) < 2**31:
            ids[at], logprobs[at] = int(token), logprob


def _check(
    replica: Replica, job: ScoringJob, told: _Arrays, finish_reason: str | None, versions: Sequence[Version], cached: int | None
) -> Scored:
    """Raises EngineFailed for an answer of which nothing is believed."""
    count = len(job.ids)
    if finish_reason == "abort":
        raise EngineFailed(f"engine {replica.name} aborted the request to score {count} ids")
    if len(told.logprobs) != count or len(told.top_ids) != count or len(told.top_logprobs) != count:
        raise EngineFailed(f"engine {replica.name} gave {len(told.logprobs)} logprobs for {count} ids")
    if cached is not None and not 0 <= cached <= count:
        raise EngineFailed(f"engine {replica.name} says that {cached} of {count} ids were cached")
    if job.reads_cache and cached is None:
        raise EngineFailed(f"engine {replica.name} does not say how many of {count} ids were cached")
    # The first token behind a cached prefix is predicted by its last one, which was not computed either.
    first = max(1, (cached or 0) + 1)
    replica.host.tells_cached = cached is not None
    logprobs, top_ids, top_logprobs = told.logprobs.copy(), told.top_ids.copy(), told.top_logprobs.copy()
    impossible = np.zeros(count, bool)
    impossible[first:] = logprobs[first:] <= NO_PROBABILITY
    known = logprobs[first:][~impossible[first:]]
    if not np.isfinite(known).all():
        at = first + int(np.argmin(np.isfinite(logprobs[first:]) | impossible[first:]))
        raise EngineFailed(
            f"engine {replica.name} has no logprob of the id {int(job.ids[at])} at position {at}: it scored another"
        )
    if len(known) and float(known.max()) > _ROUNDING:
        raise EngineFailed(f"engine {replica.name} gave the logprob {float(known.max()):g}, which no token has")
    logprobs[:first], logprobs[impossible] = np.nan, np.nan
    top_ids[:first], top_logprobs[:first] = NO_TOKEN, np.nan
    nothing = ~(top_logprobs > NO_PROBABILITY)
    top_ids[nothing], top_logprobs[nothing] = NO_TOKEN, np.nan
    if (top_logprobs > _ROUNDING).any():
        raise EngineFailed(f"engine {replica.name} gave an alternative a logprob above 0, which no token has")
    return Scored(logprobs, top_ids, top_logprobs, impossible, _read_version(replica, job, versions), cached)


def _read_version(replica: Replica, job: ScoringJob, versions: Sequence[Version]) -> int:
    """The version of all numbers: an engine scores a row again that a push interrupts, and then samples the one token."""
    found = {replica.host.version_of(None if each.version is None else str(each.version)) for each in versions}
    (version,) = found if len(found) == 1 else (None,)
    spans = job.served.read_spans([] if version is None else [Span(version, 0, 1)])
    if not spans:
        raise EngineFailed(f"engine {replica.name} does not say under which weights it scored")
    return spans[0].version
