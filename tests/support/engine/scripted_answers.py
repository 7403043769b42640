"""How sampled steps become vLLM's answers: whole or streamed, of generate and of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.engine.scripted_details import prompt_logprobs, routed_experts
from tests.support.engine.scripted_sampling import Fail, Generation, Step
from tests.support.engine.scripted_wire import (
    chat_answer,
    chat_choice,
    chat_chunk,
    chat_logprobs,
    error_body,
    generate_answer,
    generate_choice,
    generate_chunk,
    message_of,
    streamed_usage,
    usage_of_generation,
)
from tests.support.engine.template_families import Family
from tests.support.engine.template_markup import Parsed

if TYPE_CHECKING:
    from tests.support.engine.scripted_engine import Exchange

MODEL = "policy"


class Answer:
    """How steps become an answer."""

    def __init__(self, exchange: Exchange, generation: Generation) -> None:
        self.exchange = exchange
        self.generation = generation

    async def step(self, step: Step) -> None:
        raise AssertionError

    async def end(self) -> None:
        raise AssertionError

    async def fail(self, fault: Fail) -> None:
        await self.exchange.fail(fault)


class WholeAnswer(Answer):
    def __init__(self, exchange: Exchange, generation: Generation) -> None:
        super().__init__(exchange, generation)
        self.steps: list[list[Step]] = [[] for _ in range(generation.n)]

    async def step(self, step: Step) -> None:
        self.steps[step.index].append(step)


class GenerateWhole(WholeAnswer):
    async def end(self) -> None:
        wanted = self.generation.sampling.get("logprobs") is not None
        choices = [
            generate_choice(index, steps, wanted) | {"routed_experts": routed_experts(self.generation, index)}
            for index, steps in enumerate(self.steps)
        ]
        await self.exchange.answer(generate_answer(self.generation, MODEL, choices))


class GenerateParsed(WholeAnswer):
    """As vLLM 0.33 answers `output_mode: derender`: with messages, chat-shaped logprobs and a chat's finish reasons."""

    def __init__(self, exchange: Exchange, generation: Generation, family: Family) -> None:
        super().__init__(exchange, generation)
        self._family = family

    async def end(self) -> None:
        choices = [self._choice(index, steps) for index, steps in enumerate(self.steps)]
        await self.exchange.answer(generate_answer(self.generation, MODEL, choices) | {"output_mode": "derender"})

    def _choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        context = self.generation.body["parse_context"]
        choice = generate_choice(index, steps, True)
        ids, ended = choice["token_ids"], choice["finish_reason"] == "stop" and not isinstance(choice["stop_reason"], str)
        parsed = parse(self._family, ids[:-1] if ended else ids, context, self._family.decode(self.generation.prompt_ids[-4:]))
        message = message_of(parsed, [tool_call("random", name, arguments) for name, arguments in parsed.calls])
        if isinstance(stop := choice["stop_reason"], str):
            message["content"] = message["content"][: message["content"].index(stop)]
        called = parsed.calls and choice["finish_reason"] == "stop" and is_auto(context)
        told = {"message": message, "finish_reason": "tool_calls" if called else choice["finish_reason"]}
        return choice | told | {"logprobs": chat_logprobs(self._family, choice["logprobs"]["content"])}


class StreamAnswer(Answer):
    """Headers go out with the first event."""

    def __init__(self, exchange: Exchange, generation: Generation) -> None:
        super().__init__(exchange, generation)
        self.opened = False

    async def send(self, data: Any) -> None:
        if not self.opened:
            self.opened = True
            await self.exchange.open_stream()
        await self.exchange.event(data)

    async def fail(self, fault: Fail) -> None:
        await self.send(error_body(fault.status, fault.message, fault.type, fault.param))
        await self.exchange.close_stream()


class GenerateStream(StreamAnswer):
    async def step(self, step: Step) -> None:
        await self.send(generate_chunk(self.generation, step, not self.opened))

    async def end(self) -> None:
        if (self.generation.body.get("stream_options") or {}).get("include_usage"):
            usage, mode = streamed_usage(self.generation), self.generation.body.get("output_mode") or "tokens"
            await self.send({"request_id": self.generation.request_id, "usage": usage, "output_mode": mode, "choices": []})
        await self.exchange.close_stream()


class ChatWhole(WholeAnswer):
    def __init__(self, exchange: Exchange, generation: Generation, family: Family, ids: bool) -> None:
        super().__init__(exchange, generation)
        self._family = family
        self._ids = ids and bool(generation.body.get("return_token_ids"))
        self._logprobs = ids and bool(generation.body.get("logprobs"))

    async def end(self) -> None:
        generation = self.generation
        choices = [self._choice(index, steps) for index, steps in enumerate(self.steps)]
        usage = usage_of_generation(generation)
        prompt_ids = generation.prompt_ids if self._ids else None
        answer = chat_answer(generation.request_id, MODEL, choices, usage, prompt_ids)
        await self.exchange.answer(answer | {"prompt_logprobs": prompt_logprobs(generation)})

    def _choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        ids, last = self.generation.sampled[index], steps[-1]
        parsed = parse(self._family, text_ids(ids, last), self.generation.body, self.generation.prompt)
        parsed = _cut(parsed, last.stop_reason)
        calls = [tool_call(*call) for call in self._family.markup.name_calls(parsed)]
        entries = [step.entry for step in steps if step.entry]
        as_ids = bool(self.generation.body.get("return_tokens_as_token_ids"))
        logprobs = chat_logprobs(self._family, entries, as_ids=as_ids) if self._logprobs else None
        reason = (
            "tool_calls" if calls and last.finish_reason == "stop" and is_auto(self.generation.body) else last.finish_reason
        )
        message = message_of(parsed, calls)
        choice = chat_choice(index, message, logprobs, reason, last.stop_reason, ids if self._ids else None)
        return choice | {"routed_experts": routed_experts(self.generation, index)}


class ChatStream(StreamAnswer):
    def __init__(self, exchange: Exchange, generation: Generation, family: Family, ids: bool) -> None:
        super().__init__(exchange, generation)
        self._family = family
        self._ids = ids and bool(generation.body.get("return_token_ids"))
        self._logprobs = ids and bool(generation.body.get("logprobs"))
        self._texts = [""] * generation.n
        self._live = [Live(family, generation.body, generation.prompt) for _ in range(generation.n)]

    async def step(self, step: Step) -> None:
        if not self.opened:
            await self._open()
        as_ids = bool(self.generation.body.get("return_tokens_as_token_ids"))
        logprobs = chat_logprobs(self._family, [step.entry], as_ids=as_ids) if self._logprobs and step.entry else None
        self._texts[step.index] += step.text
        delta, called = self._live[step.index].tell(self._texts[step.index], step.finish_reason)
        choice: dict[str, Any] = {"index": step.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if step.finish_reason:
            auto = called and step.finish_reason == "stop" and is_auto(self.generation.body)
            choice |= {"finish_reason": "tool_calls" if auto else step.finish_reason, "stop_reason": step.stop_reason}
        ids = [step.token_id] if step.token_id is not None else []
        choice["token_ids"] = ids if self._ids else None
        await self.send(chat_chunk(self.generation.request_id, MODEL, [choice]))

    async def _open(self) -> None:
        for index in range(self.generation.n):
            role = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
            prompt_ids = self.generation.prompt_ids if self._ids else None
            more = {"prompt_token_ids": prompt_ids, "prompt_text": None}
            await self.send(chat_chunk(self.generation.request_id, MODEL, [choice], **more))

    async def end(self) -> None:
        if (self.generation.body.get("stream_options") or {}).get("include_usage"):
            usage = streamed_usage(self.generation, created_cache_tokens=0)
            await self.send(chat_chunk(self.generation.request_id, MODEL, [], usage=usage))
        await self.exchange.close_stream()


class Live:
    """A reply told while its text grows: reasoning and content as they become certain, tool calls with the end."""

    def __init__(self, family: Family, request: Mapping[str, Any], prompt: str) -> None:
        self._family = family
        self._tools = _offers_tools(request)
        self._prompt = prompt
        self._reasoning = ""
        self._content = ""

    def tell(self, text: str, finish_reason: str | None) -> tuple[dict[str, Any], bool]:
        """What is new in `text`, and whether tools are called."""
        ended = finish_reason is not None
        certain = text if ended else self._family.markup.certain(text.rstrip("\ufffd"))
        parsed = self._family.parse(certain, tools=self._tools and ended, prompt=self._prompt)
        reasoning, content = parsed.reasoning or "", parsed.content or ""
        if not content.strip() and not ended:
            content = ""  # may be no more than the space before a tool call
        delta: dict[str, Any] = {}
        if len(reasoning) > len(self._reasoning):
            delta["reasoning"] = reasoning[len(self._reasoning) :]
        if len(content) > len(self._content):
            delta["content"] = content[len(self._content) :]
        if parsed.calls:
            calls = self._family.markup.name_calls(parsed)
            delta["tool_calls"] = [piece for n, call in enumerate(calls) for piece in call_deltas(n, *call)]
        self._reasoning, self._content = reasoning, content
        return delta, bool(parsed.calls)


def text_ids(ids: Sequence[int], last: Step) -> Sequence[int]:
    """The ids that show in the text: a stop token that ended the turn does not."""
    by_token = last.finish_reason == "stop" and not isinstance(last.stop_reason, str)
    return ids[:-1] if by_token else ids


def _cut(parsed: Parsed, stop: str | int | None) -> Parsed:
    """The text before the stop string."""
    if not isinstance(stop, str):
        return parsed
    reasoning, content = parsed.reasoning, parsed.content
    if content and stop in content:
        content = content[: content.index(stop)]
    elif reasoning and stop in reasoning:
        reasoning = reasoning[: reasoning.index(stop)]
    return replace(parsed, reasoning=reasoning, content=content)


def parse(family: Family, ids: Sequence[int], request: Mapping[str, Any], prompt: str) -> Parsed:
    return family.parse(family.decode(ids), tools=_offers_tools(request), prompt=prompt)


def _offers_tools(request: Mapping[str, Any]) -> bool:
    return bool(request.get("tools")) and request.get("tool_choice") != "none"


def is_auto(request: Mapping[str, Any]) -> bool:
    return not isinstance(request.get("tool_choice"), dict)


def tool_call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def call_deltas(position: int, identifier: str, name: str, arguments: str) -> list[dict[str, Any]]:
    """A call in two pieces, name first, as vLLM streams it."""
    head = {"index": position, **tool_call(identifier, name, "")}
    return [head, {"index": position, "function": {"arguments": arguments}}]
