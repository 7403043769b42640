"""What vLLM says of ids that it did not sample: by the plugin, by generate, or by completions.

Source: vLLM 0.32, v1/worker/gpu_model_runner.py (_get_prompt_logprobs_dict).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from proxy.engine.apis.reply import Usage, Version
from proxy.engine.apis.scores import ScoreArrays, Scored, ScoringJob, check_scores
from proxy.engine.apis.vllm_reply import GENERATE, Placeholders, read_ranges
from proxy.engine.in_vllm.frames import MEDIA_TYPE, SCORE, ScoreAsk, ScoreFrame, read_ids, read_logprobs, to_bytes, write_ask
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineAnswer, EngineHttp
from proxy.errors import EngineFailed, RequestError
from proxy.images import data_url, media_type
from proxy.timeline import CancelScope
from reconstruct.media import collapse

_COMPLETIONS = "/v1/completions"


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
    arrays = ScoreArrays(
        read_logprobs(told.logprobs), read_ids(told.top_ids).reshape(shape), read_logprobs(told.top_logprobs).reshape(shape)
    )
    versions = [Version(*span) for span in told.versions or ()]
    return check_scores(replica, job, arrays, told.finish_reason, versions, told.cached_tokens)


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
    return await _ask(http, replica, job, scope, GENERATE, body)


async def score_by_completions(http: EngineHttp, replica: Replica, job: ScoringJob, scope: CancelScope) -> Scored:
    """By vLLM's `/v1/completions`, which spells every id that it tells and reads nothing from its cache."""
    if job.media:
        raise RequestError(f"engine {replica.name} takes no images on {_COMPLETIONS}: it cannot score the row")
    body = {
        "model": job.served.name,
        "prompt": job.ids.tolist(),
        "max_tokens": 1,
        "prompt_logprobs": job.top_k,
        "return_token_ids": True,
    }
    return await _ask(http, replica, replace(job, reads_cache=False), scope, _COMPLETIONS, body)


async def _ask(
    http: EngineHttp, replica: Replica, job: ScoringJob, scope: CancelScope, path: str, body: Mapping[str, Any]
) -> Scored:
    before = replica.host.weight_version
    data = await http.sample_whole(replica, path, msgspec.json.encode(body), scope, {"x-request-id": job.request_id})
    # A long list takes a second to decode, beside everybody's calls.
    told, arrays = await asyncio.to_thread(_read_answer, replica, job, path, data)
    choice = told.choices[0] if told.choices else _Choice()
    if job.media:
        _check_images(replica, job, told)
    if choice.prompt_token_ids not in (None, job.ids.tolist()):
        raise EngineFailed(f"engine {replica.name} scored other ids than it was given")
    if choice.weight_versions is None and choice.finish_reason != "abort":
        # Of generate since vLLM 0.32 alone they are told.
        version = await http.find_version(replica, before, scope)
        choice.weight_versions = [] if version is None else [Version(str(version), 0, 1)]
    cached = told.usage.prompt_tokens_details.cached_tokens if told.usage and told.usage.prompt_tokens_details else None
    return check_scores(replica, job, arrays, choice.finish_reason, choice.weight_versions or [], cached)


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
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(EngineAnswer):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: Placeholders | None = None


def _read_answer(replica: Replica, job: ScoringJob, path: str, data: bytes) -> tuple[_Answer, ScoreArrays]:
    try:
        told = msgspec.json.decode(data, type=_Answer)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"engine {replica.name} answered {path} with something unexpected: {error}") from error
    if told.error:
        told.check(replica, path, data)
    return told, _read_entries(job, told.prompt_logprobs or (told.choices[0].prompt_logprobs if told.choices else None) or [])


def _read_entries(job: ScoringJob, entries: Sequence[Mapping[str, _Entry] | None]) -> ScoreArrays:
    arrays = ScoreArrays.unknown(len(entries), job.top_k)
    for at, (token, entry) in enumerate(zip(job.ids.tolist(), entries, strict=False)):
        if entry is None:
            continue
        own = entry.get(str(token))
        if own is not None and own.logprob is not None:
            arrays.logprobs[at] = own.logprob
        if job.top_k:
            _read_tops(entry, arrays.top_ids[at], arrays.top_logprobs[at])
    return arrays


def _read_tops(entry: Mapping[str, _Entry], ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
    """The likeliest, by their ranks: the given token stands among them where it is not one of them."""
    ranked = sorted((one.rank, token, one.logprob) for token, one in entry.items() if one.rank and one.logprob is not None)
    for at, (rank, token, logprob) in enumerate(ranked[: len(ids)]):
        if rank <= len(ids) and 0 <= int(token) < 2**31:
            ids[at], logprobs[at] = int(token), logprob
