"""LocalRenderer: renders prompts and parses replies in this process, for engines whose own API does neither.

It runs in threads, one job at a time, because tokenizers are not thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from proxy.dialects.base import Request
from proxy.engine.apis.chat_format import ChatFormat
from proxy.engine.apis.reply import cut_at_stop, keep_one_call
from proxy.errors import EngineFailed, RequestError
from reconstruct.media import Ranges
from reconstruct.prompt import Rendering
from reconstruct.records import Ids, pack_ids

log = logging.getLogger(__name__)

T = TypeVar("T")

SEED_IDS = 64
"""How many ids of context precede those to be detokenized: detokenizers look at the last few."""

_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""Sent with every call: an engine's defaults from the model's generation config cannot be queried here."""


@dataclass(slots=True)
class Rendered:
    """The ids of a rendering, int32 of shape (n,), and the rest of the engine's generate body that came with them. `media` are the
    ranges of its images."""

    ids: Ids
    body: dict[str, Any]
    keeps_text_apart: bool = False
    """Whether control tokens in messages were read as text."""
    media: Ranges = ()


class Tokenizer(Protocol):
    """The engine's tokenizer for one request whose prompt is text or ids."""

    async def tokenize(self, text: str, *, whole: bool) -> Rendered:
        """The ids of a whole prompt, or of a piece that follows others, and the generate body. Raises ContextTooLong."""
        ...

    async def parameters(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """The generate body for a prompt of ids, without the ids."""
        ...

    async def spell(self, before: Ids, ids: Ids) -> str:
        """The text of `ids` after the ids `before`, with special tokens, without an unfinished character."""
        ...


class LocalRenderer:
    """The renderer of `model` (see ChatFormat), loaded by `prepare` or the first call. With None every use raises EngineFailed."""

    def __init__(self, model: str | None, options: Mapping[str, Any]) -> None:
        self._model = model
        self._options = options
        self._format: ChatFormat | None = None
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()

    @property
    def is_set(self) -> bool:
        """Whether there is a model to render for."""
        return self._model is not None

    @property
    def end_id(self) -> int | None:
        """The tokenizer's end-of-sequence id; None before the renderer is loaded."""
        return self._format.end_id if self._format is not None else None

    async def prepare(self) -> None:
        """Load the renderer so that no call waits for it. A failure is logged here and raised by every call."""
        try:
            if self._model is not None:
                await self._run(lambda chat: None)
        except EngineFailed as error:
            log.error("engines that take only token ids cannot be used: %s", error.message)

    async def render(self, request: Request, rendering: Rendering) -> Rendered:
        """The ids of `rendering.messages` under the request's tools and template kwargs, with sampling parameters that stop at the
        end of a turn. Raises RequestError for what neither the chat format nor such an engine can do."""
        _refuse_unsupported(request)

        def work(chat: ChatFormat) -> Rendered:
            kwargs = _template_kwargs(chat, request)
            ids = chat.render(rendering.messages, request.tools, kwargs, rendering.add_generation_prompt)
            body = {"sampling_params": {**_DEFAULTS, "stop_token_ids": list(chat.stop_ids)}}
            return Rendered(pack_ids(ids), body, chat.keeps_text_apart)

        return await self._run(work)

    async def parse(
        self, request: Request, prompt_ids: Ids, sampled: Sequence[int], stop: str | None, stop_id: int | None
    ) -> dict[str, Any]:
        """The message of the sampled ids; for a request with a prompt, their text. `stop` is the stop string that ended them, which
        they contain; `stop_id` the stop token, which they do not."""
        calls = bool(request.tools) and request.forward.get("tool_choice") != "none"

        def work(chat: ChatFormat) -> dict[str, Any]:
            if request.prompt is not None:
                special = not request.forward.get("skip_special_tokens", True)
                return {"role": "assistant", "content": chat.decode(sampled, special=special)}
            # gpt-oss ends a reply with the token that closes its tool call; a stop token of the harness's own carries no meaning.
            closed = [*sampled, stop_id] if stop_id in chat.stop_ids else list(sampled)
            return chat.parse(prompt_ids.tolist(), closed, request.tools, _template_kwargs(chat, request), calls=calls)

        message = await self._run(work)
        if stop is not None:
            cut_at_stop(message, stop)
        keep_one_call(message, request)
        return message

    async def count(self, request: Request) -> int:
        """The length of the request's prompt in tokens."""
        if isinstance(request.prompt, str):
            return len((await self.tokenize(request.prompt, whole=True)).ids)
        if request.prompt is not None:
            return len(request.prompt)
        return len((await self.render(request, Rendering(request.engine_messages, True))).ids)

    async def encode(self, text: str) -> list[int]:
        """The ids of a text that is not a whole prompt."""
        return await self._run(lambda chat: chat.encode(text, special=False))

    async def spell_ids(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself."""
        return await self._run(lambda chat: [chat.decode([token], special=True) for token in ids])

    async def spell_groups(self, groups: Sequence[Sequence[int]]) -> list[str]:
        """The text of each group of ids as it follows others, with special tokens."""

        def work(chat: ChatFormat) -> list[str]:
            # On its own a word loses its leading blank where the tokenizer marks blanks at the start of words.
            before = len(chat.decode([0], special=True))
            return [chat.decode([0, *group], special=True)[before:] for group in groups]

        return await self._run(work)

    async def tokenize(self, text: str, *, whole: bool) -> Rendered:
        """See `Tokenizer`, which this class implements."""
        ids = await self._run(lambda chat: chat.encode(text, special=whole))
        return Rendered(pack_ids(ids), {"sampling_params": dict(_DEFAULTS)})

    async def parameters(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        return {"sampling_params": dict(_DEFAULTS)}

    async def spell(self, before: Ids, ids: Ids) -> str:
        def work(chat: ChatFormat) -> str:
            seed = before[-SEED_IDS:].tolist()
            return chat.decode([*seed, *ids.tolist()], special=True)[len(chat.decode(seed, special=True)) :].rstrip("\ufffd")

        return await self._run(work)

    async def _run(self, work: Callable[[ChatFormat], T]) -> T:
        async with self._turn:
            return await asyncio.to_thread(self._run_locked, work)

    def _run_locked(self, work: Callable[[ChatFormat], T]) -> T:
        # A cancelled caller gives up its turn while its thread is still working.
        with self._lock:
            if self._format is None:
                if self._model is None:
                    raise EngineFailed("no renderer is set: set VERBATIM_RENDERER to the model whose chat format to render")
                self._format = ChatFormat(self._model, self._options)
            return work(self._format)


def _template_kwargs(chat: ChatFormat, request: Request) -> dict[str, Any]:
    """The template kwargs, with the reasoning effort if the format reads it."""
    effort = request.forward.get("reasoning_effort")
    seen = {"reasoning_effort": effort} if effort is not None and chat.accepts("reasoning_effort") else {}
    return {**seen, **request.template_kwargs}


def _refuse_unsupported(request: Request) -> None:
    for name in ("chat_template", "documents"):
        if request.forward.get(name) is not None:
            raise RequestError(f"'{name}' needs an engine that renders messages itself", param=name)
    choice = request.forward.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        raise RequestError(
            "'tool_choice' can be auto or none: the engine samples after token ids and cannot force a tool call",
            param="tool_choice",
        )
