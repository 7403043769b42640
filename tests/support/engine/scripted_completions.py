"""The scripted engine's completions: a prompt of text or ids instead of messages, and generate's own telling of text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.support.engine.scripted_answers import MODEL, Answer, GenerateStream, GenerateWhole, StreamAnswer, WholeAnswer
from tests.support.engine.scripted_calls import Refused, SamplingCalls, bad, check_model, need, request_id
from tests.support.engine.scripted_details import prompt_logprobs, routed_experts
from tests.support.engine.scripted_sampling import Generation, Step
from tests.support.engine.scripted_wire import (
    chat_logprobs,
    generate_answer,
    generate_body,
    generate_choice,
    generate_chunk,
    sampling_params,
    streamed_usage,
    usage_of,
    usage_of_generation,
)
from tests.support.engine.template_families import Family

if TYPE_CHECKING:
    from tests.support.engine.scripted_engine import Exchange, ScriptedEngine

_DEFAULT_MAX_TOKENS = 16


class CompletionCalls(SamplingCalls):
    def __init__(self, engine: ScriptedEngine, *, ids: bool) -> None:
        super().__init__(engine, ids=ids)
        self.routes |= {
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/v1/completions/render"): self.render_prompt,
            ("POST", "/v1/completions/derender"): self.derender_text,
        }

    async def completions(self, exchange: Exchange, body: Any) -> None:
        try:
            ids = self._prompt_ids(body)
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        name = f"cmpl-{request_id(exchange, body)}"
        sampling = completion_params(body, self._engine.max_model_len - len(ids))
        generation = self._generation(exchange, body, f"{name}-0", ids, sampling)
        generation.bend_scores = self._engine.bend_scores
        shape = CompletionStream if generation.stream else CompletionWhole
        await self._sample(exchange, generation, shape(exchange, generation, self._family, self._ids))

    async def render_prompt(self, exchange: Exchange, body: Any) -> None:
        try:
            ids = self._prompt_ids(body)
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        rendered = generate_body(body, ids, f"cmpl-{request_id(exchange, body)}", 0)
        await exchange.answer([rendered | {"sampling_params": completion_params(body, self._engine.max_model_len - len(ids))}])

    async def derender_text(self, exchange: Exchange, body: Any) -> None:
        asked = body.get("completion_request") or {}
        try:
            need(body, "generate_responses")
            choices = [choice for answer in body["generate_responses"] for choice in answer["choices"]]
            for choice in choices:
                if not choice.get("token_ids"):
                    raise Refused(bad(f"choice {choice['index']} in response x has empty or null token_ids", None))
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        skip = asked.get("skip_special_tokens", True)
        told = [
            completion_choice(n, complete(self._family, choice["token_ids"], skip), None, choice.get("finish_reason"), None)
            for n, choice in enumerate(choices)
        ]
        usage = usage_of(0, sum(len(choice["token_ids"]) for choice in choices)) | {"prompt_tokens_details": None}
        name = body["generate_responses"][0].get("request_id", "")
        await exchange.answer(completion_answer(name, told, usage))

    def _prompt_ids(self, body: Mapping[str, Any]) -> list[int]:
        """The ids of the one prompt. Raises Refused as vLLM would."""
        check_model(body, self._engine.names)
        prompt = body.get("prompt")
        if not prompt:
            message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            raise Refused(bad(message, "prompt"))
        self._check_asked(body.get("max_tokens") or 0)
        ids = list(prompt) if isinstance(prompt, list) else self._tokenized(prompt, body.get("add_special_tokens", True))
        self._check_fits(ids)
        return ids

    def _tokenized(self, text: str, special: bool) -> list[int]:
        family = self._family
        return ([family.id_of(family.bos)] if special and family.bos else []) + family.encode(text)

    def _generate_answer(self, exchange: Exchange, generation: Generation) -> Answer:
        if generation.body.get("output_mode") != "text":
            return super()._generate_answer(exchange, generation)
        shape = TextStream if generation.stream else TextWhole
        return shape(exchange, generation, self._family)


def completion_params(request: Mapping[str, Any], room: int) -> dict[str, Any]:
    """The sampling parameters of a completion request; special tokens do not show in its text."""
    params = sampling_params({**request, "logprobs": None}, room)
    params["max_tokens"] = min(room, request.get("max_tokens") or _DEFAULT_MAX_TOKENS)
    params["skip_special_tokens"] = request.get("skip_special_tokens", True)
    if request.get("logprobs") is not None:
        params["logprobs"] = request["logprobs"]
    return params


class Spoken:
    """One choice's text as it becomes certain: what may be the beginning of a stop string is held back."""

    def __init__(self, family: Family, generation: Generation) -> None:
        stop = generation.sampling.get("stop") or ()
        self._held = max((len(item) for item in ((stop,) if isinstance(stop, str) else stop)), default=1) - 1
        self._skip = bool(generation.sampling.get("skip_special_tokens", True))
        self._family = family
        self._ids: list[int] = []
        self._text = ""
        self._told = 0

    def tell(self, step: Step) -> str:
        """What is new with this step."""
        self._ids += [step.token_id] if step.token_id is not None else []
        self._text += step.text
        if isinstance(step.stop_reason, str):
            whole = self._family.decode(self._ids, skip_special=self._skip)
            self._text = whole[: whole.index(step.stop_reason)]
        end = len(self._text) if step.finish_reason else max(self._told, len(self._text) - self._held)
        new, self._told = self._text[self._told : end], end
        return new


class TextWhole(GenerateWhole):
    def __init__(self, exchange: Exchange, generation: Generation, family: Family) -> None:
        super().__init__(exchange, generation)
        self._family = family

    async def end(self) -> None:
        wanted = self.generation.sampling.get("logprobs") is not None
        choices = []
        for index, steps in enumerate(self.steps):
            spoken = Spoken(self._family, self.generation)
            choice = generate_choice(index, steps, wanted) | {"text": "".join(map(spoken.tell, steps))}
            choice["routed_experts"] = routed_experts(self.generation, index)
            choices.append(_with_strings(self._family, choice))
        await self.exchange.answer(generate_answer(self.generation, MODEL, choices) | {"output_mode": "text"})


class TextStream(GenerateStream):
    def __init__(self, exchange: Exchange, generation: Generation, family: Family) -> None:
        super().__init__(exchange, generation)
        self._family = family
        self._spoken = [Spoken(family, generation) for _ in range(generation.n)]

    async def step(self, step: Step) -> None:
        chunk = generate_chunk(self.generation, step, not self.opened) | {"output_mode": "text"}
        (choice,) = chunk["choices"]
        choice["text"] = self._spoken[step.index].tell(step)
        chunk["choices"] = [_with_strings(self._family, choice)]
        await self.send(chunk)


def _with_strings(family: Family, choice: dict[str, Any]) -> dict[str, Any]:
    """A generate choice with its logprobs in the chat shape."""
    if choice["logprobs"] is not None:
        choice["logprobs"] = chat_logprobs(family, choice["logprobs"]["content"])
    return choice


class CompletionWhole(WholeAnswer):
    def __init__(self, exchange: Exchange, generation: Generation, family: Family, ids: bool) -> None:
        super().__init__(exchange, generation)
        self._family = family
        self._ids = ids

    async def end(self) -> None:
        generation = self.generation
        usage = usage_of_generation(generation)
        choices = [self._choice(index, steps) for index, steps in enumerate(self.steps)]
        await self.exchange.answer(completion_answer(generation.request_id.removesuffix("-0"), choices, usage))

    def _choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        spoken, last = Spoken(self._family, self.generation), steps[-1]
        text = "".join(map(spoken.tell, steps))
        logprobs = legacy_logprobs(self._family, steps, 0) if self._ids and wants_logprobs(self.generation) else None
        choice = completion_choice(index, text, logprobs, last.finish_reason, last.stop_reason)
        if self._ids and self.generation.body.get("return_token_ids"):
            choice |= {"token_ids": self.generation.sampled[index], "prompt_token_ids": self.generation.prompt_ids}
            choice["prompt_logprobs"] = prompt_logprobs(self.generation)
        return choice


class CompletionStream(StreamAnswer):
    def __init__(self, exchange: Exchange, generation: Generation, family: Family, ids: bool) -> None:
        super().__init__(exchange, generation)
        self._family = family
        self._ids = ids
        self._spoken = [Spoken(family, generation) for _ in range(generation.n)]
        self._offsets = [0] * generation.n
        self._begun: set[int] = set()

    async def step(self, step: Step) -> None:
        logprobs = None
        if self._ids and wants_logprobs(self.generation):
            logprobs = legacy_logprobs(self._family, [step], self._offsets[step.index])
            self._offsets[step.index] += sum(map(len, logprobs["tokens"]))
        wanted = self._ids and bool(self.generation.body.get("return_token_ids"))
        prompt_ids = self.generation.prompt_ids if wanted and step.index not in self._begun else None
        self._begun.add(step.index)
        choice = {"index": step.index, "text": self._spoken[step.index].tell(step), "logprobs": logprobs}
        choice |= {"finish_reason": step.finish_reason, "stop_reason": step.stop_reason, "prompt_token_ids": prompt_ids}
        choice["token_ids"] = ([step.token_id] if step.token_id is not None else []) if wanted else None
        await self.send(self._chunk([choice]))

    async def end(self) -> None:
        if (self.generation.body.get("stream_options") or {}).get("include_usage"):
            await self.send(self._chunk([]) | {"usage": streamed_usage(self.generation)})
        await self.exchange.close_stream()

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.generation.request_id.removesuffix("-0"), "object": "text_completion", "created": int(time.time())}
        return {**head, "model": MODEL, "choices": choices}


def wants_logprobs(generation: Generation) -> bool:
    return generation.body.get("logprobs") is not None


def complete(family: Family, ids: Sequence[int], skip_special: bool) -> str:
    """The text of `ids` without an unfinished character at the end."""
    return family.decode(ids, skip_special=skip_special).rstrip("\ufffd")


def legacy_logprobs(family: Family, steps: Sequence[Step], offset: int) -> dict[str, Any]:
    """The completions' parallel lists of the steps that sampled something."""
    entries = chat_logprobs(family, [step.entry for step in steps if step.entry])["content"]
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "text_offset": offsets,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "tokens": [entry["token"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
    }


def completion_choice(index: int, text: str, logprobs: Any, finish_reason: str | None, stop_reason: Any) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }


def completion_answer(name: str, choices: list[dict[str, Any]], usage: Any) -> dict[str, Any]:
    return {
        "id": name,
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
