"""OpenAI's legacy completions: `/v1/completions`, a prompt of text or token ids and what the model says after it.

One prompt per request; several are refused, as are a suffix, echo with logprobs (nobody knows the logprobs of a prompt that was
not sampled) and echo of token ids. `return_token_ids` gives the ids of prompt and completion, as in vLLM: a harness that sends
them back, and more ids after them, grows one row. Shapes as the openai SDK parses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import Asked, Choice, Delta, ErrorAnswer, Past, Reply, Request, Seen, retry_headers
from proxy.dialects.chat import openai_error, openai_usage
from proxy.dialects.fields import decode
from proxy.errors import RequestError, VerbatimError
from proxy.structure import MAX_VALUES, check_values
from reconstruct.messages import Digests

_encode = msgspec.json.Encoder().encode

_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop")}

MAX_PROMPT_VALUES = 8 * MAX_VALUES
"""Values of a body here: those of a prompt of token ids, which cost less than parts of messages do."""

_DEFAULT_MAX_TOKENS = 16
"""What the API says when a request does not."""

_REFUSED = {
    "suffix": "'suffix' is not supported: text is only added at the end",
    "prompt_embeds": "'prompt_embeds' is not supported: a prompt is text or token ids",
    "truncate_prompt_tokens": "'truncate_prompt_tokens' is not supported: a prompt is taken as it is",
    "use_beam_search": "'use_beam_search' is not supported: its tokens are not sampled",
}

_CONSUMED = frozenset(
    {"model", "prompt", "stream", "stream_options", "n", "best_of", "logprobs", "echo", "return_token_ids", *_SAMPLING}
    | {"user", "store", "metadata", "service_tier", "request_id", "return_tokens_as_token_ids", "prompt_logprobs"}
    | {"return_token_offsets", "logprob_token_ids", *_REFUSED}
)
"""Body fields that are parsed, or that mean nothing to an engine, or that would change what is recorded."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class CompletionsDialect:
    name = "completions"

    def parse(self, asked: Asked, past: Past) -> Request:
        """The canonical request, with the prompt beside its history: proxy.call.prompts tells that. Raises RequestError naming the
        field and the rule it broke."""
        check_values(asked.body, MAX_PROMPT_VALUES, "the body")
        body = decode(asked.body)
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        for name, reason in _REFUSED.items():
            if body.get(name):
                raise RequestError(reason, param=name)
        fields.refuse_continuation(body)
        prompt, count = _prompt(body), fields.choices(body, "n")
        if fields.positive(body, "best_of") not in (None, count):
            raise RequestError("'best_of' must equal 'n': every sampled choice is returned", param="best_of")
        return Request(
            dialect=self.name,
            model=fields.model(body),
            history=[_untold(prompt)],
            prompt=prompt,
            sampling={"max_tokens": _DEFAULT_MAX_TOKENS, **fields.sampling(body, _SAMPLING)},
            forward={key: value for key, value in body.items() if key not in _CONSUMED and value is not None},
            n=count,
            stream=fields.flag(body, "stream"),
            include_usage=bool(fields.mapping(body, "stream_options").get("include_usage")),
            top_logprobs=_logprobs(body),
            echo=_echoed(body, prompt),
            wants_ids=fields.flag(body, "return_token_ids"),
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        head = _head(request, reply.reply_id, reply.created)
        choices = [_choice(request, reply, choice) for choice in reply.choices]
        return _encode({**head, "choices": choices, "usage": openai_usage(reply)})

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> CompletionsStream:
        return CompletionsStream(request, reply_id, created)

    def error(self, error: VerbatimError) -> ErrorAnswer:
        return ErrorAnswer(error.status, retry_headers(error), _encode({"error": openai_error(error)}))

    def errs_in_stream(self, error: VerbatimError) -> bool:
        return False


class CompletionsStream:
    """Renders one reply as server-sent completion chunks; the prompt, where it is echoed, is the first text of each choice."""

    def __init__(self, request: Request, reply_id: str, created: int) -> None:
        self._request = request
        self._head = _head(request, reply_id, created)
        self._offsets = dict.fromkeys(range(request.n), 0)
        self._spoken: set[int] = set()

    def open(self) -> bytes:
        if not self._request.echo:
            return b""
        return b"".join(self._chunk(_piece(index, self._request.echo)) for index in range(self._request.n))

    def delta(self, delta: Delta) -> bytes:
        self._spoken.add(delta.index)
        piece = _piece(delta.index, delta.content)
        if self._request.top_logprobs is not None and delta.logprobs:
            piece["logprobs"] = legacy_logprobs(delta.logprobs, self._offsets[delta.index])
            self._offsets[delta.index] += sum(len(entry["token"]) for entry in delta.logprobs)
        if self._request.wants_ids:
            piece["token_ids"] = delta.token_ids
        return self._chunk(piece)

    def keep_alive(self) -> bytes:
        return self._chunk(_piece(0, ""))

    def close(self, reply: Reply) -> bytes:
        events = [event for choice in reply.choices for event in self._ending(reply, choice)]
        if self._request.include_usage:
            events.append(_event({**self._head, "choices": [], "usage": openai_usage(reply)}))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def error(self, error: VerbatimError) -> bytes:
        return _event({"error": openai_error(error)})

    def _ending(self, reply: Reply, choice: Choice) -> list[bytes]:
        """What no delta carried of the choice, and its finish."""
        events = []
        text = choice.message.get("content") or ""
        if choice.index not in self._spoken and (text or choice.token_ids):
            events.append(self.delta(Delta(choice.index, text, logprobs=choice.logprobs or (), token_ids=choice.token_ids)))
        piece = _piece(choice.index, "", choice.finish_reason)
        if self._request.wants_ids:
            piece |= {"token_ids": [], "prompt_token_ids": reply.prompt_ids}
        return [*events, self._chunk(piece)]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return _event({**self._head, "choices": [choice]})


def legacy_logprobs(entries: Sequence[Mapping[str, Any]], offset: int = 0) -> dict[str, Any]:
    """Chat-shaped logprobs as the parallel lists of this API; `offset` is where the first token's text begins."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry.get("top_logprobs") or ()} for entry in entries],
        "text_offset": offsets,
    }


def _head(request: Request, reply_id: str, created: int) -> dict[str, Any]:
    return {"id": f"cmpl-{reply_id}", "object": "text_completion", "created": created, "model": request.model}


def _event(payload: Any) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"


def _piece(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _choice(request: Request, reply: Reply, choice: Choice) -> dict[str, Any]:
    told = _piece(choice.index, request.echo + (choice.message.get("content") or ""), choice.finish_reason)
    if choice.logprobs is not None:
        told["logprobs"] = legacy_logprobs(choice.logprobs)
    if request.wants_ids:
        told |= {"token_ids": choice.token_ids, "prompt_token_ids": reply.prompt_ids}
    return told


def _prompt(body: Mapping[str, Any]) -> str | list[int]:
    """The one prompt of a request: text, or token ids; alone, or as a list of one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise RequestError(f"'prompt' holds {len(prompt)} prompts: send one request for each", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    try:
        ids: list[int] = msgspec.convert(prompt, Annotated[list[TokenId], msgspec.Meta(min_length=1)])
        return ids
    except msgspec.ValidationError as error:
        raise RequestError("'prompt' must be a non-empty string or list of token ids", param="prompt") from error


def _untold(prompt: str | list[int]) -> Seen:
    """The history until it is known which call the prompt goes on from; rules for roles look at its text."""
    return Seen({"role": "prompt", "content": prompt if isinstance(prompt, str) else ""}, Digests(b"", False))


def _logprobs(body: Mapping[str, Any]) -> int | None:
    count = fields.integer(body, "logprobs")
    if count is not None and count < 0:
        raise RequestError("'logprobs' must not be negative", param="logprobs")
    return count


def _echoed(body: Mapping[str, Any], prompt: str | list[int]) -> str:
    """The text to put before every choice."""
    if not fields.flag(body, "echo"):
        return ""
    if body.get("logprobs") is not None:
        raise RequestError("'echo' with 'logprobs' is not supported: the prompt's logprobs are not known", param="echo")
    if not isinstance(prompt, str):
        raise RequestError("'echo' needs a text prompt; 'return_token_ids' gives token ids back", param="echo")
    return prompt
