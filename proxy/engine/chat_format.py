"""ChatFormat: a model's chat format on this side of the wire, for engines that take token ids but render and parse nothing.

The `renderers` package knows the formats of many model families: messages to ids, sampled ids to a message. Its bridge from turn to
turn is not used: `reconstruct.bridge` proves one from the renderings. Everything here blocks; `local_renderer` keeps it off the
event loop. Checked against renderers 0.1.12.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from proxy.errors import EngineFailed, RequestError

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
