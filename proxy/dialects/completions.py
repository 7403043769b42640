"""OpenAI's legacy completions: `/v1/completions`, a prompt of text or token ids and what the model samples after it.

Each prompt of an array is a call of its own (`SeveralCalls`), its choices numbered after those of the prompt before. Refused are a
suffix, echo with logprobs (the logprobs of a prompt that was not sampled are unknown) and echo of token ids. `return_token_ids` returns
the ids of prompt and completion, as vLLM does: a harness that sends them back with more ids after them grows one row. Shapes as the
openai SDK parses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from proxy.dialects import fields
from proxy.dialects.base import Choice, Delta, Endpoint, HistoryMessage, Incoming, Past, Reply, Request, SeveralCalls
from proxy.dialects.chat import ChunkStream, OpenAIDialect, build_usage
from proxy.dialects.fields import MAX_VALUES, TEXT, check_values, decode, encode, split_event
from proxy.errors import RequestError
from reconstruct.messages import Digests

_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop")}

MAX_PROMPT_VALUES = 8 * MAX_VALUES
"""Values in a body here: token ids cost less than parts of messages."""

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""

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
"""Body fields that are not forwarded: they are parsed here, mean nothing to an engine, or would change the record."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class CompletionsDialect(OpenAIDialect):
    name = "completions"
    title = "OpenAI completions (`/v1/completions`)"
    endpoints = (
        Endpoint(
            "call",
            "POST",
            "/v1/completions",
            "OpenAI completions",
            "A prompt of text or token ids, or an array of them.",
            {"model": "policy", "prompt": "Hello", "max_tokens": 32},
        ),
    )
    history_field = "prompt"
    operation = "text_completion"

    def parse(self, incoming: Incoming, past: Past) -> Request:
        """The canonical request with its prompt; proxy.call.prompts turns the prompt into a history."""
        check_values(incoming.body, MAX_PROMPT_VALUES, "the body")
        body = decode(incoming.body)
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        for name, reason in _REFUSED.items():
            if body.get(name):
                raise RequestError(reason, param=name)
        fields.refuse_continuation(body)
        split_prompts(body)
        prompt, count = _prompt(body), fields.choices(body, "n")
        if fields.positive(body, "best_of") not in (None, count):
            raise RequestError("'best_of' must equal 'n': every sampled choice is returned", param="best_of")
        return Request(
            dialect=self.name,
            model=fields.model(body),
            history=[_placeholder(prompt)],
            prompt=prompt,
            sampling={"max_tokens": _DEFAULT_MAX_TOKENS, **fields.sampling(body, _SAMPLING)},
            forward={key: value for key, value in body.items() if key not in _CONSUMED and value is not None},
            n=count,
            stream=fields.flag(body, "stream"),
            include_usage=bool(fields.mapping(body, "stream_options").get("include_usage")),
            top_logprobs=_logprobs(body),
            echo=_echo(body, prompt),
            wants_ids=fields.flag(body, "return_token_ids"),
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        choices = [_render_choice(request, reply, choice) for choice in reply.choices]
        return encode({**_head(request, reply.reply_id, reply.created), "choices": choices, "usage": build_usage(reply)})

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> CompletionsStream:
        return CompletionsStream(request, reply_id, created)


class CompletionsStream(ChunkStream):
    """An echoed prompt is the first text of each choice."""

    def __init__(self, request: Request, reply_id: str, created: int) -> None:
        super().__init__(request, _head(request, reply_id, created))
        self._offsets = dict.fromkeys(range(request.n), 0)
        self._is_plain = request.top_logprobs is None and not request.wants_ids
        self._texts = [split_event(self._chunk(_piece(index, TEXT))) for index in range(request.n)]

    def open(self) -> bytes:
        if not self._request.echo:
            return b""
        return b"".join(self._chunk(_piece(index, self._request.echo)) for index in range(self._request.n))

    def write(self, delta: Delta) -> bytes:
        self._begun.add(delta.index)
        if self._is_plain:
            return encode(delta.content).join(self._texts[delta.index])
        piece = _piece(delta.index, delta.content)
        if self._request.top_logprobs is not None and delta.logprobs:
            piece["logprobs"] = legacy_logprobs(delta.logprobs, self._offsets[delta.index])
            self._offsets[delta.index] += sum(len(entry["token"]) for entry in delta.logprobs)
        if self._request.wants_ids:
            piece["token_ids"] = delta.token_ids
        return self._chunk(piece)

    def keep_alive(self) -> bytes:
        return self._chunk(_piece(0, ""))

    def _finish(self, reply: Reply, choice: Choice) -> list[bytes]:
        events = []
        text = choice.message.get("content") or ""
        if choice.index not in self._begun and (text or choice.token_ids):
            events.append(self.write(Delta(choice.index, text, logprobs=choice.logprobs or (), token_ids=choice.token_ids)))
        piece = _piece(choice.index, "", choice.finish_reason)
        if self._request.wants_ids:
            piece |= {"token_ids": [], "prompt_token_ids": reply.prompt_ids}
        return [*events, self._chunk(piece)]


def legacy_logprobs(entries: Sequence[Mapping[str, Any]], offset: int = 0) -> dict[str, Any]:
    """Chat-shaped logprobs as this API's parallel lists; `offset`: where the first token's text begins, in characters."""
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


def _piece(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _render_choice(request: Request, reply: Reply, choice: Choice) -> dict[str, Any]:
    piece = _piece(choice.index, request.echo + (choice.message.get("content") or ""), choice.finish_reason)
    if choice.logprobs is not None:
        piece["logprobs"] = legacy_logprobs(choice.logprobs)
    if request.wants_ids:
        piece |= {"token_ids": choice.token_ids, "prompt_token_ids": reply.prompt_ids}
    return piece


def split_prompts(body: Mapping[str, Any]) -> None:
    """Raise SeveralCalls for an array of several prompts, and RequestError for one that is none or makes too many choices."""
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or len(prompts) < 2 or not isinstance(prompts[0], (str, list)):
        return
    bodies = [{**body, "prompt": prompt} for prompt in prompts]
    for prompt, each in zip(prompts, bodies, strict=True):
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            raise RequestError("'prompt' must not hold lists of prompts", param="prompt")
        _prompt(each)
    if len(prompts) * fields.choices(body, "n") > fields.MAX_CHOICES:
        raise RequestError(
            f"'prompt' holds {len(prompts)} prompts, and 'prompt' and 'n' together may make {fields.MAX_CHOICES} choices",
            param="prompt",
        )
    raise SeveralCalls([encode(each) for each in bodies])


def _prompt(body: Mapping[str, Any]) -> str | list[int]:
    """The one prompt: text or token ids, alone or in a list of one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    try:
        ids: list[int] = msgspec.convert(prompt, Annotated[list[TokenId], msgspec.Meta(min_length=1)])
        return ids
    except msgspec.ValidationError as error:
        raise RequestError("'prompt' must be a non-empty string or list of token ids", param="prompt") from error


def _placeholder(prompt: str | list[int]) -> HistoryMessage:
    """The history until the call that the prompt continues is found; rules for roles match its text."""
    return HistoryMessage({"role": "prompt", "content": prompt if isinstance(prompt, str) else ""}, Digests(b"", False))


def _logprobs(body: Mapping[str, Any]) -> int | None:
    count = fields.integer(body, "logprobs")
    if count is not None and count < 0:
        raise RequestError("'logprobs' must not be negative", param="logprobs")
    return count


def _echo(body: Mapping[str, Any], prompt: str | list[int]) -> str:
    """The text to put before every choice."""
    if not fields.flag(body, "echo"):
        return ""
    if body.get("logprobs") is not None:
        raise RequestError("'echo' with 'logprobs' is not supported: the prompt's logprobs are not known", param="echo")
    if not isinstance(prompt, str):
        raise RequestError("'echo' needs a text prompt; 'return_token_ids' gives token ids back", param="echo")
    return prompt
