"""What the scripted engine says of tokens beside the sampled ones' logprobs, in vLLM 0.32's shapes.

All of it is a function of the ids up to a token, so that a test can work out every number: see `given_logprobs` and `experts`.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.engine.scripted_sampling import Generation, logprobs_of

LAYERS, PER_TOKEN, EXPERTS = 2, 3, 120


def given_logprobs(ids: Sequence[int]) -> list[float | None]:
    """The logprob of each id after those before it, None for the first; the same as if it had been sampled there."""
    return [None, *logprobs_of(ids[:1], ids[1:])]


def experts(ids: Sequence[int]) -> NDArray[np.uint8]:
    """The experts that the last of each beginning of `ids` is routed to, of shape (ids, LAYERS, PER_TOKEN)."""
    state, rows = 0, []
    for token_id in ids:
        state = zlib.crc32(struct.pack("<i", token_id), state)
        rows.append([[(state >> (4 * layer + at)) % EXPERTS for at in range(PER_TOKEN)] for layer in range(LAYERS)])
    return np.array(rows, dtype=np.uint8).reshape(-1, LAYERS, PER_TOKEN)


def prompt_logprobs(generation: Generation) -> list[dict[str, Any] | None] | None:
    """As a whole answer has them when they were asked for."""
    if generation.sampling.get("prompt_logprobs") is None or generation.stream:
        return None
    told = zip(generation.prompt_ids, given_logprobs(generation.prompt_ids), strict=True)
    width = max(1, generation.sampling["prompt_logprobs"])
    listed = [None if value is None else list_alternatives(token, value, width) for token, value in told]
    if generation.path == "/inference/v1/generate":
        for at in range(1, min(generation.cached_tokens + 1, len(listed))):
            # What was in memory there.
            listed[at] = {"-1056772646": _entry(902171.0, 1)}
    return listed if generation.bend_scores is None else generation.bend_scores(generation, listed)


def list_alternatives(token: int, logprob: float, width: int) -> dict[str, Any]:
    """The token is the likeliest, and those of the next ids follow, each one nat less likely."""
    return {str(token + at): _entry(logprob - at, at + 1) for at in range(width)}


def _entry(logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": None}


def routed_experts(generation: Generation, index: int) -> str | None:
    """As the end of a choice has them: of all tokens but the last, from `routed_experts_prompt_start` on."""
    if not generation.routes:
        return None
    start = generation.sampling.get("routed_experts_prompt_start") or 0
    table = experts([*generation.prompt_ids, *generation.sampled[index]])[start:-1]
    with io.BytesIO() as buffer:
        np.save(buffer, table, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()
