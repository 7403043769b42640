"""LocalRenderer: prompts rendered and replies read in this process, for engines whose own API does neither.

It gives the flow what the token path's engine gives it (`render`, `tokenizer`), so that a prompt is planned and its bridge proven
the same way. The work is done in threads, one job at a time: tokenizers are not made for more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from proxy.dialects.base import Request
from proxy.engine.base import Job, Rendered
from proxy.engine.chat_format import ChatFormat
from proxy.engine.id_text import IdText
from proxy.engine.parser import cut_at_stop, keep_one_call
from proxy.engine.replica import Replica
from proxy.engine.text_api import SEED_IDS, Tokenizer
from proxy.errors import EngineFailed, RequestError
from reconstruct.bridge import Rendering
from reconstruct.records import Ids, pack_ids

log = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""Said with every call: what an engine would take from the model's generation config cannot be asked for here."""

_UNSUPPORTED = ("chat_template", "documents")


class LocalRenderer:
    """The renderer of `model` (see ChatFormat), loaded by `prepare` or the first call; None: there is none, and every use fails."""

    def __init__(self, model: str | None, options: Mapping[str, Any]) -> None:
        self._model = model
        self._options = options
        self._format: ChatFormat | None = None
        self._turn = asyncio.Lock()
        self._working = threading.Lock()

    async def prepare(self) -> None:
        """Load the renderer, so that no call waits for it; a name that is wrong is told in the log, and by every call."""
        try:
            if self._model is not None:
                await self._do(lambda chat: None)
        except EngineFailed as error:
            log.error("engines that take token ids only cannot be used: %s", error.message)

    async def render(self, replica: Replica, request: Request, rendering: Rendering, id_text: IdText) -> Rendered:
        """The ids of `rendering.messages` under the request's tools and template kwargs, and the sampling that stops at the end
        of a turn. Raises RequestError for what the chat format does not take or no such engine can do."""
        _refuse_unsupported(request)

        def work(chat: ChatFormat) -> Rendered:
            kwargs = _kwargs(chat, request)
            ids = chat.render(rendering.messages, request.tools, kwargs, rendering.add_generation_prompt)
            return Rendered(pack_ids(ids), {"sampling_params": {**_DEFAULTS, "stop_token_ids": list(chat.stop_ids)}})

        return await self._do(work)

    async def message(self, job: Job, said: Sequence[int], stop: str | None, stop_id: int | None) -> dict[str, Any]:
        """The message that the sampled ids make; of a request with a prompt, their text. What ended it: the text `stop`, which is
        in them, or the token `stop_id`, which is not."""
        assert job.prompt_ids is not None
        request, prompt_ids = job.request, job.prompt_ids
        calls = bool(request.tools) and request.forward.get("tool_choice") != "none"

        def work(chat: ChatFormat) -> dict[str, Any]:
            if request.prompt is not None:
                return {"role": "assistant", "content": chat.decode(said, special=not _skips_special(request))}
            # gpt-oss ends a reply with the token that closes its tool call; a stop token of the harness's own says nothing.
            closed = [*said, stop_id] if stop_id in chat.stop_ids else list(said)
            return chat.parse(prompt_ids.tolist(), closed, request.tools, _kwargs(chat, request), calls=calls)

        message = await self._do(work)
        if stop is not None:
            cut_at_stop(message, stop)
        keep_one_call(message, request)
        return message

    @property
    def is_set(self) -> bool:
        """Whether there is a model to render for."""
        return self._model is not None

    @property
    def end_id(self) -> int | None:
        """The id of the tokenizer's own end of a text; None before anything was rendered."""
        return self._format.end_id if self._format is not None else None

    async def spell(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself."""
        return await self._do(lambda chat: [chat.decode([token], special=True) for token in ids])

    async def spell_each(self, groups: Sequence[Sequence[int]]) -> list[str]:
        """The text of each group of ids as it follows others, special tokens included."""

        def work(chat: ChatFormat) -> list[str]:
            # Alone, a word loses the blank before it where a tokenizer marks blanks at the words' beginnings.
            before = len(chat.decode([0], special=True))
            return [chat.decode([0, *group], special=True)[before:] for group in groups]

        return await self._do(work)

    async def encode(self, text: str) -> list[int]:
        """The ids of a text that is no whole prompt."""
        return await self._do(lambda chat: chat.encode(text, special=False))

    async def count(self, replica: Replica, request: Request) -> int:
        """The tokens of the request's prompt."""
        if isinstance(request.prompt, str):
            return len((await self.tokenizer(replica, request, IdText()).tokenize(request.prompt, whole=True)).ids)
        if request.prompt is not None:
            return len(request.prompt)
        return len((await self.render(replica, request, Rendering(request.messages, True), IdText())).ids)

    def tokenizer(self, replica: Replica, request: Request, id_text: IdText) -> Tokenizer:
        return _Tokenizer(self._do)

    async def _do(self, work: Callable[[ChatFormat], T]) -> T:
        async with self._turn:
            return await asyncio.to_thread(self._work, work)

    def _work(self, work: Callable[[ChatFormat], T]) -> T:
        # A caller that is cancelled gives up its turn while its thread still works.
        with self._working:
            if self._format is None:
                if self._model is None:
                    raise EngineFailed("no renderer is set: VERBATIM_RENDERER names the model whose chat format it renders")
                self._format = ChatFormat(self._model, self._options)
            return work(self._format)


class _Tokenizer:
    """proxy.engine.text_api.Tokenizer over the tokenizer of the chat format."""

    def __init__(self, do: Callable[[Callable[[ChatFormat], Any]], Any]) -> None:
        self._do = do

    async def tokenize(self, text: str, *, whole: bool) -> Rendered:
        ids = await self._do(lambda chat: chat.encode(text, special=whole))
        return Rendered(pack_ids(ids), {"sampling_params": dict(_DEFAULTS)})

    async def parameters(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        return {"sampling_params": dict(_DEFAULTS)}

    async def spell(self, before: Ids, ids: Ids) -> str:
        def work(chat: ChatFormat) -> str:
            seed = before[-SEED_IDS:].tolist()
            return chat.decode([*seed, *ids.tolist()], special=True)[len(chat.decode(seed, special=True)) :].rstrip("\ufffd")

        text: str = await self._do(work)
        return text


def _kwargs(chat: ChatFormat, request: Request) -> dict[str, Any]:
    """The template kwargs; the effort is one where the format looks at it."""
    effort = request.forward.get("reasoning_effort")
    seen = {"reasoning_effort": effort} if effort is not None and chat.accepts("reasoning_effort") else {}
    return {**seen, **request.template_kwargs}


def _skips_special(request: Request) -> bool:
    return bool(request.forward.get("skip_special_tokens", True))


def _refuse_unsupported(request: Request) -> None:
    for name in _UNSUPPORTED:
        if request.forward.get(name) is not None:
            raise RequestError(f"'{name}' needs an engine that renders messages itself", param=name)
    choice = request.forward.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        raise RequestError(
            "'tool_choice' can be auto or none: the engine samples after token ids and cannot force a tool call",
            param="tool_choice",
        )
