"""Chat formats in small: for each family a tokenizer, a chat template, its stop tokens, and how its model speaks and is parsed.

The tokenizers are byte-level BPE trained on a few lines, so any text survives encode and decode, and `fish` + `ing` can be sampled
where `fishing` is one token. The templates (`chat_templates/*.jinja`) are rendered as transformers and vLLM do it. What the
families stand for: see the comment at the head of each template.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import SandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.engine.template_markup import (
    DEEPSEEK,
    GEMMA,
    GLM4,
    HARMONY,
    KIMI,
    LLAMA3,
    MISTRAL,
    QWEN3,
    Markup,
    Parsed,
    Said,
)

CORPUS = """
fishing
fish
ing
fish fishing ing sing singing ring ringing the a cat dog bird is in on at and or not to of you are helpful assistant user system
hello world weather in Paris is sunny today look up the number and say it {"name": "lookup", "arguments": {"key": "alpha"}}
{"type": "function", "function": {"name": "lookup", "description": "Looks a key up.", "parameters": {"type": "object",
"properties": {"key": {"type": "string"}}, "required": ["key"]}}} analysis commentary final functions assistant channel
first second third fourth value answer question think about this step by step then call a tool and read what it says
""".strip()


@dataclass(frozen=True)
class Family:
    """`end` is the tokenizer's EOS (stop_reason null), `other_ends` the further stop tokens of the generation config (stop_reason
    is their id). `special` tokens vanish from decoded text; `markup.tokens` are single tokens that stay."""

    name: str
    special: tuple[str, ...]
    end: str
    markup: Markup
    other_ends: tuple[str, ...] = ()
    bos: str = ""
    template: str = ""
    """The family whose template it has, if that is another one."""
    folder: Path | None = None
    """A model's folder whose tokenizer.json and chat_template.jinja stand in for the ones made here."""
    file: Path | None = None
    """A template that stands in for the one made here."""

    @property
    def tokenizer(self) -> Tokenizer:
        return _tokenizer(self)

    @property
    def end_id(self) -> int:
        return self.id_of(self.end)

    @property
    def other_end_ids(self) -> tuple[int, ...]:
        return tuple(self.id_of(token) for token in self.other_ends)

    def id_of(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, f"{token!r} is no token of {self.name}"
        return int(found)

    def encode(self, text: str) -> list[int]:
        """The canonical ids of a text with its special tokens; nothing is added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def render_text(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **kwargs: Any) -> str:
        """The template's text. Raises jinja2.TemplateError for what the template does not take."""
        kwargs.setdefault("add_generation_prompt", True)
        given = {"bos_token": self.bos, "eos_token": self.end, **kwargs}
        plain = plain_messages(messages, parts=_takes_parts(self))
        return str(_template(self).render(messages=plain, tools=tools or None, **given))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, **kwargs: Any) -> list[int]:
        return self.encode(self.render_text(messages, tools, **kwargs))

    def speak(self, content: str = "", *, reasoning: str = "", calls: Sequence[tuple[str, Any]] = ()) -> str:
        """What the model samples to say this, after a generation prompt and with its stop token. Calls are (name, arguments)."""
        return self.markup.speak(Said(content, reasoning, tuple(calls)))

    def parse(self, text: str, *, tools: bool, prompt: str = "") -> Parsed:
        """Reasoning, content and tool calls of a sampled text; calls only where the request offers `tools`."""
        return self.markup.parse(text, tools, self.markup.is_open(prompt))


def plain_messages(messages: Sequence[Mapping[str, Any]], *, parts: bool = False) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to a template: string contents (lists of `parts` where the template iterates over them),
    parsed arguments, reasoning under both of its names."""
    return [_plain_message(message, parts) for message in messages]


def _plain_message(message: Mapping[str, Any], parts: bool) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key in ("role", "name", "tool_call_id")}
    content = message.get("content")
    if isinstance(content, list) and not (parts and message.get("role") != "tool"):
        content = "\n".join(part.get("text", "") if isinstance(part, dict) else part for part in content)
    plain["content"] = content or ""
    reasoning = message.get("reasoning") if message.get("reasoning") is not None else message.get("reasoning_content")
    if message.get("role") == "assistant" and reasoning is not None:
        plain["reasoning"] = plain["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}


@functools.cache
def _takes_parts(family: Family) -> bool:
    return re.search(r"for \w+ in (message\.)?content\b", _template_text(family)) is not None


def _template_text(family: Family) -> str:
    templates = Path(__file__).parent / "chat_templates"
    file = family.folder / "chat_template.jinja" if family.folder else templates / f"{family.template or family.name}.jinja"
    return (family.file or file).read_text(encoding="utf-8")


@functools.cache
def _template(family: Family) -> jinja2.Template:
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(_template_text(family))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what an assistant said, and renders it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _tokenizer(family: Family) -> Tokenizer:
    if family.folder is not None:
        return Tokenizer.from_file(str(family.folder / "tokenizer.json"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [CORPUS] * 4, trainers.BpeTrainer(vocab_size=560, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(list(family.special))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.markup.tokens])
    return tokenizer


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "qwen3",
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            "<|im_end|>",
            QWEN3,
            other_ends=("<|endoftext|>",),
        ),
        Family(
            "llama3",
            ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
            "<|eot_id|>",
            LLAMA3,
            other_ends=("<|eom_id|>", "<|end_of_text|>"),
            bos="<|begin_of_text|>",
        ),
        Family(
            "glm4",
            ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            "<|endoftext|>",
            GLM4,
            other_ends=("<|user|>", "<|observation|>"),
        ),
        Family(
            "deepseek",
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            "<｜end▁of▁sentence｜>",
            DEEPSEEK,
            bos="<｜begin▁of▁sentence｜>",
        ),
        Family(
            "harmony",
            ("<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
            "<|return|>",
            HARMONY,
            other_ends=("<|call|>", "<|endoftext|>"),
        ),
        Family(
            "mistral",
            ("<s>", "</s>"),
            "</s>",
            MISTRAL,
            bos="<s>",
        ),
        Family(
            "gemma",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            "<eos>",
            GEMMA,
            other_ends=("<end_of_turn>",),
            bos="<bos>",
        ),
        Family(
            "kimi",
            ("[BOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            "<|im_end|>",
            KIMI,
        ),
    )
}
