"""The routes of the plugin inside vLLM: one request plans the prompt, samples and parses, instead of three.

It reaches the engine only as vLLM's own handlers do: prompts are rendered by `ServingRender`, sampled by `ServingTokens` with all its
checks, and parsed by the server's own parsers (`proxy.engine.in_vllm.reply`). The wire format is in `proxy.engine.in_vllm.frames`.

Of this project it imports only this folder and `reconstruct`, so that it runs in an environment made for vLLM. What it uses of vLLM is
listed in `proxy.engine.in_vllm.internals`, with the versions.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import multiprocessing
import os
import secrets
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import vllm
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput

from proxy.engine.in_vllm.aborts import Aborts
from proxy.engine.in_vllm.frames import (
    ABORT,
    BUDGET,
    MEDIA_TYPE,
    PROTOCOL,
    ROUTE,
    SAMPLE,
    SCORE,
    Abort,
    About,
    Ancestor,
    Ask,
    DoneFrame,
    FailedFrame,
    Frame,
    PlanFrame,
    read_after,
    read_ask,
    read_ids,
    to_bytes,
    write_after,
    write_frame,
)
from proxy.engine.in_vllm.internals import choose
from proxy.engine.in_vllm.reply import Body, ChoiceState, Interpreter, own_logprobs
from proxy.engine.in_vllm.scores import answer_score
from reconstruct.media import Ranges, collapse, find_placeholders
from reconstruct.prompt import Parent, Prompt, Rendering, plan
from reconstruct.records import Ids, pack_ids

log = logging.getLogger("vllm.verbatim")


def add_routes(app: FastAPI) -> None:
    app.add_api_route(SAMPLE, _sample, methods=["POST"])
    app.add_api_route(SCORE, answer_score, methods=["POST"])
    app.add_api_route(ABORT, _abort, methods=["POST"])
    app.add_api_route(ROUTE, _describe, methods=["GET"])


async def _describe(raw: Request) -> JSONResponse:
    sampler: Sampler = raw.app.state.verbatim
    about = About(PROTOCOL, vllm.__version__, sampler.engine, await asyncio.to_thread(sampler.digest_vocabulary))
    return JSONResponse(msgspec.to_builtins(about))


async def _sample(raw: Request) -> Response:
    try:
        ask = read_ask(await raw.body())
    except msgspec.MsgspecError as error:
        raise VLLMValidationError(f"not a request of protocol {PROTOCOL}: {error}") from error
    response: Response | None = await _answer(ask, raw)
    # None: the client has left.
    return response or Response(status_code=499)


async def _abort(raw: Request) -> JSONResponse:
    try:
        asked = msgspec.json.decode(await raw.body(), type=Abort)
    except msgspec.MsgspecError as error:
        raise VLLMValidationError(f"not a request to abort: {error}") from error
    await raw.app.state.verbatim.aborts.abort(asked.request_ids)
    return JSONResponse({})


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def _answer(ask: Ask, raw: Request) -> Response:
    sampler: Sampler = raw.app.state.verbatim
    frames = await sampler.sample(ask, raw)
    if isinstance(frames, ErrorResponse):
        return JSONResponse(frames.model_dump(), status_code=frames.error.code)
    # A refusal by the engine comes in place of its first output: before that no status may be sent.
    first = [await anext(frames)]
    if ask.stream:
        return StreamingResponse(_chain(first[0], frames), media_type=MEDIA_TYPE)
    return Response(b"".join([*first, *[frame async for frame in frames]]), media_type=MEDIA_TYPE)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for frame in rest:
        yield frame


class VllmRefused(Exception):
    """vLLM refused the request."""

    def __init__(self, error: ErrorResponse) -> None:
        super().__init__(error.error.message)
        self.error = error


class RawTokens(ServingTokens):  # type: ignore[misc]
    """vLLM's handler of `/inference/v1/generate`, with all its checks, that returns the engine's own outputs."""

    def serve_tokens_stream_generator(self, request: Any, results: Any, request_id: str, *_: Any, **__: Any) -> Any:
        return self._check(results, request_id)

    async def serve_tokens_full_generator(self, request: Any, results: Any, request_id: str, *_: Any, **__: Any) -> Any:
        return self._check(results, request_id)

    async def _check(self, results: AsyncGenerator[RequestOutput, None], request_id: str) -> AsyncIterator[RequestOutput]:
        async for result in results:
            for output in result.outputs:
                self._raise_if_error(output.finish_reason, request_id)
            yield result


def name_engine(api_servers: int) -> str:
    """A random name of this vLLM, the same in all its API servers, whose key for each other comes from the process that started them."""
    if api_servers < 2:
        return secrets.token_hex(8)
    shared = multiprocessing.current_process().authkey + str(os.getppid()).encode()
    return hashlib.sha256(shared).hexdigest()[:16]


@dataclass(slots=True)
class _Planned:
    """A planned request: vLLM's own, what it was made from as vLLM adjusted it, and what the service is told of the plan."""

    request: GenerateRequest
    body: Body
    prompt: Ids
    media: Ranges
    frame: PlanFrame


class Sampler:
    def __init__(self, engine_client: EngineClient, state: State, args: Namespace) -> None:
        self.aborts = Aborts(engine_client, args)
        self.engine = name_engine(engine_client.vllm_config.parallel_config._api_process_count)
        self._render = state.serving_render
        self._renderer = state.online_renderer
        self._window: int = self._renderer.model_config.max_model_len
        self.tokens = RawTokens(
            engine_client,
            state.openai_serving_models,
            state.online_renderer,
            request_logger=getattr(state.serving_render, "request_logger", None),
            return_tokens_as_token_ids=args.return_tokens_as_token_ids,
            **choose(ServingTokens.__init__, online_derenderer=state.online_derenderer),
        )
        self._interpreter = Interpreter(self.tokens, state, args)
        self._vocabulary: str | None = None

    def digest_vocabulary(self) -> str:
        """See About. A tokenizer of 150,000 tokens takes a tenth of a second, once."""
        if self._vocabulary is None:
            get_vocab = getattr(self._renderer.renderer.get_tokenizer(), "get_vocab", None)
            listed = sorted((int(token_id), token) for token, token_id in get_vocab().items()) if get_vocab else []
            self._vocabulary = hashlib.sha256(repr(listed).encode("utf-8", "replace")).hexdigest() if listed else ""
        return self._vocabulary

    async def sample(self, ask: Ask, raw: Request) -> AsyncIterator[bytes] | ErrorResponse:
        """The frames of the answer, or vLLM's refusal. Raises what vLLM's handlers raise."""
        try:
            planned = await self._plan(ask, raw)
        except VllmRefused as refused:
            return refused.error
        results = await self.tokens.serve_tokens(planned.request, raw)
        return results if isinstance(results, ErrorResponse) else self._write(ask, planned, results)

    # The prompt

    async def _plan(self, ask: Ask, raw: Request) -> _Planned:
        """Raises VllmRefused."""
        fields = _read_json(ask.body)
        if "prompt" in fields or ask.ids is not None:
            request, body = await self._render_prompt(fields, ask, raw)
            ids = pack_ids(request.token_ids) if ask.ids is None else read_ids(ask.ids)
            prompt, parent_ids, known = ids, pack_ids(()), Prompt(ids, None, ids, None, True)
        else:
            _name_images(fields.get("messages") or (), ask)
            request, body, known = await self._plan_messages(fields, ask, raw)
            prompt = known.ids
            parent_ids = pack_ids(()) if ask.parent is None or ask.parent.ids is None else read_ids(ask.parent.ids)
        max_tokens = self._fit(ask, len(prompt), "prompt" if "prompt" in fields else "messages")
        extends = ask.parent is not None and len(parent_ids) > 0 and known.continues and known.branch_reason is None
        experts_from = len(parent_ids) - 1 if ask.experts_from_parent and extends else 0
        kept, tail = write_after(parent_ids, prompt)
        shared, rest = write_after(prompt, known.rendering)
        close = None if known.close is None else to_bytes(known.close)
        sampling = {"logprobs": 0, **ask.sampling, "max_tokens": max_tokens}
        if experts_from:
            sampling["routed_experts_prompt_start"] = experts_from
        if known.media:
            # One that was sampled would be taken for the next image's.
            barred = dict.fromkeys(find_placeholders(prompt, known.media), -100.0)
            request.sampling_params.logit_bias = {**(request.sampling_params.logit_bias or {}), **barred}
        completed, defaults = _complete(request, ask, prompt, sampling)
        if known.media:
            _give_images(completed, known, _list_images(fields["messages"]))
        frame = PlanFrame(
            kept,
            tail,
            shared,
            rest,
            known.branch_reason,
            close,
            known.continues,
            max_tokens,
            experts_from,
            defaults,
            list(known.media),
            known.adds_end,
        )
        return _Planned(completed, body, prompt, known.media, frame)

    async def _plan_messages(self, fields: dict[str, Any], ask: Ask, raw: Request) -> tuple[GenerateRequest, Body, Prompt]:
        messages, ancestor = fields.get("messages") or [], ask.parent
        parent, close = (None, None) if ancestor is None else _read_parent(ancestor, messages, ask)
        rendered: dict[int, tuple[GenerateRequest, Body]] = {}
        steps = plan(
            messages,
            parent,
            close,
            retain_thinking=ancestor is not None and ancestor.retain_thinking,
            media_of=lambda rendering: _read_ranges(rendered[id(rendering)][0]),
        )
        step = next(steps)
        while True:
            answers = []
            for rendering in step.renderings:
                made = await self._render_messages(fields, rendering, raw, required=step.required)
                if made is not None:
                    rendered[id(rendering)] = made
                answers.append(pack_ids(()) if made is None else pack_ids(made[0].token_ids))
            try:
                step = steps.send(answers)
            except StopIteration as stop:
                prompt, whole = stop.value
                return *rendered[id(whole)], prompt

    async def _render_messages(
        self, fields: dict[str, Any], rendering: Rendering, raw: Request, *, required: bool
    ) -> tuple[GenerateRequest, Body] | None:
        """vLLM's request for these messages, and the chat request as its parsers adjusted it; None if they are rejected and not
        required. Raises VllmRefused if they are required."""
        # Of images only their places are wanted: the engine is given the images themselves.
        changed = {**fields, "messages": list(rendering.messages), "stream": False, "mm_payload": "none"}
        if not rendering.add_generation_prompt:
            changed["add_generation_prompt"] = False
            # A forced tool call constrains what is sampled, not how a history is rendered.
            changed.pop("tool_choice", None)
        try:
            body = _validate(ChatCompletionRequest, changed)
            made = await self._render.render_chat_request(body, raw)
        except Exception as error:
            if required or not _is_refusal(error):
                raise
            return None
        if isinstance(made, ErrorResponse):
            if required or made.error.code not in _REFUSALS:
                raise VllmRefused(made)
            return None
        return made, body

    async def _render_prompt(self, fields: dict[str, Any], ask: Ask, raw: Request) -> tuple[GenerateRequest, Body]:
        """vLLM's request for a prompt of text or ids, or for messages whose ids are planned already. Raises VllmRefused."""
        if ask.ids is None or "prompt" in fields:
            # The real limit is set once the ids are known; the API's default would be subtracted from the window.
            changed = {**fields, "max_tokens": 1, "stream": False}
            if ask.ids is not None:
                changed["prompt"] = read_ids(ask.ids[-4:]).tolist()
            completion = _validate(CompletionRequest, changed)
            made = await self._render.render_completion_request(completion, raw)
            if isinstance(made, ErrorResponse):
                raise VllmRefused(made)
            if len(made) != 1:
                raise VLLMValidationError("one prompt per request", parameter="prompt")
            return made[0], completion
        given = {"prompt_token_ids": read_ids(ask.ids).tolist()}
        chat = _validate(ChatCompletionRequest, {**fields, "stream": False, "kv_transfer_params": given})
        made = await self._render.render_chat_request(chat, raw)
        if isinstance(made, ErrorResponse):
            raise VllmRefused(made)
        return made, chat

    def _fit(self, ask: Ask, prompt_length: int, field: str) -> int:
        """What the window and the budget leave. Raises VllmRefused if that is nothing."""
        room = self._window - prompt_length
        if room < 1:
            raise VllmRefused(
                create_error_response(
                    f"This model's maximum context length is {self._window} tokens. However, your {field} resulted in "
                    f"{prompt_length} tokens. Please reduce the length of the {field}.",
                    param=field,
                )
            )
        most = min(ask.sampling.get("max_tokens") or room, room)
        if ask.max_total is None:
            return most
        choices = ask.sampling.get("n") or 1
        left = ask.max_total - prompt_length * choices
        if left < choices:
            raise VllmRefused(create_error_response(f"the prompt of {prompt_length} tokens leaves no room", param=BUDGET))
        return min(most, left // choices)

    # The reply

    async def _write(self, ask: Ask, planned: _Planned, results: AsyncIterator[RequestOutput]) -> AsyncIterator[bytes]:
        """Yields the plan with the first output, so that a refusal by the engine is raised before anything was sent."""
        replies = [
            ChoiceState(index, self._interpreter, ask, planned.body, planned.prompt)
            for index in range(planned.request.sampling_params.n)
        ]
        cached, prompt_logprobs, begun = 0, None, False
        try:
            async for result in results:
                frames: list[Frame] = []
                if not begun:
                    _check_expansion(planned, result)
                    cached = result.num_cached_tokens or 0
                    frames.append(planned.frame)
                # In a stream they come once, then as empty lists.
                prompt_logprobs = result.prompt_logprobs or prompt_logprobs
                for output in result.outputs:
                    frames += replies[output.index].add(output)
                begun = True
                yield b"".join(map(write_frame, frames))
            told = None if prompt_logprobs is None else own_logprobs(planned.prompt.tolist(), prompt_logprobs)
            yield write_frame(DoneFrame(cached, told))
        except Exception as error:
            if not begun:
                raise
            log.exception("request %s broke off", ask.request_id)
            yield write_frame(FailedFrame(f"{type(error).__name__}: {error}"))


# Images. Hashes and ranges that a client gives are trusted by vLLM 0.32, so it is given the images themselves with one placeholder for
# each, and what it makes of them must be what was planned.


def _name_images(messages: Sequence[Any], ask: Ask) -> None:
    """Put the bytes of images into the messages that name them, as data URLs. Raises VLLMValidationError for one that was not sent."""
    for part in _image_parts(messages):
        name = part["image_url"]["url"]
        if name not in ask.images:
            raise VLLMValidationError(f"the image {name[:80]} was not sent", parameter="messages")
        media_type, data = ask.images[name]
        part["image_url"] = {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"}


def _list_images(messages: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"type": "image_url", "url": part["image_url"]["url"]} for part in _image_parts(messages)]


def _image_parts(messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                yield part


def _read_ranges(request: GenerateRequest) -> Ranges:
    """Where the rendering has images; other media count, too, so that they never fit."""
    placeholders = request.features.mm_placeholders.values() if request.features is not None else ()
    return tuple(sorted((each.offset, each.length) for ranges in placeholders for each in ranges))


def _give_images(request: GenerateRequest, prompt: Prompt, images: list[dict[str, Any]]) -> None:
    """Raises VLLMValidationError if placeholders stand elsewhere, too."""
    ids = collapse(prompt.ids, prompt.media)
    if ids is None or len(images) != len(prompt.media):
        raise VLLMValidationError(
            "a message's text contains the placeholder that stands for an image in the model's prompts: no image can be placed",
            parameter="messages",
        )
    request.token_ids, request.features, request.content_parts = ids.tolist(), None, images
    # vLLM then notes where it put them.
    request.return_token_ids = True


def _check_expansion(planned: _Planned, result: RequestOutput) -> None:
    """Raises VLLMValidationError if vLLM samples after another prompt than was planned."""
    if not planned.media:
        return
    placed = planned.request._response_mm_placeholders or {}
    ranges = tuple(sorted((each.offset, each.length) for found in placed.values() for each in found))
    if list(result.prompt_token_ids or ()) != planned.prompt.tolist() or ranges != planned.media:
        raise VLLMValidationError(
            "this model's images are placed differently in token ids than in messages: they cannot be used on the token path",
            parameter="messages",
        )


_REFUSALS = (400, 413, 422)
"""The statuses of a request that the template or the engine does not take."""


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, RequestValidationError) or create_error_response(error).error.code in _REFUSALS


def _validate(kind: Any, fields: dict[str, Any]) -> Any:
    """The request. Raises what FastAPI raises for an invalid body, so that vLLM answers it in its own words."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise VLLMValidationError(f"the body is not a JSON object: {error}") from error


def _read_parent(ancestor: Ancestor, messages: Sequence[Any], ask: Ask) -> tuple[Parent, Ids | None]:
    """The parent, and the template's turn end if the service knows it."""
    if not 0 < ancestor.covered <= len(messages):
        raise VLLMValidationError(f"the parent covers {ancestor.covered} of {len(messages)} messages")
    known = list(messages)
    ids = None if ancestor.ids is None else read_ids(ancestor.ids)
    try:
        for position, message in ancestor.recorded.items():
            known[position] = _read_json(message)
            _name_images([known[position]], ask)
        asked = None
        if ancestor.asked is not None:
            asked = read_after(pack_ids(()) if ids is None else ids, *ancestor.asked)
        if ids is not None and not 0 <= ancestor.sampled <= len(ids):
            raise ValueError(f"{ancestor.sampled} of {len(ids)} ids cannot be sampled")
    except (ValueError, IndexError) as error:
        raise VLLMValidationError(f"the parent is no parent: {error}") from error
    history, tail = known[: ancestor.covered], known[ancestor.covered :]
    media = tuple((start, length) for start, length in ancestor.media)
    parent = Parent(history, tail, ids, ancestor.sampled, ancestor.closed, asked, ancestor.redressed, media)
    return parent, None if ancestor.close is None else read_ids(ancestor.close)


def _complete(
    request: GenerateRequest, ask: Ask, prompt: Ids, sampling: dict[str, Any]
) -> tuple[GenerateRequest, dict[str, Any]]:
    """The request after these ids, with the sampling laid over its own and validated as `/inference/v1/generate` does; and its own."""
    request.token_ids, request.token_offsets, request.features = [0], None, None
    fields = request.model_dump()
    defaults = fields["sampling_params"]
    fields["sampling_params"] = {**defaults, **sampling}
    fields |= {"request_id": ask.request_id, "stream": ask.stream, "stream_options": None}
    completed: GenerateRequest = _validate(GenerateRequest, fields)
    completed.token_ids = prompt.tolist()
    return completed, defaults
