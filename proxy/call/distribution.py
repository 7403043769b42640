"""Which distribution tokens were sampled from: what bent the choice of a call's tokens, and what its logprobs were taken from.

Both are derived by exclusion from the parameters in effect (`EngineKind.parameters`): whatever is not known to bend nothing is noted, and
whatever is not known to leave raw logprobs raw makes their mode unknown. The request alone is no proof: vLLM turns a forced tool, a tool
with `"strict": true` and, for some tool parsers, every request with tools into a grammar.

vLLM 0.32 masks logits by a grammar before it takes any logprob; all other processors come after the raw ones are taken and before the
processed ones (v1/sample/sampler.py). Measured against transformers: under a grammar raw logprobs are off by 6 to 12, under bias, allowed
ids, bad words and penalties by less than 1e-5.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from typing import Any

import msgpack

from proxy.engine.apis import reply as engine
from reconstruct.records import LOGITS, MASKED, PROCESSED, RAW, UNKNOWN_MODE, Sampling

_OF_SAMPLING = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop")
"""Parameters with a field of their own in Sampling."""

_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "watermarking": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Values of parameters that bend something otherwise, with which they bend nothing. None never does."""

_NEUTRAL = frozenset(
    # How a reply ends, without a token being kept from the model or forced on it.
    {"stop_token_ids", "include_stop_str_in_output"}
    # What is returned, and how it is spelled and scheduled.
    | {"n", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids"}
    | {"logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"}
    | {"output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"}
    | {"routed_experts_prompt_start", "priority", "include_reasoning", "parallel_tool_calls", "cache_salt"}
    | {"prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    # What shapes the prompt, whose ids are recorded.
    | {"tools", "reasoning_effort", "verbosity", "chat_template", "documents", "mm_processor_kwargs", "media_io_kwargs"}
    | {"add_special_tokens"}
)
"""Parameters that bend nothing, whatever their value."""

_TRANSFERRED = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""What vLLM itself puts into `extra_args`, which otherwise is for logits processors of an operator's."""

_GRAMMARS = frozenset({"structured_outputs", "response_format", "tool_choice"})
"""Parameters by which an engine masks tokens before it takes a logprob. The last two are those of a chat engine, which does not say what it
makes of them."""

_REWEIGHTS = frozenset({"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos"})
"""What processed logprobs contain without a token being masked by it, truncation aside."""

_MOST_BYTES = 2048
"""A longer value is noted by its digest: the grammar of many tools would be stored with every call."""


def describe_sampling(parameters: Mapping[str, Any]) -> Sampling:
    """The parameters in effect. `extra` has all that may have bent the choice of a token and has no field of its own."""
    stop = parameters.get("stop") or ()
    return Sampling(
        temperature=parameters.get("temperature"),
        top_p=parameters.get("top_p"),
        top_k=parameters.get("top_k"),
        seed=parameters.get("seed"),
        max_tokens=parameters.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        extra={name: _note(value) for name, value in _find_bending(parameters).items()},
    )


def find_mode(parameters: Mapping[str, Any], engine_mode: str, leaves_raw: Set[str]) -> str:
    """What the logprobs of a call with these parameters were taken from; see `reconstruct.records.LOGPROB_MODES`.

    `engine_mode` is vLLM's `--logprobs-mode`, or another text if it is not known; `leaves_raw` is the engine kind's."""
    if engine_mode in engine.NO_LOGPROBS:
        return LOGITS
    bending = _find_bending(parameters).keys()
    if bending & _GRAMMARS or _has_strict_tool(parameters):
        return MASKED
    # An engine that does not say what it makes of tools may make a grammar of them.
    if parameters.get("tools") or not bending <= leaves_raw:
        return UNKNOWN_MODE
    if engine_mode == "processed_logprobs":
        return PROCESSED if bending <= _REWEIGHTS else MASKED
    return RAW if engine_mode == "raw_logprobs" else UNKNOWN_MODE


def _find_bending(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not known to bend nothing, and have no field of their own."""
    found = {
        name: value
        for name, value in parameters.items()
        if value is not None and name not in _OF_SAMPLING and name not in _NEUTRAL and value not in _DEFAULTS.get(name, ())
    }
    extra = found.get("extra_args")
    if isinstance(extra, Mapping) and extra.keys() <= _TRANSFERRED:
        del found["extra_args"]
    return found


def _has_strict_tool(parameters: Mapping[str, Any]) -> bool:
    """Whether a chat engine was offered a tool whose arguments must follow their schema. (Offered any, it may use a grammar: unknown.)"""
    for tool in parameters.get("tools") or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("strict") is True:
            return True
    return False


def _note(value: Any) -> Any:
    """The value as a record holds it, without what is off in it; by its digest if it is long."""
    if isinstance(value, Mapping):
        value = {str(name): item for name, item in value.items() if item is not None and item is not False}
    text = json.dumps(value, sort_keys=True, default=str).encode()
    try:
        if len(text) <= _MOST_BYTES and msgpack.packb(value):
            return value
    except (TypeError, ValueError, OverflowError):
        # Such as an integer of more than 64 bits.
        pass
    return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
