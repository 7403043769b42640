"""`generationConfig`: how Google's callers say what to sample, in the words engines know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.dialects import fields
from proxy.dialects.gemini_json import one, shallow, whole_numbers
from proxy.dialects.gemini_schema import json_schema
from proxy.errors import RequestError

_SAMPLING = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "seed": "seed",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
}
_INTEGERS = ("topK", "seed", "maxOutputTokens", "candidateCount", "logprobs")
_EFFORTS = frozenset({"MINIMAL", "LOW", "MEDIUM", "HIGH", "XHIGH"})
_MOST_LOGPROBS = 20


@dataclass(slots=True)
class Generation:
    """What a generationConfig asks for. `forward`: fields of a chat body; `thoughts`: whether thought parts are wanted."""

    sampling: dict[str, Any]
    n: int
    top_logprobs: int | None
    forward: dict[str, Any] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thoughts: bool = False


def generation_of(body: Mapping[str, Any]) -> Generation:
    """Raises RequestError naming the field and the rule it broke."""
    config = whole_numbers(one(body, "generationConfig"), *_INTEGERS)
    _text_only(config)
    made = Generation(fields.sampling(config, _SAMPLING), fields.choices(config, "candidateCount"), _top_logprobs(config))
    for key, name in (("presencePenalty", "presence_penalty"), ("frequencyPenalty", "frequency_penalty")):
        if (penalty := fields.number(config, key)) is not None:
            made.forward[name] = penalty
    made.forward |= _shape(config)
    _think(made, whole_numbers(one(config, "thinkingConfig"), "thinkingBudget"))
    return made


def _text_only(config: Mapping[str, Any]) -> None:
    for modality in fields.strings(config, "responseModalities"):
        if modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise RequestError(f"responseModalities: only TEXT can be sampled, not '{modality}'", param="responseModalities")


def _top_logprobs(config: Mapping[str, Any]) -> int | None:
    count = fields.integer(config, "logprobs") or 0
    if not 0 <= count <= _MOST_LOGPROBS:
        raise RequestError(f"'logprobs' must be an integer from 0 to {_MOST_LOGPROBS}", param="logprobs")
    return count if fields.flag(config, "responseLogprobs") else None


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Structured output. A bare enum value is no JSON, so it is asked for as vLLM's choice rather than as a schema."""
    kind = fields.text(config, "responseMimeType") or "text/plain"
    schema = _schema(config)
    if kind == "text/x.enum":
        return {"structured_outputs": {"choice": _values(schema)}}
    if kind == "application/json":
        if schema is None:
            return {"response_format": {"type": "json_object"}}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}}
    if kind != "text/plain":
        raise RequestError(
            f"responseMimeType must be text/plain, application/json or text/x.enum, not '{kind}'", param="responseMimeType"
        )
    if schema is not None:
        raise RequestError("a response schema needs responseMimeType application/json or text/x.enum", param="responseMimeType")
    return {}


def _schema(config: Mapping[str, Any]) -> dict[str, Any] | None:
    if "responseJsonSchema" in config:
        return dict(shallow(fields.mapping(config, "responseJsonSchema"), "responseJsonSchema"))
    return json_schema(config["responseSchema"], "responseSchema") if "responseSchema" in config else None


def _values(schema: Mapping[str, Any] | None) -> list[str]:
    values = fields.strings(schema, "enum") if schema is not None else []
    if not values:
        raise RequestError("responseMimeType text/x.enum needs a responseSchema with 'enum'", param="responseSchema")
    return values


def _think(made: Generation, config: Mapping[str, Any]) -> None:
    made.thoughts = fields.flag(config, "includeThoughts")
    if fields.integer(config, "thinkingBudget") == 0:
        made.template_kwargs["enable_thinking"] = False
    level = (fields.text(config, "thinkingLevel") or "THINKING_LEVEL_UNSPECIFIED").upper()
    if level in _EFFORTS:
        made.forward["reasoning_effort"] = level.lower()
    elif level != "THINKING_LEVEL_UNSPECIFIED":
        raise RequestError(f"thinkingLevel must be one of {', '.join(sorted(_EFFORTS))}, not '{level}'", param="thinkingLevel")
