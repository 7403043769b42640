"""LocalRenderer: prompts rendered and replies read in this process, for engines whose own API does neither.

It gives the flow what the token path's engine gives it (`render`, `tokenizer`), so that a prompt is planned and its bridge proven
the same way. The work is done in threads, one job at a time: tokenizers are not made for more.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from proxy.dialects.base import Request
from proxy.engine.apis.base import SEED_IDS, Job, Rendered, Tokenizer
from proxy.engine.apis.id_text import IdText
from proxy.engine.apis.vllm_reply import cut_at_stop, keep_one_call
from proxy.engine.replica import Replica
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
    """proxy.engine.apis.vllm_prompt.Tokenizer over the tokenizer of the chat format."""

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


# ChatFormat: a model's chat format on this side of the wire, for engines that take token ids but render and parse nothing.
#
# The `renderers` package knows the formats of many model families: messages to ids, sampled ids to a message. Its bridge from turn to
# turn is not used: `reconstruct.bridge` proves one from the renderings. Everything here blocks; `local_renderer` keeps it off the
# event loop. Checked against renderers 0.1.12.


_FORMATS_REMEMBERED = 64
"""Renderers kept, one for each set of template kwargs that harnesses send."""

_ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


class ChatFormat:
    """The format of `model`, a Hugging Face name or a folder with its tokenizer. `options` are fields of the package's
    configuration; `name` in them says which renderer, otherwise the package must know the model by its name."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        """Raises EngineFailed when there is no such tokenizer, renderer or option, or the package is missing."""
        self._package = _package()
        try:
            self._tokenizer = self._package.base.load_tokenizer(model)
            self._config = self._configuration(model, options)
            self._plain = self._package.create_renderer(self._tokenizer, self._config)
        except Exception as error:
            raise EngineFailed(f"the renderer of '{model}' cannot be had: {_said(error)}") from error
        self._accepts = self._package.template_field_names(self._config)
        self._renderers: dict[str, Any] = {"{}": self._plain}
        self.stop_ids: list[int] = [int(token) for token in self._plain.get_stop_token_ids()]
        self.end_id: int | None = self._tokenizer.eos_token_id

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message], kwargs: Mapping[str, Any], generate: bool
    ) -> list[int]:
        """The ids of the messages. Raises RequestError for what the format does not take."""
        renderer = self._renderer(kwargs)
        asked = [_plain_message(message) for message in messages]
        if self._config.name == "gpt-oss":
            _say_as_harmony(messages, asked)
        try:
            ids = renderer.render_ids(asked, tools=list(tools) or None, add_generation_prompt=generate)
        except Exception as error:
            raise RequestError(
                f"the model's chat format does not take these messages: {_said(error)}", param="messages"
            ) from error
        return [int(token) for token in ids]

    def parse(
        self, prompt_ids: list[int], said: list[int], tools: Sequence[Message], kwargs: Mapping[str, Any], *, calls: bool
    ) -> dict[str, Any]:
        """The message that `said`, its stop token included or not, makes after the prompt.

        What cannot be read as a tool call, or is one though there may be no `calls`, is told as text. Raises EngineFailed."""
        try:
            parsed = self._renderer(kwargs).parse_response(said, tools=list(tools) or None, prompt_ids=prompt_ids)
        except Exception as error:
            raise EngineFailed(f"the sampled tokens cannot be read: {_said(error)}") from error
        texts: list[str] = [parsed.content or ""]
        found: list[dict[str, Any]] = []
        for attempt in parsed.tool_calls:
            call = _call(attempt, len(found)) if calls else None
            if call is None:
                texts.append(self._shown(attempt, said))
            else:
                found.append(call)
        content = "\n".join(text for text in texts if text)
        message: dict[str, Any] = {"role": "assistant", "content": content if content.strip() or not found else None}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if found:
            message["tool_calls"] = found
        return message

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text; `special`: as a whole prompt, with what the tokenizer puts before it."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=special)]

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """The text of ids, with or without the `special` tokens among them."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def accepts(self, kwarg: str) -> bool:
        """Whether the format depends on a template kwarg of this name."""
        return kwarg in self._accepts

    def _configuration(self, model: str, options: Mapping[str, Any]) -> Any:
        known = self._package.base.MODEL_RENDERER_MAP
        name = options.get("name", "auto")
        if name == "auto":
            name = known.get(getattr(self._tokenizer, "name_or_path", "") or model)
        if name is None:
            # The package would take the tokenizer's template then, and tell no tool call from text.
            raise ValueError(
                "the renderers package does not know it by this name: say which of its renderers fits, for example "
                'VERBATIM_RENDERER_OPTIONS=\'{"name": "qwen3"}\''
            )
        return TypeAdapter(self._package.RendererConfig).validate_python({**options, "name": name})

    def _renderer(self, kwargs: Mapping[str, Any]) -> Any:
        """The renderer under these template kwargs. Raises RequestError for those it does not have."""
        key = json.dumps(kwargs, sort_keys=True)
        known = self._renderers.get(key)
        if known is None:
            try:
                known = self._package.create_renderer(self._tokenizer, self._config, chat_template_kwargs=dict(kwargs))
            except Exception as error:
                raise RequestError(
                    f"the chat format does not take {key}: {_said(error)}", param="chat_template_kwargs"
                ) from error
            if len(self._renderers) >= _FORMATS_REMEMBERED:
                self._renderers = {"{}": self._plain}
            self._renderers[key] = known
        return known

    def _shown(self, attempt: Any, said: Sequence[int]) -> str:
        """An attempt at a tool call as the model wrote it."""
        if attempt.token_span is None:
            return str(attempt.raw)
        start, end = attempt.token_span
        return self.decode(said[start:end], special=True)


def _package() -> Any:
    try:
        package = importlib.import_module("renderers")
        importlib.import_module("renderers.base")
    except ModuleNotFoundError as error:
        raise EngineFailed(f"{error.name} is missing: pip install 'verbatim-rl[renderers]'") from error
    return package


def _said(error: Exception) -> str:
    if isinstance(error, ValidationError):
        # Its text names every configuration that the package has.
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"[:500]
    return (str(error) or type(error).__name__)[:500]


def _plain_message(message: Message) -> dict[str, Any]:
    """The message as chat templates are given it, which is what the package mirrors: text contents, parsed arguments, reasoning
    under one name. Raises RequestError for a role that a format could drop without a word."""
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"a message has the role {role!r}; chat formats know {', '.join(_ROLES)}", param="messages")
    plain = {key: message[key] for key in ("role", "name", "tool_call_id") if message.get(key) is not None}
    plain["content"] = _text(message.get("content"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and reasoning:
        plain["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _text(content: Any) -> str:
    if isinstance(content, list):
        # As vLLM joins parts for a template that wants text.
        return "\n".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return content or ""


def _plain_call(call: Message) -> dict[str, Any]:
    """The call with its arguments as an object: templates need one. Text that is none becomes {}, as vLLM makes it for the same
    templates, and a history that holds such a call goes on. Source: vLLM 0.32, renderers/chat_utils.py, _postprocess_messages."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    named = {"name": function.get("name") or "", "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": call.get("id") or "", "type": "function", "function": named}


def _say_as_harmony(messages: Sequence[Message], plain: Sequence[dict[str, Any]]) -> None:
    """Change the plain messages to what vLLM gives OpenAI's encoder of gpt-oss instead of a template: arguments as the text they
    were, and tool results with the name of the function that was called, which the package would call `unknown`.

    Source: vLLM 0.32, entrypoints/openai/parser/harmony_utils.py."""
    called: dict[str, str] = {}
    for message, told in zip(messages, plain, strict=True):
        for call, said in zip(message.get("tool_calls") or (), told.get("tool_calls") or (), strict=True):
            called[said["id"]] = said["function"]["name"]
            arguments = (call.get("function") or {}).get("arguments") or ""
            said["function"]["arguments"] = arguments
        if told["role"] == "tool" and told.get("tool_call_id") in called:
            told["name"] = called[told["tool_call_id"]]


def _call(attempt: Any, position: int) -> dict[str, Any] | None:
    """A tool call in the chat shape; None when it is none that a harness could run. A name that was not offered is one: the
    harness says so to the model."""
    if str(attempt.status) not in ("ok", "unknown_tool") or not attempt.name:
        return None
    arguments = attempt.arguments
    if isinstance(arguments, str):
        text = arguments
    else:
        text = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return {"id": f"call_{position}", "type": "function", "function": {"name": attempt.name, "arguments": text}}
