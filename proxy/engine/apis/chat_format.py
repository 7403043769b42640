"""ChatFormat: a model's chat format, for engines that take token ids but neither render messages nor parse replies.

The `renderers` package knows the formats of many model families: messages to ids, sampled ids to a message. Its bridge between turns
is not used, because `reconstruct.bridge` proves one from the renderings. Everything here blocks; `LocalRenderer` runs it in threads.
Checked against renderers 0.1.12.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from proxy.errors import EngineFailed, RequestError

_MAX_RENDERERS = 64
"""Renderers kept, one per set of template kwargs that harnesses send."""

_ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]


class ChatFormat:
    """The format of `model`, a Hugging Face name or a folder with its tokenizer. `options` are fields of the package's
    configuration; `name` picks the renderer, otherwise the package must know the model by its name."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        """Raises EngineFailed for an unknown tokenizer, renderer or option, and when the package is missing."""
        self._package = _package()
        try:
            self._tokenizer = self._package.base.load_tokenizer(model)
            self._config = self._configuration(model, options)
            self._plain = self._package.create_renderer(self._tokenizer, self._config)
        except Exception as error:
            raise EngineFailed(f"cannot load the renderer of '{model}': {_describe(error)}") from error
        self._accepts = self._package.template_field_names(self._config)
        self._renderers: dict[str, Any] = {"{}": self._plain}
        self.stop_ids: list[int] = [int(token) for token in self._plain.get_stop_token_ids()]
        self.end_id: int | None = self._tokenizer.eos_token_id

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message], kwargs: Mapping[str, Any], generate: bool
    ) -> list[int]:
        """The ids of the messages. Raises RequestError for messages that the format cannot express."""
        renderer = self._renderer(kwargs)
        plain = [_plain_message(message) for message in messages]
        if self._config.name == "gpt-oss":
            _adapt_to_harmony(messages, plain)
        try:
            ids = renderer.render_ids(plain, tools=list(tools) or None, add_generation_prompt=generate)
        except Exception as error:
            raise RequestError(
                f"the model's chat format does not take these messages: {_describe(error)}", param="messages"
            ) from error
        return [int(token) for token in ids]

    def parse(
        self, prompt_ids: list[int], sampled: list[int], tools: Sequence[Message], kwargs: Mapping[str, Any], *, calls: bool
    ) -> dict[str, Any]:
        """The message that the `sampled` ids, with or without their stop token, make after the prompt.

        A tool call that cannot be read, or any when `calls` is False, becomes text. Raises EngineFailed."""
        try:
            parsed = self._renderer(kwargs).parse_response(sampled, tools=list(tools) or None, prompt_ids=prompt_ids)
        except Exception as error:
            raise EngineFailed(f"the sampled tokens cannot be parsed: {_describe(error)}") from error
        texts: list[str] = [parsed.content or ""]
        found: list[dict[str, Any]] = []
        for attempt in parsed.tool_calls:
            call = _call(attempt, len(found)) if calls else None
            if call is None:
                texts.append(self._written(attempt, sampled))
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
        """The ids of a text; `special` adds what the tokenizer puts before a whole prompt."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=special)]

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """The text of ids, with or without their `special` tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def accepts(self, kwarg: str) -> bool:
        """Whether the format reads a template kwarg of this name."""
        return kwarg in self._accepts

    def _configuration(self, model: str, options: Mapping[str, Any]) -> Any:
        known = self._package.base.MODEL_RENDERER_MAP
        name = options.get("name", "auto")
        if name == "auto":
            name = known.get(getattr(self._tokenizer, "name_or_path", "") or model)
        if name is None:
            # The package would fall back to the tokenizer's template, which cannot tell a tool call from text.
            raise ValueError(
                "the renderers package does not know this name; pick one of its renderers, for example "
                'VERBATIM_RENDERER_OPTIONS=\'{"name": "qwen3"}\''
            )
        return TypeAdapter(self._package.RendererConfig).validate_python({**options, "name": name})

    def _renderer(self, kwargs: Mapping[str, Any]) -> Any:
        """The renderer for these template kwargs. Raises RequestError for kwargs it does not have."""
        key = json.dumps(kwargs, sort_keys=True)
        known = self._renderers.get(key)
        if known is None:
            try:
                known = self._package.create_renderer(self._tokenizer, self._config, chat_template_kwargs=dict(kwargs))
            except Exception as error:
                raise RequestError(
                    f"the chat format does not take {key}: {_describe(error)}", param="chat_template_kwargs"
                ) from error
            if len(self._renderers) >= _MAX_RENDERERS:
                self._renderers = {"{}": self._plain}
            self._renderers[key] = known
        return known

    def _written(self, attempt: Any, sampled: Sequence[int]) -> str:
        """The tool call as the model wrote it."""
        if attempt.token_span is None:
            return str(attempt.raw)
        start, end = attempt.token_span
        return self.decode(sampled[start:end], special=True)


def _package() -> Any:
    try:
        package = importlib.import_module("renderers")
        importlib.import_module("renderers.base")
    except ModuleNotFoundError as error:
        raise EngineFailed(f"{error.name} is missing: pip install 'verbatim-rl[renderers]'") from error
    return package


def _describe(error: Exception) -> str:
    if isinstance(error, ValidationError):
        # Its own text lists every configuration of the package.
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"[:500]
    return (str(error) or type(error).__name__)[:500]


def _plain_message(message: Message) -> dict[str, Any]:
    """The message as a chat template gets it: text content, parsed arguments, reasoning under one name.

    Raises RequestError for a role that a format could drop silently."""
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
        # vLLM joins parts the same way for templates that want text.
        return "\n".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return content or ""


def _plain_call(call: Message) -> dict[str, Any]:
    """The call with its arguments as an object, which templates need. Arguments that are not an object become {}, as in vLLM, so that
    a history with such a call can go on. Source: vLLM 0.32, renderers/chat_utils.py, _postprocess_messages."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    named = {"name": function.get("name") or "", "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": call.get("id") or "", "type": "function", "function": named}


def _adapt_to_harmony(messages: Sequence[Message], plain: Sequence[dict[str, Any]]) -> None:
    """Change the plain messages to what vLLM gives OpenAI's gpt-oss encoder in place of a template: arguments as their original text,
    and tool results with the name of the called function, which the package would name `unknown`.

    Source: vLLM 0.32, entrypoints/openai/parser/harmony_utils.py."""
    names: dict[str, str] = {}
    for message, adapted in zip(messages, plain, strict=True):
        for original, call in zip(message.get("tool_calls") or (), adapted.get("tool_calls") or (), strict=True):
            names[call["id"]] = call["function"]["name"]
            call["function"]["arguments"] = (original.get("function") or {}).get("arguments") or ""
        if adapted["role"] == "tool" and adapted.get("tool_call_id") in names:
            adapted["name"] = names[adapted["tool_call_id"]]


def _call(attempt: Any, position: int) -> dict[str, Any] | None:
    """A tool call in the chat shape; None when no harness could run it. A call of a tool that was not offered counts: the harness
    tells the model so."""
    if str(attempt.status) not in ("ok", "unknown_tool") or not attempt.name:
        return None
    arguments = attempt.arguments
    if isinstance(arguments, str):
        text = arguments
    else:
        text = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return {"id": f"call_{position}", "type": "function", "function": {"name": attempt.name, "arguments": text}}
