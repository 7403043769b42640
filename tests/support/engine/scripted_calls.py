"""The scripted engine's sampling routes: render, generate, derender, chat completions, tokenize and detokenize."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from tests.support.engine.scripted_answers import (
    MODEL,
    Answer,
    ChatStream,
    ChatWhole,
    GenerateParsed,
    GenerateStream,
    GenerateWhole,
    Live,
    is_auto,
    parse,
    tool_call,
)
from tests.support.engine.scripted_images import ImagesRefused, check_number, data_of, expand, features, take_images
from tests.support.engine.scripted_sampling import Broken, EngineError, Fail, Generation, Say, Step
from tests.support.engine.scripted_wire import (
    chat_answer,
    chat_choice,
    chat_chunk,
    chat_logprobs,
    generate_body,
    message_of,
    sampling_params,
    usage_of,
)
from tests.support.engine.template_families import Family

if TYPE_CHECKING:
    from tests.support.engine.scripted_engine import Exchange, Route, ScriptedEngine

ENGINE_ERROR = Fail(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")

PAUSED = Fail(503, "Generation is paused. Please retry after it resumes.", "ServiceUnavailableError")


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
            ids, seen = self._rendered(body)
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        room = self._engine.max_model_len - len(ids)
        rendered = generate_body(body, ids, f"chatcmpl-{request_id(exchange, body)}", room, seen)
        rendered["sampling_params"] |= self._engine.adds
        if self._engine.parses_itself:
            context = {
                "tools": body.get("tools"),
                "tool_choice": body.get("tool_choice") or ("auto" if body.get("tools") else "none"),
            }
            rendered["parse_context"] = context | {"include_reasoning": body.get("include_reasoning", True)}
        await exchange.answer(rendered)

    def _rendered(self, body: Mapping[str, Any]) -> tuple[list[int], Any]:
        """The ids of a chat request, and the features of its images. Raises Refused as vLLM would."""
        need(body, "messages")
        check_model(body, self._engine.names)
        self._check_asked(body.get("max_completion_tokens") or body.get("max_tokens") or 0)
        kwargs = {"add_generation_prompt": body.get("add_generation_prompt", True), **(body.get("chat_template_kwargs") or {})}
        if body.get("reasoning_effort") is not None:
            kwargs.setdefault("reasoning_effort", body["reasoning_effort"])
        try:
            messages, images = take_images(body["messages"], self._engine.most_images, self._engine.model)
            ids, ranges = expand(self._family, self._family.render(messages, body.get("tools"), **kwargs), images)
        except (jinja2.TemplateError, LookupError) as error:
            # A template that looks for what a message does not have.
            raise Refused(bad(str(error), None)) from error
        except ImagesRefused as error:
            raise Refused(bad(error.message, error.param)) from error
        self._check_fits(ids)
        return ids, features(images, ranges, body.get("mm_payload", "tensors"))

    def _check_asked(self, max_tokens: int) -> None:
        window = self._engine.max_model_len
        if max_tokens > window:
            message = (
                f"max_tokens={max_tokens} cannot be greater than max_model_len={window}. Please request fewer output tokens."
            )
            raise Refused(bad(message, "max_tokens"))

    def _check_fits(self, ids: Sequence[int]) -> None:
        window = self._engine.max_model_len
        if len(ids) > window:
            message = (
                f"This model's maximum context length is {window} tokens. However, your prompt contains at least {window + 1} "
                "input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt."
            )
            raise Refused(bad(message, "input_tokens"))

    async def generate(self, exchange: Exchange, body: Any) -> None:
        try:
            need(body, "token_ids", "sampling_params")
            check_model(body, self._engine.names)
            window, count = self._engine.max_model_len, len(body["token_ids"])
            if count > window:
                raise Refused(bad(f"Input length ({count}) exceeds model's maximum context length ({window}).", None))
            unknown = max(body["token_ids"]) >= self._family.tokenizer.get_vocab_size()
            if unknown:
                raise Refused(bad(f"Token id {max(body['token_ids'])} is out of vocabulary", None))
            asked = body["sampling_params"]
            reads_cache = asked.get("prompt_logprobs") is not None and asked.get("skip_reading_prefix_cache") is False
            if reads_cache and asked.get("detokenize", True):
                # Once the prompt is in its cache, vLLM's engine dies of spelling what stands there.
                raise Refused(ENGINE_ERROR)
            # A real engine takes a client's word for what they show.
            assert not body.get("features"), "features of images were passed on"
            images = [data_of(part["url"]) for part in body.get("content_parts") or ()]
            check_number(len(images), self._engine.most_images, self._engine.model)
            ids, ranges = expand(self._family, body["token_ids"], images)
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        except ImagesRefused as error:
            await exchange.fail(bad(error.message, error.param))
            return
        cached = self._engine.find_cached(ids) if reads_cache else 0
        name = f"generate-tokens-{request_id(exchange, body)}"
        generation = self._generation(exchange, body, name, ids, body["sampling_params"])
        generation.placeholders = ranges
        generation.bend_scores = self._engine.bend_scores
        if reads_cache:
            generation.cached_tokens = cached
        await self._sample(exchange, generation, self._generate_answer(exchange, generation))

    def _generate_answer(self, exchange: Exchange, generation: Generation) -> Answer:
        if generation.body.get("output_mode") == "derender":
            assert not generation.stream and generation.body["parse_context"]["include_reasoning"]
            return GenerateParsed(exchange, generation, self._family)
        return GenerateStream(exchange, generation) if generation.stream else GenerateWhole(exchange, generation)

    async def chat(self, exchange: Exchange, body: Any) -> None:
        try:
            ids, _ = self._rendered(body)
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        name = f"chatcmpl-{request_id(exchange, body)}"
        sampling = sampling_params(body, self._engine.max_model_len - len(ids))
        generation = self._generation(exchange, body, name, ids, sampling)
        shape = ChatStream if generation.stream else ChatWhole
        await self._sample(exchange, generation, shape(exchange, generation, self._family, self._ids))

    def _generation(self, exchange: Exchange, body: Any, name: str, ids: list[int], sampling: dict[str, Any]) -> Generation:
        generation = Generation(
            path=exchange.path,
            body=body,
            headers=exchange.headers,
            request_id=name,
            prompt_ids=ids,
            prompt=self._family.decode(ids),
            messages=body.get("messages"),
            tools=body.get("tools") or [],
            sampling=sampling,
            stream=bool(body.get("stream")),
            cached_tokens=self._engine.cached_tokens,
            routes=self._engine.routes,
        )
        if not self._engine.is_aside(exchange.headers):
            self._engine.generations.append(generation)
        return generation

    async def _sample(self, exchange: Exchange, generation: Generation, answer: Answer) -> None:
        """Sample what the script says until the end, an abort, or the client's hanging up."""
        from tests.support.engine.scripted_engine import misfortune

        if self._engine.sampler.refusing:
            self._engine.sampler.refused += 1
            await answer.fail(PAUSED)
            return
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

    async def _run(self, exchange: Exchange, generation: Generation, says: Sequence[Say], answer: Answer) -> None:
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
            need(body, "generate_response")
            if body.get("chat_request") is None:
                raise Refused(bad("chat_request is required when a tool or reasoning parser is configured", None))
            answer, request = body["generate_response"], body["chat_request"]
            for choice in answer["choices"]:
                if not choice.get("token_ids"):
                    raise Refused(bad(f"choice {choice['index']} has empty or null token_ids", None))
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        prompt_ids = body.get("prompt_token_ids") or answer.get("prompt_token_ids") or []
        choices = [self._derendered(choice, request, prompt_ids) for choice in answer["choices"]]
        completion = sum(len(choice["token_ids"]) for choice in answer["choices"])
        usage = usage_of(body.get("prompt_tokens") or 0, completion) | {"prompt_tokens_details": None}
        await exchange.answer(chat_answer(answer["request_id"], body.get("model") or MODEL, choices, usage, None))

    def _derendered(self, choice: Mapping[str, Any], request: Mapping[str, Any], prompt_ids: Sequence[int]) -> dict[str, Any]:
        parsed = parse(self._family, choice["token_ids"], request, self._family.decode(prompt_ids[-4:]))
        calls = [tool_call(os.urandom(16).hex(), name, arguments) for name, arguments in parsed.calls]
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
            need(body, "generate_chunk", "chat_request", "prompt_token_ids")
            before, (choice,) = state["output_token_ids"], body["generate_chunk"]["choices"]
            ids = [*before, *(choice.get("token_ids") or ())]
            if len(body["prompt_token_ids"]) + len(ids) > window:
                raise Refused(bad(f"prompt_token_ids plus output_token_ids exceeds max_model_len ({window}).", None))
        except Refused as refused:
            await exchange.fail(refused.fault)
            return
        live = Live(self._family, body["chat_request"], self._family.decode(body["prompt_token_ids"][-4:]))
        live.tell(self._family.decode(before), None)
        finish_reason = choice.get("finish_reason")
        delta, called = live.tell(self._family.decode(ids), finish_reason)
        if not state["role_sent"]:
            delta = {"role": "assistant", **delta}
        finish_reason = "tool_calls" if called and is_auto(body["chat_request"]) else finish_reason
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


def request_id(exchange: Exchange, body: Mapping[str, Any]) -> str:
    return exchange.headers.get("x-request-id") or body.get("request_id") or os.urandom(8).hex()


def bad(message: str, param: str | None) -> Fail:
    return Fail(400, message, "BadRequestError", param)


def _missing(name: str) -> Fail:
    message = f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required'}}"
    return Fail(400, message, "Bad Request", f"body.{name}")


def need(body: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in body:
            raise Refused(_missing(name))


def check_model(body: Mapping[str, Any], served: Sequence[str]) -> None:
    if body.get("model") not in (None, *served):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {served[0]}."
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
