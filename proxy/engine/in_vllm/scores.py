"""Scores by the plugin: the logprobs of given ids, in packed arrays instead of vLLM's JSON, which takes 20 times as many bytes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput

from proxy.engine.in_vllm.frames import MEDIA_TYPE, PROTOCOL, ScoreAsk, ScoreFrame, read_ids
from reconstruct.details import NO_TOKEN
from reconstruct.media import collapse
from reconstruct.records import Ids


async def answer_score(raw: Request) -> Response:
    """The route."""
    try:
        ask = msgspec.msgpack.decode(await raw.body(), type=ScoreAsk)
    except msgspec.MsgspecError as error:
        raise VLLMValidationError(f"not a request of protocol {PROTOCOL}: {error}") from error
    response: Response | None = await _answer(ask, raw)
    # None: the client has left.
    return response or Response(status_code=499)


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def _answer(ask: ScoreAsk, raw: Request) -> Response:
    told = await score(raw.app.state.verbatim.tokens, ask, raw)
    if isinstance(told, ErrorResponse):
        return JSONResponse(told.model_dump(), status_code=told.error.code)
    return Response(told, media_type=MEDIA_TYPE)


async def score(tokens: Any, ask: ScoreAsk, raw: Request) -> bytes | ErrorResponse:
    """The answer of `tokens`, a handler of `/inference/v1/generate` that gives the engine's own outputs. Raises what that raises."""
    ids = read_ids(ask.ids)
    request = GenerateRequest.model_validate(_body(ask, ids))
    results = await tokens.serve_tokens(request, raw)
    if isinstance(results, ErrorResponse):
        return results
    told, cached, last = None, 0, None
    async for result in results:
        told, cached, last = result.prompt_logprobs or told, max(cached, result.num_cached_tokens or 0), result
    if last is None:
        raise VLLMValidationError("the engine gave no output")
    if ask.media:
        _check_images(ask, ids, request, last)
    # A long list takes a tenth of a second, beside everybody's streams.
    return await asyncio.to_thread(_pack, ask, ids, told or [], cached, last)


def _body(ask: ScoreAsk, ids: Ids) -> dict[str, Any]:
    # Without `detokenize: false` vLLM spells what stands in the list, which may be no id.
    sampling: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": ask.top_k, "detokenize": False}
    if ask.reads_cache:
        sampling["skip_reading_prefix_cache"] = False
    body = {"request_id": ask.request_id, "model": ask.model or None, "token_ids": ids.tolist(), "sampling_params": sampling}
    if not ask.media:
        return body
    collapsed = collapse(ids, tuple(ask.media))
    if collapsed is None or len(ask.images) != len(ask.media):
        raise VLLMValidationError("an id that stands for an image is in the text, too: the row cannot be scored")
    urls = (f"data:{kind};base64,{base64.b64encode(data).decode()}" for kind, data in ask.images)
    parts = [{"type": "image_url", "url": url} for url in urls]
    return {**body, "token_ids": collapsed.tolist(), "content_parts": parts, "return_token_ids": True}


def _check_images(ask: ScoreAsk, ids: Ids, request: GenerateRequest, result: RequestOutput) -> None:
    placed = request._response_mm_placeholders or {}
    ranges = sorted((each.offset, each.length) for found in placed.values() for each in found)
    if list(result.prompt_token_ids or ()) != ids.tolist() or ranges != [tuple(each) for each in ask.media]:
        raise VLLMValidationError("this model places the row's images differently than its policy did: it cannot score them")


def _pack(ask: ScoreAsk, ids: Ids, told: Sequence[Any], cached: int, result: RequestOutput) -> bytes:
    entries = clamp_prompt_logprobs(list(told)) or []
    logprobs = np.full(len(entries), np.nan, "<f4")
    top_ids = np.full((len(entries), ask.top_k), NO_TOKEN, "<i4")
    top_logprobs = np.full((len(entries), ask.top_k), np.nan, "<f4")
    # What stands at cached positions was never computed.
    for at in range(cached + 1, min(len(entries), len(ids))):
        entry: Mapping[int, Any] = entries[at] or {}
        own = entry.get(int(ids[at]))
        if own is not None:
            logprobs[at] = own.logprob
        if ask.top_k:
            ranked = sorted((one.rank, token, one.logprob) for token, one in entry.items() if one.rank <= ask.top_k)
            for place, (_, token, logprob) in enumerate(ranked[: ask.top_k]):
                top_ids[at, place], top_logprobs[at, place] = token, logprob
    (output,) = result.outputs
    spans = output.weight_versions
    frame = ScoreFrame(
        cached,
        output.finish_reason,
        None if spans is None else [(span.version, span.start, span.end) for span in spans],
        logprobs.tobytes(),
        ask.top_k,
        top_ids.tobytes(),
        top_logprobs.tobytes(),
    )
    return msgspec.msgpack.encode(frame)
