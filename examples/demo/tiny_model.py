"""make_tiny_model: a random Qwen3 of about a million parameters, with a tokenizer and a chat template of its own.

It stands where a real model would: `transformers` loads it by AutoTokenizer and AutoModelForCausalLM, vLLM serves it
(tool parser `hermes`, reasoning parser `qwen3`), and everything around the model (rendering, tool parsing, token ids,
logprobs, weight updates) is the real thing. Nothing is downloaded.

The tokenizer is a byte-level BPE, so any text survives encode and decode. The template is ChatML and behaves like
Qwen3's: a newline after every `<|im_end|>`, tools listed in the system turn, tool results inside `<tool_response>` in a
user turn, and reasoning shown as `<think>` blocks only after the last user query.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# As in Qwen3, these are single tokens but not "special": a decoder that skips special tokens still shows them.
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# Words, numbers digit by digit, punctuation, white space: the same splits as Qwen's tokenizers.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}{{- part.text if part.text is defined else '' -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set lead = namespace(text='', first=0) -%}
{%- if messages and messages[0].role == 'system' -%}
    {%- set lead.text = text(messages[0].content) -%}
    {%- set lead.first = 1 -%}
{%- endif -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' + (lead.text + '\n\n' if lead.text else '') -}}
    {{- 'Tools:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\n</tools>\nCall one with a JSON object in tool_call tags:\n' -}}
    {{- '<tool_call>\n{"name": name, "arguments": arguments}\n</tool_call><|im_end|>\n' -}}
{%- elif lead.first -%}
    {{- '<|im_start|>system\n' + lead.text + '<|im_end|>\n' -}}
{%- endif -%}
{%- set query = namespace(last=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' and not text(message.content).startswith('<tool_response>') -%}
        {%- set query.last = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if loop.index0 < lead.first -%}
    {%- elif message.role in ['user', 'system', 'developer'] -%}
        {{- '<|im_start|>' + ('user' if message.role == 'user' else 'system') + '\n' -}}
        {{- text(message.content) + '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set body = namespace(said=text(message.content), thought='') -%}
        {%- if message.reasoning_content is string -%}
            {%- set body.thought = message.reasoning_content.strip('\n') -%}
        {%- elif message.reasoning is string -%}
            {%- set body.thought = message.reasoning.strip('\n') -%}
        {%- elif '</think>' in body.said -%}
            {%- set body.thought = body.said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
            {%- set body.said = body.said.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if loop.index0 > query.last and (body.thought or (EMPTY_THINK and loop.last)) -%}
            {{- '<think>\n' + body.thought + '\n</think>\n\n' -}}
        {%- endif -%}
        {{- body.said -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {{- '\n' if body.said or not loop.first else '' -}}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
            {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\n<tool_response>\n' + text(message.content) + '\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""

PROSE = """
You are a helpful assistant that can call tools. Tools: Call one with a JSON object in tool_call tags: system user assistant
tool name arguments type function parameters properties required description. Open 3 doors with keys 1 to 4. Door: red
Door: blue Door: green Door: white opened. wrong key. No door opened. Read the file, write the file, run the command, list
the directory, search the text. The quick brown fox jumps over the lazy dog. What is the weather in Paris today? It is sunny
with a light wind. Thank you. Let me think about this step by step. First I look at the question, then I find the answer,
and at last I check it again. The model reads a prompt of tokens, samples the next token, and writes down how likely it
was. A reward tells how well it did.
""".strip()

JSON_SHAPES = """
{"type": "function", "function": {"name": "open", "parameters": {"type": "object", "properties": {"door":
{"type": "string"}, "key": {"type": "integer"}}, "required": ["door", "key"]}}}
{"type": "function", "function": {"name": "read_file", "description": "Read a file.", "parameters":
{"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}, "required": ["path"]}}}
{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters":
{"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius"]}},
"required": ["city"]}}}
{"name": "open", "arguments": {"door": "red", "key": 3}}
{"name": "read_file", "arguments": {"path": "src/main.py", "limit": 100}}
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
""".strip()


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    tie_word_embeddings: bool = False,
    hidden_size: int = 128,
    layers: int = 3,
    max_position_embeddings: int = 32768,
    vocabulary: int = 1024,
    initializer_range: float = 0.02,
    empty_think_when_last: bool = False,
    texts: Sequence[str] = (),
) -> Path:
    """The directory, holding config.json, model.safetensors (float32) and the tokenizer with its chat template.

    `hidden_size` is a multiple of 64. The same arguments give the same files. `empty_think_when_last` makes the
    template show an empty think block in a last assistant turn that has no reasoning, as Qwen3's own template does.
    The tokenizer learns its merges from `texts`, too: what they repeat becomes few tokens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(vocabulary, empty_think_when_last=empty_think_when_last, texts=texts)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // 32,
            num_key_value_heads=hidden_size // 64,
            head_dim=32,
            max_position_embeddings=max_position_embeddings,
            initializer_range=initializer_range,
            tie_word_embeddings=tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_tokenizer(
    vocabulary: int, *, empty_think_when_last: bool = False, texts: Sequence[str] = (), special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer of `vocabulary` tokens, its chat template included. `special`: further special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    added = 3 + len(special) + len(MARKUP)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([*_corpus(), *texts], trainer)
    bpe.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END, *special])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE.strip().replace("EMPTY_THINK", str(empty_think_when_last).lower())
    return tokenizer


def _corpus() -> list[str]:
    """Prose and JSON, and made-up words so that there is something to merge up to the size of the vocabulary."""
    made = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on", "st")]
    words = [" " + "".join(made.choices(syllables, k=made.randint(1, 3))) for _ in range(4000)]
    return [PROSE] * 8 + [JSON_SHAPES] * 8 + ["".join(words)]
