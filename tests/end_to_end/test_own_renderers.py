"""Models that vLLM renders by other means than a chat template, on a real vLLM: gpt-oss by OpenAI's harmony, Mistral by mistral_common.

harmony adds a generation prompt whether it is asked for or not, mistral_common refuses whatever ends with a reply. Both have their own
vocabulary here, of a tiny random model that samples what the test tells it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_server import VllmServer
from tests.support.engine.vllm_server import require_vllm, running_vllm
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.sessions.conversations import TOOLS

pytestmark = pytest.mark.engine


@contextmanager
def telling(model: Path, replies: Sequence[Sequence[int]], *extra: str, **parsers: Any) -> Iterator[VllmServer]:
    """vLLM that samples these replies, one after the other."""
    (model / "told.json").write_text(json.dumps(replies))
    flags = ("--logits-processors", "tests.support.engine.told_tokens:ToldTokens", *extra)
    with running_vllm(model, model, *flags, **parsers) as server:
        yield server


def converse(service: RunningService) -> Session:
    """A session of two tool calls, an answer, and an answer to a second question."""
    session = service.session()
    messages: list[Any] = [{"role": "user", "content": "look up alpha and beta"}]
    for value in ("7", "8"):
        messages.append(session.answer(messages, tools=TOOLS, max_tokens=60))
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": value})
    messages += [session.answer(messages, tools=TOOLS, max_tokens=60), {"role": "user", "content": "thank you"}]
    session.answer(messages, tools=TOOLS, max_tokens=60)
    return session


def assert_sampled(session: Session, replies: Sequence[Sequence[int]], *, rows: int) -> None:
    assert [call["completion_ids"] for call in session.calls] == [list(reply) for reply in replies]
    made, accounting = session.trajectories()
    assert len(made) == rows
    assert sum(sum(row["loss_mask"]) for row in made) == accounting["sampled_tokens"] == sum(map(len, replies))


@pytest.mark.case(62)
def test_a_tool_loop_of_gpt_oss_is_one_row_under_harmony(tmp_path: Path, redis_server: RedisServer) -> None:
    """Each call was a row: no rendering could be had without a generation prompt, and <|return|> stands in no history."""
    require_vllm()
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding  # type: ignore[import-untyped]

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    def encode(*texts: str) -> list[int]:
        return [token for text in texts for token in encoding.encode(text, allowed_special="all")]

    header = " to=functions.lookup<|channel|>commentary json<|message|>"
    replies = [
        encode(f'{header}{{"key": "alpha"}}<|call|>'),
        # In other ids than a rendering has.
        encode(f'{header}{{"key": "be', "ta", '"', "}", "<|call|>"),
        encode("<|channel|>final<|message|>seven and eight<|return|>"),
        encode("<|channel|>final<|message|>wel", "come<|return|>"),
    ]
    redis_server.flushall()
    with (
        telling(make_gpt_oss(tmp_path), replies, tool_parser="openai", reasoning_parser="openai_gptoss") as server,
        RunningService(server.url, redis_server.url) as service,
    ):
        session = converse(service)
        assert [call["branch_reason"] for call in session.calls] == [None] * 4
        assert [call["projection"] for call in session.calls] == ["", "exact", "exact", "turn_end"]
        assert_sampled(session, replies, rows=1)
        prompt = encoding.decode(session.calls[-1]["prompt_ids"])
    assert prompt.endswith("seven and eight<|return|><|end|><|start|>user<|message|>thank you<|end|><|start|>assistant")


def make_gpt_oss(folder: Path) -> Path:
    """Its texts stay ids: harmony reads and writes them with the vocabulary that it carries."""
    from tokenizers import Tokenizer, models
    from transformers import GenerationConfig, GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"]}
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(vocab_size=201088, eos_token_id=200002, pad_token_id=199999, **sizes, **heads, **experts)
    GptOssForCausalLM(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=[200002, 199999, 200012], pad_token_id=199999).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(201088)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t200002", unk_token="t0").save_pretrained(folder)
    return folder


def test_a_tool_loop_of_mistral_is_one_row_in_its_own_tokenizer_mode(tmp_path: Path, redis_server: RedisServer) -> None:
    """Each call was a row: no rendering may end with a reply, and none may have a tool's result without its call."""
    require_vllm()
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = Tekkenizer.from_file(make_mistral(tmp_path) / "tekken.json")

    def encode(*texts: str, call: bool = False) -> list[int]:
        opened = [tokenizer.get_special_token("[TOOL_CALLS]")] if call else []
        return [*opened, *(token for text in texts for token in tokenizer.encode(text, bos=False, eos=False)), tokenizer.eos_id]

    replies = [
        encode('[{"name": "lookup", "arguments": {"key": "alpha"}}]', call=True),
        encode('[{"name": "lookup", "arguments": {"key": "be', 'ta"}}', "]", call=True),
        encode("seven and eight"),
        encode("wel", "come"),
    ]
    redis_server.flushall()
    mode = ("--tokenizer-mode", "mistral", "--config-format", "hf", "--load-format", "safetensors")
    with (
        telling(tmp_path, replies, *mode, tool_parser="mistral", reasoning_parser=None) as server,
        RunningService(server.url, redis_server.url) as service,
    ):
        session = converse(service)
        # The list of tools stands before the latest user message: it moves with a new one.
        assert [call["branch_reason"] for call in session.calls] == [None, None, None, "history_rewritten"]
        assert_sampled(session, replies, rows=2)


def make_mistral(folder: Path) -> Path:
    import mistral_common
    from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": None}
    MistralForCausalLM(MistralConfig(vocab_size=131072, eos_token_id=2, bos_token_id=1, **sizes, **heads)).save_pretrained(
        folder
    )
    GenerationConfig(eos_token_id=2, bos_token_id=1).save_pretrained(folder)
    shutil.copy(Path(mistral_common.__file__).parent / "data/tekken_240911.json", folder / "tekken.json")
    return folder
