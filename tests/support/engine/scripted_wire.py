"""vLLM 0.32's answers as JSON: generate, chat completions and derender, whole and as stream chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.engine.scripted_details import prompt_logprobs, routed_experts
from tests.support.engine.scripted_sampling import Generation, Step
from tests.support.engine.template_families import Family
from tests.support.engine.template_markup import Parsed


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def usage_of(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


def usage_of_generation(generation: Generation) -> dict[str, Any]:
    completion = sum(map(len, generation.sampled.values()))
    return usage_of(len(generation.prompt_ids), completion, generation.cached_tokens)


def streamed_usage(generation: Generation, **details: int) -> dict[str, Any]:
    """Usage as the last chunk of a stream has it: without what is null."""
    usage = usage_of_generation(generation)
    details = {"cached_tokens": generation.cached_tokens, **details}
    return {key: value for key, value in usage.items() if value is not None} | {"prompt_tokens_details": details}


def generate_body(
    request: Mapping[str, Any], ids: Sequence[int], request_id: str, room: int, features: Any = None
) -> dict[str, Any]:
    """What render answers: the generate body of a chat request."""
    return {
        "request_id": request_id,
        "token_ids": list(ids),
        "token_offsets": None,
        "features": features,
        "content_parts": None,
        "sampling_params": sampling_params(request, room),
        "model": request.get("model"),
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": bool(request.get("stream")),
        "stream_options": request.get("stream_options"),
        "cache_salt": None,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


_DEFAULTS = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
}
_PASSED = (
    *("n", "top_k", "seed", "min_tokens", "ignore_eos", "logit_bias", "structured_outputs", "stop_token_ids"),
    *("allowed_token_ids", "bad_words"),
)


def sampling_params(request: Mapping[str, Any], room: int) -> dict[str, Any]:
    """The sampling parameters of a chat request: the engine's own defaults under what was asked."""
    params: dict[str, Any] = {key: _or(request.get(key), default) for key, default in _DEFAULTS.items()}
    params |= {key: request[key] for key in _PASSED if request.get(key) not in (None, False, 1 if key == "n" else None)}
    stop = request.get("stop") or []
    params["stop"] = [stop] if isinstance(stop, str) else stop
    params.setdefault("stop_token_ids", [])
    asked = _or(request.get("max_completion_tokens"), request.get("max_tokens"))
    params["max_tokens"] = min(room, _or(asked, room))
    params["skip_special_tokens"] = False  # what an engine with tool and reasoning parsers sets
    if request.get("logprobs"):
        params["logprobs"] = request.get("top_logprobs") or 0
    kind = 1 if request.get("stream") else 2
    scored = request.get("prompt_logprobs") is not None
    if scored:
        params["prompt_logprobs"] = request["prompt_logprobs"]
    return {"bad_words": []} | params | {"output_kind": kind, "skip_clone": True, "skip_reading_prefix_cache": scored}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def generate_choice(index: int, steps: Sequence[Step], wanted: bool) -> dict[str, Any]:
    """One choice of a whole generate answer."""
    last = steps[-1]
    return {
        "index": index,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "token_ids": [step.token_id for step in steps if step.token_id is not None],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": last.versions,
        "logprobs": {"content": [step.entry for step in steps if step.entry]} if wanted else None,
    }


def generate_answer(generation: Generation, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "request_id": generation.request_id,
        "model": model,
        "created": int(time.time()),
        "usage": usage_of_generation(generation),
        "prompt_logprobs": prompt_logprobs(generation),
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": generation.prompt_ids if generation.body.get("return_token_ids") else None,
        "mm_placeholders": placeholders(generation),
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": choices,
    }


def placeholders(generation: Generation) -> dict[str, Any] | None:
    told = generation.body.get("return_token_ids") and generation.placeholders
    return {"image": generation.placeholders} if told else None


def generate_chunk(generation: Generation, step: Step, first: bool) -> dict[str, Any]:
    """One event of a generate stream; the weight versions come with the last."""
    wanted = generation.sampling.get("logprobs") is not None
    chunk: dict[str, Any] = {"request_id": generation.request_id, "usage": None, "output_mode": "tokens"}
    if first and generation.body.get("return_token_ids"):
        chunk["prompt_token_ids"] = generation.prompt_ids
        if (told := placeholders(generation)) is not None:
            chunk["mm_placeholders"] = told
    choice = generate_choice(step.index, [step], wanted)
    if step.finish_reason:
        choice["routed_experts"] = routed_experts(generation, step.index)
    return chunk | {"choices": [choice]}


def message_of(parsed: Parsed, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    if calls:
        message["tool_calls"] = list(calls)
    return message | {"reasoning": parsed.reasoning}


def chat_logprobs(family: Family, entries: Sequence[Mapping[str, Any]], *, as_ids: bool = False) -> dict[str, Any]:
    """Generate-shaped entries in the chat shape; token strings of split characters are empty, as in vLLM. `as_ids`: as
    `return_tokens_as_token_ids` has them."""
    return {"content": [_chat_entry(family, entry, as_ids) for entry in entries]}


def _chat_entry(family: Family, entry: Mapping[str, Any], as_ids: bool) -> dict[str, Any]:
    top = [_chat_token(family, other, as_ids) for other in entry.get("top_logprobs") or ()]
    return {**_chat_token(family, entry, as_ids), "top_logprobs": top}


def _chat_token(family: Family, entry: Mapping[str, Any], as_id: bool) -> dict[str, Any]:
    if as_id:
        text = f"token_id:{entry['token_id']}"
        return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode())}
    text = family.decode([entry["token_id"]])
    text = "" if text.endswith("\ufffd") else text
    return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode())}


def chat_choice(
    index: int, message: Mapping[str, Any], logprobs: Any, finish_reason: str | None, stop_reason: Any, ids: Any
) -> dict[str, Any]:
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "token_ids": ids,
        "routed_experts": None,
    }


def chat_answer(request_id: str, model: str, choices: list[dict[str, Any]], usage: dict[str, Any], ids: Any) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": ids,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def chat_chunk(request_id: str, model: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {"id": request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    return {**head, "choices": choices, **more}


def model_list(model: str, window: int | None) -> dict[str, Any]:
    card = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "permission": [],
    }
    if window is not None:
        card["max_model_len"] = window
    return {"object": "list", "data": [card]}
