"""The scripted engine's sampling routes: render, generate, derender, chat completions, tokenize and detokenize."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from scripted_sampling import Broken, EngineError, Fail, Generation, Say, Step
from scripted_wire import (
    chat_answer,
    chat_choice,
    chat_chunk,
    chat_logprobs,
    error_body,
    generate_answer,
    generate_body,
    generate_choice,
    generate_chunk,
    message_of,
    sampling_params,
    streamed_usage,
    usage_of,
)
from template_families import Family
from template_markup import Parsed

if TYPE_CHECKING:
    from scripted_engine import Exchange, Route, ScriptedEngine

MODEL = "policy"
ENGINE_ERROR = Fail(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")


class Refused(Exception):
    def __init__(self, fault: Fail) -> None:
        super().__init__(fault.message)
        self.fault = fault


class SamplingCalls:
    def __init__(self, engine: ScriptedEngine, *, ids: bool) -> None:
        self._engine = engine
        self._ids = ids
        self.routes: dict[tuple[str, str], Route] = {
            ("POST", "/v1/chat/completions/render"): self.render,
            ("POST", "/v1/chat/completions/derender"): self.derender,
            ("POST", "/inference/v1/generate"): self.generate,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
        }

    @property
    def _family(self) -> Family:
        return self._engine.family

    async def render(self, exchange: Exchange, body: Any) -> None:
        try:
            ids = self._rendered(body)
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        room = self._engine.max_model_len - len(ids)
        await exchange.answer(generate_body(body, ids, f"chatcmpl-{_request_id(exchange, body)}", room))

    def _rendered(self, body: Mapping[str, Any]) -> list[int]:
        """The ids of a chat request. Raises Refused as vLLM would."""
        _need(body, "messages")
        _check_model(body)
        window = self._engine.max_model_len
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        if asked > window:
            message = f"max_tokens={asked} cannot be greater than max_model_len={window}. Please request fewer output tokens."
            raise Refused(_bad(message, "max_tokens"))
        kwargs = {"add_generation_prompt": body.get("add_generation_prompt", True), **(body.get("chat_template_kwargs") or {})}
        try:
            ids = self._family.render(body["messages"], body.get("tools"), **kwargs)
        except jinja2.TemplateError as error:
            raise Refused(_bad(str(error), None)) from error
        if len(ids) > window:
            message = (
                f"This model's maximum context length is {window} tokens. However, your prompt contains at least {window + 1} "
                "input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt."
            )
            raise Refused(_bad(message, "input_tokens"))
        return ids

    async def generate(self, exchange: Exchange, body: Any) -> None:
        try:
            _need(body, "token_ids", "sampling_params")
            _check_model(body)
            window, count = self._engine.max_model_len, len(body["token_ids"])
            if count > window:
                raise Refused(_bad(f"Input length ({count}) exceeds model's maximum context length ({window}).", None))
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        request_id = f"generate-tokens-{_request_id(exchange, body)}"
        generation = self._generation(exchange, body, request_id, body["token_ids"], body["sampling_params"])
        answer = _GenerateStream(exchange, generation) if generation.stream else _GenerateWhole(exchange, generation)
        await self._sample(exchange, generation, answer)

    async def chat(self, exchange: Exchange, body: Any) -> None:
        try:
            ids = self._rendered(body)
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        request_id = f"chatcmpl-{_request_id(exchange, body)}"
        sampling = sampling_params(body, self._engine.max_model_len - len(ids))
        generation = self._generation(exchange, body, request_id, ids, sampling)
        shape = _ChatStream if generation.stream else _ChatWhole
        await self._sample(exchange, generation, shape(exchange, generation, self._family, self._ids))

    def _generation(
        self, exchange: Exchange, body: Any, request_id: str, ids: list[int], sampling: dict[str, Any]
    ) -> Generation:
        generation = Generation(
            path=exchange.path,
            body=body,
            headers=exchange.headers,
            request_id=request_id,
            prompt_ids=ids,
            prompt=self._family.decode(ids),
            messages=body.get("messages"),
            tools=body.get("tools") or [],
            sampling=sampling,
            stream=bool(body.get("stream")),
        )
        self._engine.generations.append(generation)
        return generation

    async def _sample(self, exchange: Exchange, generation: Generation, answer: _Answer) -> None:
        """Sample what the script says until the end, an abort, or the client's hanging up."""
        from scripted_engine import misfortune

        replies = [self._engine.reply_to(generation, index) for index in range(generation.n)]
        says = [reply for reply in replies if isinstance(reply, Say)]
        fault = next((reply for reply in replies if not isinstance(reply, Say)), None)
        if fault is not None:
            await misfortune(exchange, fault)
            return
        gone = asyncio.ensure_future(exchange.gone())
        work = asyncio.ensure_future(self._run(exchange, generation, says, answer))
        await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            generation.disconnected = True
            work.cancel()
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _run(self, exchange: Exchange, generation: Generation, says: Sequence[Say], answer: _Answer) -> None:
        sampler = self._engine.sampler
        await sampler.admitting.wait()
        sampler.running.add(generation)
        try:
            async for step in _merged(
                [sampler.steps(generation, n, say, self._engine.max_model_len) for n, say in enumerate(says)]
            ):
                await answer.step(step)
            await answer.end()
        except Broken:
            exchange.break_off()
        except EngineError:
            await answer.fail(ENGINE_ERROR)
        finally:
            sampler.running.discard(generation)

    async def derender(self, exchange: Exchange, body: Any) -> None:
        """Parse whole replies, or one step of a stream. As in vLLM the text is that of all ids, a stop token's included."""
        if body.get("stream"):
            await self._derender_step(exchange, body)
            return
        try:
            _need(body, "generate_response")
            if body.get("chat_request") is None:
                raise Refused(_bad("chat_request is required when a tool or reasoning parser is configured", None))
            answer, request = body["generate_response"], body["chat_request"]
            for choice in answer["choices"]:
                if not choice.get("token_ids"):
                    raise Refused(_bad(f"choice {choice['index']} has empty or null token_ids", None))
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        prompt_ids = body.get("prompt_token_ids") or answer.get("prompt_token_ids") or []
        choices = [self._derendered(choice, request, prompt_ids) for choice in answer["choices"]]
        completion = sum(len(choice["token_ids"]) for choice in answer["choices"])
        usage = usage_of(body.get("prompt_tokens") or 0, completion) | {"prompt_tokens_details": None}
        await exchange.answer(chat_answer(answer["request_id"], body.get("model") or MODEL, choices, usage, None))

    def _derendered(self, choice: Mapping[str, Any], request: Mapping[str, Any], prompt_ids: Sequence[int]) -> dict[str, Any]:
        parsed = _parse(self._family, choice["token_ids"], request, self._family.decode(prompt_ids[-4:]))
        calls = [_tool_call(os.urandom(16).hex(), name, arguments) for name, arguments in parsed.calls]
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = chat_logprobs(self._family, content) if content is not None else None
        ids = choice["token_ids"] if request.get("return_token_ids") else None
        message = message_of(parsed, calls)
        return chat_choice(choice["index"], message, logprobs, choice.get("finish_reason"), choice.get("stop_reason"), ids)

    async def _derender_step(self, exchange: Exchange, body: Any) -> None:
        """The delta that one chunk of a stream makes certain. All state is the client's: see vLLM's DerenderStreamState."""
        window = self._engine.max_model_len
        state = body.get("stream_state") or {"output_token_ids": [], "output_chunk_lens": [], "role_sent": False}
        try:
            _need(body, "generate_chunk", "chat_request", "prompt_token_ids")
            before, (choice,) = state["output_token_ids"], body["generate_chunk"]["choices"]
            ids = [*before, *(choice.get("token_ids") or ())]
            if len(body["prompt_token_ids"]) + len(ids) > window:
                raise Refused(_bad(f"prompt_token_ids plus output_token_ids exceeds max_model_len ({window}).", None))
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        live = Live(self._family, body["chat_request"], self._family.decode(body["prompt_token_ids"][-4:]))
        live.tell(self._family.decode(before), None)
        finish_reason = choice.get("finish_reason")
        delta, called = live.tell(self._family.decode(ids), finish_reason)
        if not state["role_sent"]:
            delta = {"role": "assistant", **delta}
        finish_reason = "tool_calls" if called and _is_auto(body["chat_request"]) else finish_reason
        told = {"index": choice.get("index", 0), "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        told |= {"stop_reason": choice.get("stop_reason"), "token_ids": None}
        lengths = [*state["output_chunk_lens"], len(ids) - len(before)]
        following = {**state, "output_token_ids": ids, "output_chunk_lens": [n for n in lengths if n], "role_sent": True}
        chunk = chat_chunk(body["generate_chunk"].get("request_id", ""), body.get("model") or MODEL, [told])
        await exchange.answer({"chunk": chunk, "stream_state": following})

    async def tokenize(self, exchange: Exchange, body: Any) -> None:
        if "messages" in body:
            kwargs = {"add_generation_prompt": body.get("add_generation_prompt", True)}
            ids = self._family.render(body["messages"], body.get("tools"), **kwargs, **(body.get("chat_template_kwargs") or {}))
        elif "prompt" in body:
            ids = self._family.encode(body["prompt"])
        else:
            await exchange.fail(_missing("prompt"))
            return
        strings = [self._family.tokenizer.id_to_token(one) for one in ids] if body.get("return_token_strs") else None
        answer = {"count": len(ids), "max_model_len": self._engine.max_model_len, "tokens": ids, "token_strs": strings}
        await exchange.answer(answer)

    async def detokenize(self, exchange: Exchange, body: Any) -> None:
        if "tokens" not in body:
            await exchange.fail(_missing("tokens"))
            return
        await exchange.answer({"prompt": self._family.decode(body["tokens"])})


class _Answer:
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


class _Gathered(_Answer):
    def __init__(self, exchange: Exchange, generation: Generation) -> None:
        super().__init__(exchange, generation)
        self.steps: list[list[Step]] = [[] for _ in range(generation.n)]

    async def step(self, step: Step) -> None:
        self.steps[step.index].append(step)


class _GenerateWhole(_Gathered):
    async def end(self) -> None:
        wanted = self.generation.sampling.get("logprobs") is not None
        choices = [generate_choice(index, steps, wanted) for index, steps in enumerate(self.steps)]
        await self.exchange.answer(generate_answer(self.generation, MODEL, choices))


class _Stream(_Answer):
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


class _GenerateStream(_Stream):
    async def step(self, step: Step) -> None:
        await self.send(generate_chunk(self.generation, step, not self.opened))

    async def end(self) -> None:
        if (self.generation.body.get("stream_options") or {}).get("include_usage"):
            completion = sum(map(len, self.generation.sampled.values()))
            usage = usage_of(len(self.generation.prompt_ids), completion)
            await self.send({"request_id": self.generation.request_id, "usage": usage, "output_mode": "tokens", "choices": []})
        await self.exchange.close_stream()


class _ChatWhole(_Gathered):
    def __init__(self, exchange: Exchange, generation: Generation, family: Family, ids: bool) -> None:
        super().__init__(exchange, generation)
        self._family = family
        self._ids = ids and bool(generation.body.get("return_token_ids"))
        self._logprobs = ids and bool(generation.body.get("logprobs"))

    async def end(self) -> None:
        generation = self.generation
        choices = [self._choice(index, steps) for index, steps in enumerate(self.steps)]
        usage = usage_of(len(generation.prompt_ids), sum(map(len, generation.sampled.values())))
        prompt_ids = generation.prompt_ids if self._ids else None
        await self.exchange.answer(chat_answer(generation.request_id, MODEL, choices, usage, prompt_ids))

    def _choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        ids, last = self.generation.sampled[index], steps[-1]
        parsed = _parse(self._family, text_ids(ids, last), self.generation.body, self.generation.prompt)
        parsed = _cut(parsed, last.stop_reason)
        calls = [_tool_call(f"chatcmpl-tool-{os.urandom(8).hex()}", name, arguments) for name, arguments in parsed.calls]
        entries = [step.entry for step in steps if step.entry]
        logprobs = chat_logprobs(self._family, entries) if self._logprobs else None
        reason = (
            "tool_calls" if calls and last.finish_reason == "stop" and _is_auto(self.generation.body) else last.finish_reason
        )
        message = message_of(parsed, calls)
        return chat_choice(index, message, logprobs, reason, last.stop_reason, ids if self._ids else None)


class _ChatStream(_Stream):
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
        logprobs = chat_logprobs(self._family, [step.entry]) if self._logprobs and step.entry else None
        self._texts[step.index] += step.text
        delta, called = self._live[step.index].tell(self._texts[step.index], step.finish_reason)
        choice: dict[str, Any] = {"index": step.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if step.finish_reason:
            auto = called and step.finish_reason == "stop" and _is_auto(self.generation.body)
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
            usage = streamed_usage(len(self.generation.prompt_ids), sum(map(len, self.generation.sampled.values())))
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
            delta["tool_calls"] = [piece for n, call in enumerate(parsed.calls) for piece in _call_deltas(n, *call)]
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
    return Parsed(reasoning, content, parsed.calls)


def _parse(family: Family, ids: Sequence[int], request: Mapping[str, Any], prompt: str) -> Parsed:
    return family.parse(family.decode(ids), tools=_offers_tools(request), prompt=prompt)


def _offers_tools(request: Mapping[str, Any]) -> bool:
    return bool(request.get("tools")) and request.get("tool_choice") != "none"


def _is_auto(request: Mapping[str, Any]) -> bool:
    return not isinstance(request.get("tool_choice"), dict)


def _tool_call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_deltas(position: int, name: str, arguments: str) -> list[dict[str, Any]]:
    """A call in two pieces, name first, as vLLM streams it."""
    head = {"index": position, **_tool_call(f"chatcmpl-tool-{os.urandom(8).hex()}", name, "")}
    return [head, {"index": position, "function": {"arguments": arguments}}]


def _request_id(exchange: Exchange, body: Mapping[str, Any]) -> str:
    return exchange.headers.get("x-request-id") or body.get("request_id") or os.urandom(8).hex()


def _bad(message: str, param: str | None) -> Fail:
    return Fail(400, message, "BadRequestError", param)


def _missing(name: str) -> Fail:
    message = f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required'}}"
    return Fail(400, message, "Bad Request", f"body.{name}")


def _need(body: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in body:
            raise Refused(_missing(name))


def _check_model(body: Mapping[str, Any]) -> None:
    if body.get("model") not in (None, MODEL):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {MODEL}."
        raise Refused(Fail(404, message, "NotFoundError", "model"))


async def _merged(streams: Sequence[AsyncIterator[Step]]) -> AsyncIterator[Step]:
    """The steps of several choices as they come."""
    if len(streams) == 1:
        async for step in streams[0]:
            yield step
        return
    queue: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(stream, queue)) for stream in streams]
    try:
        open_streams = len(streams)
        while open_streams:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _pump(stream: AsyncIterator[Step], queue: asyncio.Queue[Step | BaseException | None]) -> None:
    try:
        async for step in stream:
            queue.put_nowait(step)
        queue.put_nowait(None)
    except (Broken, EngineError) as error:
        queue.put_nowait(error)
