"""What the engine samples of one choice, as frames, read by the server's own parsers as in `/v1/chat/completions`, whose text they give."""

from __future__ import annotations

import io
import logging
from argparse import Namespace
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from starlette.datastructures import State
from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens, _clamp_logprob
from vllm.outputs import CompletionOutput
from vllm.parser import Parser
from vllm.renderers.online_derenderer import _resolve_logprobs

from proxy.engine.in_vllm.frames import Ask, EndFrame, Frame, PieceFrame, Tops
from proxy.engine.in_vllm.internals import choose
from reconstruct.details import NO_TOKEN
from reconstruct.records import Ids

log = logging.getLogger("vllm.verbatim")

Body: TypeAlias = ChatCompletionRequest | CompletionRequest


class Interpreter:
    """What the server makes of sampled ids: messages by its tool and reasoning parsers, and logprobs in the shape of a chat's."""

    def __init__(self, tokens: ServingTokens, state: State, args: Namespace) -> None:
        self._tokens = tokens
        self._renderer = state.online_renderer
        self._derenderer = state.online_derenderer
        self._auto_tools: bool = args.enable_auto_tool_choice
        # 0.32 returns no alternatives unless it is told how many.
        self._uncut = choose(tokens._create_tokens_logprobs, num_output_top_logprobs=-1)

    def parser(self, body: Body) -> Parser | None:
        """The server's tool and reasoning parser for one choice; None where it has none or there are no messages."""
        if self._renderer.parser is None or not isinstance(body, ChatCompletionRequest):
            return None
        return self._renderer.parser(
            self._renderer.renderer.get_tokenizer(),
            body.tools,
            chat_template_kwargs=self._derenderer._resolve_chat_template_kwargs(body),
            model_config=self._renderer.model_config,
        )

    def parse(self, body: Body, prompt: Ids, text: str, ids: Sequence[int]) -> dict[str, Any]:
        """The message of a whole reply, as `/v1/chat/completions` makes it."""
        parser = self.parser(body)
        if parser is None:
            return {"content": text}
        assert isinstance(body, ChatCompletionRequest)
        parser.set_prompt_token_ids(prompt.tolist())
        reasoning, content, calls = parser.parse(
            text, body, enable_auto_tools=self._auto_tools, model_output_token_ids=list(ids)
        )
        if isinstance(body.tool_choice, ChatCompletionNamedToolChoiceParam) or body.tool_choice == "required":
            content = content or ""
        made = [{"id": call.id or "", "function": {"name": call.name, "arguments": call.arguments}} for call in calls or ()]
        message: dict[str, Any] = {"content": content, "tool_calls": made}
        return message | ({"reasoning": reasoning} if body.include_reasoning else {})

    def show_text_logprobs(self, output: CompletionOutput, shown: int) -> list[dict[str, Any]]:
        """Chat-shaped logprobs of a prompt's reply."""
        make, tokenizer = self._tokens._create_text_logprobs, self._tokens._logprobs_tokenizer(True)
        made = make(output.token_ids, _cut(output.logprobs or (), shown), tokenizer=tokenizer, **self._uncut)
        return [entry.model_dump() for entry in made.content or ()]

    def show_logprobs(self, ids: Sequence[int], logprobs: Sequence[Any], shown: int) -> list[dict[str, Any]]:
        """Chat-shaped logprobs of a whole chat reply."""
        make = self._tokens._create_tokens_logprobs
        made = make(ids, _cut(logprobs, shown), **self._uncut)
        resolved = _resolve_logprobs(made, self._renderer.renderer.get_tokenizer())
        return [entry.model_dump() for entry in resolved.content or ()]


class ChoiceState:
    """One choice while it is sampled: the state of its streaming parser, and what the whole is made of."""

    def __init__(self, index: int, interpreter: Interpreter, ask: Ask, body: Body, prompt: Ids) -> None:
        self._index = index
        self._interpreter = interpreter
        self._ask = ask
        self._body = body
        self._prompt = prompt
        self._parser = interpreter.parser(body) if ask.stream else None
        self._parses = self._parser is not None
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self._shows_pieces = ask.shown is not None and isinstance(body, CompletionRequest)
        self._prompt_list: list[int] = prompt.tolist() if self._parses else []
        self._ended = False

    def add(self, output: CompletionOutput) -> list[Frame]:
        if self._ended or not (output.token_ids or output.text or output.finish_reason):
            return []
        ids = list(output.token_ids)
        self._text.append(output.text)
        self._ids += ids
        if self._ask.shown is not None:
            self._logprobs += output.logprobs or ()
        frames: list[Frame] = [self._piece(output, ids)]
        if output.finish_reason is not None:
            self._ended = True
            frames.append(self._end(output))
        return frames

    def _piece(self, output: CompletionOutput, ids: list[int]) -> PieceFrame:
        entries = output.logprobs or ()
        shown = self._interpreter.show_text_logprobs(output, self._ask.shown or 0) if self._shows_pieces else None
        return PieceFrame(
            self._index,
            np.array(ids, "<i4").tobytes(),
            np.array([_logprob_of(token, entry) for token, entry in zip(ids, entries, strict=True)], "<f4").tobytes(),
            self._advance(output, ids) if self._ask.stream else None,
            _tops(ids, entries, self._ask.alternatives) if self._ask.alternatives else None,
            shown,
        )

    def _advance(self, output: CompletionOutput, ids: list[int]) -> dict[str, Any] | None:
        """The delta that these ids make certain, as the streamed `/v1/chat/completions` sends it."""
        if not self._parses:
            return {"content": output.text} if output.text else None
        if self._parser is None:
            return None
        try:
            delta = self._parser.parse_delta(
                output.text, ids, self._body, self._prompt_list, finished=output.finish_reason is not None
            )
        except Exception as error:
            # The parse of the whole reply decides.
            log.warning("request %s: the streaming parser failed: %r", self._ask.request_id, error)
            self._parser = None
            return None
        return None if delta is None else delta.model_dump(exclude_none=True)

    def _end(self, output: CompletionOutput) -> EndFrame:
        message, unparsed, text = None, None, "".join(self._text)
        try:
            message = self._interpreter.parse(self._body, self._prompt, text, self._ids)
        except Exception as error:
            unparsed = f"{type(error).__name__}: {error}"
        shown = None
        if self._ask.shown is not None and not self._shows_pieces:
            shown = self._interpreter.show_logprobs(self._ids, self._logprobs, self._ask.shown)
        spans = output.weight_versions
        versions = None if spans is None else [(span.version, span.start, span.end) for span in spans]
        experts = None if output.routed_experts is None else _to_npy(output.routed_experts)
        told = text if isinstance(self._body, ChatCompletionRequest) and self._body.tools else None
        return EndFrame(
            self._index, output.finish_reason, output.stop_reason, message, unparsed, versions, experts, shown, told
        )


def _cut(entries: Sequence[Any], shown: int) -> list[Any]:
    """The first alternatives of each position, the sampled token among them, as many as the harness is shown."""
    return [entry and dict(islice(entry.items(), max(shown, 1))) for entry in entries]


def _logprob_of(token: int, entry: Any) -> float:
    """As `/inference/v1/generate` writes it."""
    found = None if entry is None else entry.get(token)
    return -9999.0 if found is None else float(_clamp_logprob(found.logprob))


def _tops(ids: Sequence[int], entries: Sequence[Any], width: int) -> Tops:
    """The first `width` entries of each position, as `/inference/v1/generate` lists them."""
    top_ids = np.full((len(ids), width), NO_TOKEN, "<i4")
    logprobs = np.full((len(ids), width), np.nan, "<f4")
    for position, entry in enumerate(entries):
        for rank, (token, one) in enumerate(list((entry or {}).items())[:width]):
            top_ids[position, rank], logprobs[position, rank] = token, _clamp_logprob(one.logprob)
    return Tops(width, top_ids.tobytes(), logprobs.tobytes())


def own_logprobs(prompt: Sequence[int], entries: Sequence[Any]) -> bytes:
    """The logprob of each prompt token itself, NaN where there is none."""
    told = clamp_prompt_logprobs(list(entries)) or []
    found = [None if entry is None else entry.get(token) for token, entry in zip(prompt, told, strict=True)]
    return np.array([np.nan if one is None else one.logprob for one in found], "<f4").tobytes()


def _to_npy(experts: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(experts), allow_pickle=False)
    return buffer.getvalue()
