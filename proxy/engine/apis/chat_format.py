"""ChatFormat: a model's chat format, for engines that take token ids but neither render messages nor parse replies.

The `renderers` package knows the formats of many model families: messages to ids, sampled ids to a message. Its bridge between turns
is not used, because `reconstruct.prompt` proves one from the renderings. Everything here blocks; `LocalRenderer` runs it in threads.
Checked against renderers 0.1.12.
"""

from __future__ import annotations

import importlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

from proxy.errors import EngineFailed, RequestError
from reconstruct.extras import how_to_install

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
            self._controls = ControlTokens(self._tokenizer)
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
        plain, offered = self._controls.hide(plain), self._controls.hide(list(tools))
        try:
            ids = renderer.render_ids(plain, tools=offered or None, add_generation_prompt=generate)
        except Exception as error:
            raise RequestError(
                f"the model's chat format does not take these messages: {_describe(error)}", param="messages"
            ) from error
        return self._controls.spell(ids)

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
            call = _call(attempt) if calls else None
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

    @property
    def keeps_text_apart(self) -> bool:
        """Whether control tokens in messages and tools are read as text."""
        return self._controls.are_hidden

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


class ControlTokens:
    """Keeps control tokens that stand in a text from becoming those that structure the prompt.

    Whoever renders makes one text of messages and glue, and its tokenizer cannot tell which of the two a control token is in. So each
    one in a message is replaced by a stand-in, a token of its own that nobody can write, and its id by the ids of the token's text."""

    def __init__(self, tokenizer: Any) -> None:
        """Adds the stand-ins to the tokenizer, behind its vocabulary. One that takes none leaves texts as they are."""
        added = {int(number): token for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        # Some models declare only a part of them as special: DeepSeek's that open a turn are not.
        controls = [str(token) for token in added.values() if token.special or re.search(r"[|\uff5c]", str(token))]
        nonce = secrets.token_hex(8)
        self._stand_ins = {control: f"control{nonce}x{number:04}x" for number, control in enumerate(controls)}
        # The longest first: one may begin with another.
        self._found = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or r"(?!)")
        with suppress(NotImplementedError):
            tokenizer.add_tokens(list(self._stand_ins.values()))
        self._texts: dict[int, list[int]] = {}
        for control, stand_in in self._stand_ins.items():
            shown = _encode(tokenizer, stand_in)
            # In two pieces, neither of which is the token.
            text = [*_encode(tokenizer, control[:1]), *_encode(tokenizer, control[1:])]
            if len(shown) == 1 and shown[0] not in added and not added.keys() & set(text):
                self._texts[shown[0]] = text
        self.are_hidden = 0 < len(self._texts) == len(controls)

    def hide(self, value: Any) -> Any:
        """`value`, of JSON's types, with stand-ins for the control tokens in all its texts; keys are texts, too."""
        if isinstance(value, str):
            return self._found.sub(lambda found: self._stand_ins[found[0]], value) if self.are_hidden else value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def spell(self, ids: Sequence[int]) -> list[int]:
        """`ids` with the text of control tokens where stand-ins are."""
        spelled: list[int] = []
        for token in ids:
            text = self._texts.get(token)
            spelled += (int(token),) if text is None else text
        return spelled


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _package() -> Any:
    try:
        package = importlib.import_module("renderers")
        importlib.import_module("renderers.base")
    except ModuleNotFoundError as error:
        raise EngineFailed(f"{error.name} is missing: {how_to_install('renderers')}") from error
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


def _call(attempt: Any) -> dict[str, Any] | None:
    """A tool call in the chat shape; None when no harness could run it. A call of a tool that was not offered counts: the harness
    tells the model so."""
    if str(attempt.status) not in ("ok", "unknown_tool") or not attempt.name:
        return None
    arguments = attempt.arguments
    if isinstance(arguments, str):
        text = arguments
    else:
        text = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return {"id": attempt.id or "", "type": "function", "function": {"name": attempt.name, "arguments": text}}
