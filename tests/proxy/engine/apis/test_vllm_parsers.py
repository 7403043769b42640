"""vLLM's own tool parsers, given calls that the model stopped in: whatever a parser makes of them, each is marked, and no whole one is."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from proxy.call.labels import has_invalid_call
from proxy.dialects.base import Request
from tests.support.machine import unavailable

Parse = Callable[[str], dict[str, Any]]

# Nothing is required, so a call without arguments is one that the schema accepts.
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}]
JSON_CALL = '{"name": "look", "arguments": {"key": "a"}}'
XML_CALL = "<function=look>\n<parameter=key>\na\n</parameter>\n</function>"
DSML = '<｜DSML｜{0}>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="key" string="true">a</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{0}>'  # noqa: E501
CALLS = {
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "granite4": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "ernie45": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n{XML_CALL}\n</tool_call>",
    "qwen3_xml": f"<tool_call>\n{XML_CALL}\n</tool_call>",
    "step3p5": f"<tool_call>\n{XML_CALL}\n</tool_call>",
    "mimo": f"<tool_call>\n{XML_CALL}\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{XML_CALL}\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="key">a</parameter>\n</invoke>\n</minimax:tool_call>',
    "glm45": "<tool_call>look\n<arg_key>key</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "glm47": "<tool_call>look<arg_key>key</arg_key><arg_value>a</arg_value></tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"key": "a"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
    '{"key": "a"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": DSML.format("function_calls"),
    "deepseek_v4": DSML.format("tool_calls"),
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"key": "a"}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": '[TOOL_CALLS]look[ARGS]{"key": "a"}',
    "llama3_json": '<|python_tag|>{"name": "look", "parameters": {"key": "a"}}',
    "granite": f"<|tool_call|>[{JSON_CALL}]",
    "jamba": f"<tool_calls>[\n{JSON_CALL}\n]</tool_calls>",
    "hunyuan_a13b": f"<tool_calls>[{JSON_CALL}]</tool_calls>",
    "longcat": f"<longcat_tool_call>{JSON_CALL}</longcat_tool_call>",
    "apertus": '<|tools_prefix|>[{"look": {"key": "a"}}]<|tools_suffix|>',
    "olmo3": '<function_calls>look(key="a")</function_calls>',
    "lfm2": '<|tool_call_start|>[look(key="a")]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:look{key:<|"|>a<|"|>}<tool_call|>',
}
"""A whole call as each parser of vLLM 0.32 reads it. The parsers `pythonic` and `xlam` read calls without markup, which is text until it is
whole; the engine refuses a reply that `internlm` cannot read."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token for each character, and for each piece of markup."""
    if find_spec("vllm") is None:
        unavailable("vllm is not installed: `make install` installs it")
    from transformers import PreTrainedTokenizerFast

    texts = "".join(CALLS.values())
    plain = Tokenizer(
        models.WordLevel({char: at for at, char in enumerate(sorted({*texts, *string.printable}))}, unk_token="?")
    )
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    markup = sorted({*re.findall(r"<[^<> \n=]{2,40}>|\[[A-Z_]+\]", texts), "<think>", "</think>"})
    return PreTrainedTokenizerFast(tokenizer_object=plain, additional_special_tokens=markup)


def parser(name: str, tokenizer: Any) -> Parse:
    """What vLLM's parser of that name makes of a reply."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    asked = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "q"}], tools=TOOLS)

    def parse(text: str) -> dict[str, Any]:
        read = ToolParserManager.get_tool_parser(name)(tokenizer, asked.tools).extract_tool_calls(text, asked)
        calls = [{"function": {"name": call.function.name, "arguments": call.function.arguments}} for call in read.tool_calls]
        return {"content": read.content} | ({"tool_calls": calls} if calls else {})

    return parse


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_marked_wherever_the_model_stopped_in_it_and_not_when_it_is_whole(name: str, tokenizer: Any) -> None:
    parse = parser(name, tokenizer)
    whole, request = CALLS[name], Request("chat", "m", [], tools=TOOLS)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    message = parse(whole)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["key"].strip() == "a"
    assert not has_invalid_call(request, message, "stop", whole)
    for length in range(1, len(ids)):
        cut = tokenizer.decode(ids[:length])
        assert has_invalid_call(request, parse(cut), "stop", cut), f"{cut!r} is not marked"
