"""The bridge derived from renderings against bridges written by hand: the `renderers` package has one per model family.

For each family a conversation is rendered with that family's renderer, a reply is sampled (as the renderer would write it, split
otherwise than the tokenizer would, or cut), and both bridges to the next turn are made. The renderings that drive ours come from the
same renderer, so that what is compared is the derivation and no template. Where both bridge, the ids are the same, but for the
slips named in the table; there, and where only the other bridges, the renderer's own rendering of the request sides with us.

The tokenizers are small and made here, with each family's own special tokens. Left out: gpt-oss, whose renderer downloads its
vocabulary and checks its hash; the default renderer, which never bridges; Mistral, which has no renderer; images.

The package is installed without its dependencies (peers.txt says why), and CI fails without it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from reconstruct.prompt import Bridge, Rendering, SampledReply, Unproven, derive, turn_end
from reconstruct.records import Ids, pack_ids
from tests.support.engine.template_families import CORPUS, plain_messages
from tests.support.sessions.conversations import TOOLS

if os.environ.get("CI") != "true":
    pytest.importorskip("renderers", reason="renderers is not installed: see tests/peers.txt")
import renderers

Message = dict[str, Any]
CONVERSATIONS = 16
"""Per family; no two families have one in common."""
CUT = 35
"""The seed of one more, which all families have: its reply is cut right after the last word of its text, where slips show."""

CHATML = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
GLM = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
DEEPSEEK_V3 = (
    *DEEPSEEK,
    *(f"<｜tool▁{what}▁{edge}｜>" for what in ("calls", "call", "outputs", "output") for edge in ("begin", "end")),
    "<｜tool▁sep｜>",
)
DEEPSEEK_V4 = (
    *(*DEEPSEEK, "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜"),
    *(f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")),
)
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
GEMMA = (
    *("<pad>", "<bos>", "<eos>", "<|think|>", "<|image|>", '<|"|>'),
    *(
        part
        for what in ("turn", "channel", "tool", "tool_call", "tool_response", "image")
        for part in (f"<|{what}>", f"<{what}|>")
    ),
)
KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "[EOS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
)
MINIMAX = ("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")
HY3 = (
    *(f"<｜hy_{what}:opensource｜>" for what in ("begin_of_sentence", "eos", "User", "Assistant")),
    *("<｜reasoning_mode:opensource｜>", "<tool_sep:opensource>"),
    *(f"<{slash}think:opensource>" for slash in ("", "/")),
    *(f"<{slash}tool_{what}:opensource>" for what in ("calls", "call", "responses", "response") for slash in ("", "/")),
    *(f"<{slash}arg_{what}:opensource>" for what in ("key", "value") for slash in ("", "/")),
)
LAGUNA = ("〈|EOS|〉", "<think>", "</think>", "<assistant>", "</assistant>", "<tool_call>", "</tool_call>")
INKLING = (
    *(f"<|message_{role}|>" for role in ("user", "model", "system", "tool")),
    *(f"<|content_{what}|>" for what in ("text", "thinking", "image", "audio_input", "xml", "model_end_sampling")),
    *("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|end_message|>", "<|audio_end|>"),
    *("<|unused_200054|>", "<|unused_200053|>", "<|endoftext|>"),
)


@dataclass(frozen=True)
class Family:
    """`stops`: what the model ends a turn with, by the role that follows, where the renderer does not write it behind the last turn.
    `slip`: what the hand-written bridge gets wrong by its renderer's own rendering; empty where both must agree."""

    renderer: str
    tokens: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    thinks: bool = True
    most_calls: int = 3
    talks_while_calling: bool = True
    stops: dict[str, str] = field(default_factory=dict)
    slip: str = ""


GLM_STOPS = {"tool": "<|observation|>", "user": "<|user|>"}
HY3_STOPS = dict.fromkeys(("tool", "user"), "<｜hy_eos:opensource｜>")
GLM_SLIP = "a cut turn is closed with <|endoftext|>, which no rendering has"
INKLING_SLIP = "a text that is cut is not closed with <|end_message|>"
LAGUNA_SLIP = "no newline after </assistant>"

FAMILIES = {
    "qwen3": Family("Qwen3", CHATML),
    "qwen3, no thinking": Family("Qwen3", CHATML, {"enable_thinking": False}, thinks=False),
    "prime-qwen3": Family("PrimeQwen3", CHATML),
    "qwen3.5": Family("Qwen35", CHATML),
    "qwen3.6": Family("Qwen36", CHATML),
    "qwen3.6, thinking kept": Family("Qwen36", CHATML, {"preserve_thinking": True}),
    "qwen3.8": Family("Qwen38", CHATML),
    "qwen3-vl": Family("Qwen3VL", CHATML),
    "nemotron-3": Family("Nemotron3", CHATML),
    "nemotron-3-ultra": Family("Nemotron3Ultra", CHATML),
    "nemotron-3.5": Family("Nemotron35", CHATML),
    "glm-4.5": Family("GLM45", GLM, stops=GLM_STOPS, slip=GLM_SLIP),
    "glm-5": Family("GLM5", GLM, stops=GLM_STOPS, slip=GLM_SLIP),
    "glm-5, thinking kept": Family("GLM5", GLM, {"clear_thinking": False}, stops=GLM_STOPS, slip=GLM_SLIP),
    "glm-5.1": Family("GLM51", GLM, stops=GLM_STOPS, slip=GLM_SLIP),
    "glm-5.3": Family("GLM53", GLM, stops=GLM_STOPS, slip=GLM_SLIP),
    "deepseek-v3": Family("DeepSeekV3", DEEPSEEK_V3, thinks=False),
    "deepseek-r1": Family("DeepSeekR1", DEEPSEEK_V3),
    "deepseek-v4": Family("DeepSeekV4", DEEPSEEK_V4, thinks=False),
    "deepseek-v4, thinking": Family("DeepSeekV4", DEEPSEEK_V4, {"enable_thinking": True}),
    "llama-3": Family("Llama3", LLAMA, thinks=False, most_calls=1),
    "gemma4": Family("Gemma4", GEMMA, thinks=False, talks_while_calling=False),
    "gemma4, thinking": Family("Gemma4", GEMMA, {"enable_thinking": True}, talks_while_calling=False),
    "kimi-k2": Family("KimiK2", KIMI, thinks=False),
    "kimi-k2.5": Family("KimiK25", KIMI),
    "minimax-m2": Family("MiniMaxM2", MINIMAX),
    "hy3": Family("Hy3", HY3, thinks=False, stops=HY3_STOPS),
    "hy3, thinking": Family("Hy3", HY3, {"reasoning_effort": "high"}, stops=HY3_STOPS),
    "inkling": Family("Inkling", INKLING, slip=INKLING_SLIP),
    "laguna-xs.2": Family("LagunaXS2", LAGUNA, thinks=False, slip=LAGUNA_SLIP),
    "laguna-xs-2.1": Family("LagunaXS21", LAGUNA, {"enable_thinking": True}),
    "laguna-s-2.1": Family("LagunaS21", LAGUNA),
    "laguna-m.1": Family("LagunaM1", LAGUNA, thinks=False, slip=LAGUNA_SLIP),
}


@functools.cache
def tokenizer(tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with these tokens; newlines merge with what stands before them, as in the large vocabularies."""
    words = CORPUS.split()
    text = [CORPUS, "\n\n".join(words), ".\n\n".join(words), "}\n".join(words)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    return Remembering(tokenizer_object=made)


class Remembering(PreTrainedTokenizerFast):
    """Encodes each text once: the renderings of a conversation differ little."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.encoded: dict[tuple[str, tuple[tuple[str, Any], ...]], Any] = {}

    def __call__(self, text: str, **options: Any) -> Any:
        key = text, tuple(sorted(options.items()))
        if key not in self.encoded:
            self.encoded[key] = super().__call__(text, **options)
        return self.encoded[key]

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(self(text, **options)["input_ids"])


class Chat:
    """One family's renderer over our tokenizer; `retain` bridges over thinking that the template would drop."""

    def __init__(self, family: Family, retain: bool) -> None:
        self.family = family
        self.retain = retain
        self.tokenizer = tokenizer(family.tokens)
        config = getattr(renderers, f"{family.renderer}RendererConfig")
        options = {**family.options, **({"thinking_retention": "all"} if retain else {})}
        self.renderer = getattr(renderers, f"{family.renderer}Renderer")(self.tokenizer, config(**options))
        self.close = self.run(turn_end(), None)

    def render(self, messages: Sequence[Message], tools: Any, generate: bool) -> Ids:
        return pack_ids(self.renderer.render_ids(plain(messages), tools=tools, add_generation_prompt=generate))

    def run(self, steps: Generator[tuple[Rendering, ...], Sequence[Ids], Any], tools: Any) -> Any:
        wanted = next(steps)
        while True:
            try:
                wanted = steps.send([self._try(one, tools) for one in wanted])
            except StopIteration as stop:
                return stop.value

    def _try(self, wanted: Rendering, tools: Any) -> Ids:
        try:
            return self.render([dict(message) for message in wanted.messages], tools, wanted.add_generation_prompt)
        except ValueError:
            # Gemma's renderer takes no tool result without its call.
            return pack_ids([])

    def ours(self, history: Sequence[Message], reply: SampledReply, tail: Sequence[Message], tools: Any) -> Bridge | Unproven:
        outcome = self.run(derive(history, reply, tail, self.close, retain_thinking=self.retain), tools)
        assert isinstance(outcome, Bridge | Unproven)
        return outcome

    def theirs(self, prompt: Ids, said: Ids, tail: Sequence[Message], tools: Any) -> Ids | None:
        bridged = self.renderer.bridge_to_next_turn(prompt.tolist(), said.tolist(), plain(tail), tools=tools)
        return None if bridged is None else pack_ids(bridged.token_ids)

    def speak(self, history: Sequence[Message], reply: Message, tail: Sequence[Message], tools: Any) -> Ids:
        """What the model samples to say `reply`, its stop token included: what its rendering has behind the generation prompt."""
        prompt = self.render(history, tools, True).tolist()
        shown = self.renderer.render(plain([*history, reply]), tools=tools)
        if shown.token_ids[: len(prompt)] == prompt:
            said = shown.token_ids[len(prompt) :]
        else:
            marks = zip(shown.token_ids, shown.sampled_mask, shown.message_indices, strict=True)
            said = [item for item, sampled, index in marks if sampled and index == len(history)]
        stops = self.renderer.get_stop_token_ids()
        ends = [at for at, item in enumerate(said) if item in stops]
        if ends:
            return pack_ids(said[: ends[-1] + 1])
        return pack_ids([*said, self.tokenizer.convert_tokens_to_ids(self.family.stops[tail[0]["role"]])])

    def spell(self, said: Ids) -> Ids:
        """The same text in one token per character, special tokens aside."""
        first_special = min(self.tokenizer.convert_tokens_to_ids(list(self.family.tokens)))
        spelled: list[int] = []
        for item in said.tolist():
            text = self.tokenizer.decode([item])
            pieces = [item] if item >= first_special else [id for letter in text for id in self.tokenizer.encode(letter)]
            spelled += pieces
        return pack_ids(spelled)


def plain(messages: Sequence[Message]) -> list[Message]:
    """Messages with parsed arguments, and reasoning under the one name that the renderers know."""
    return [{key: value for key, value in message.items() if key != "reasoning"} for message in plain_messages(messages)]


WORDS = ["fishing", "fish\n", "hello world", "x", "7", "a\n\n", "the cat.", "sunny ", "\nring", "}"]


@dataclass(frozen=True)
class Case:
    history: list[Message]
    reply: Message
    tail: list[Message]
    tools: Any
    spelled: bool
    cut: bool


def case(family: Family, seed: int) -> Case:
    """A conversation up to the messages after its last reply."""
    dice = random.Random(seed)

    def text(least: int = 1) -> str:
        return " ".join(dice.choice(WORDS) for _ in range(dice.randint(least, 3)))

    messages: list[Message] = [{"role": "system", "content": text()}] if dice.random() < 0.5 else []
    messages.append({"role": "user", "content": text()})
    for turn in range(dice.randint(1, 3)):
        thought = {"reasoning_content": text()} if family.thinks and dice.random() < 0.6 else {}
        if dice.random() < 0.6:
            aside = text(0) if family.talks_while_calling else ""
            names = [f"call_{turn}_{at}" for at in range(dice.randint(1, family.most_calls))]
            messages.append({"role": "assistant", "content": aside, **thought, "tool_calls": [_call(n, text()) for n in names]})
            messages += [{"role": "tool", "tool_call_id": name, "name": "lookup", "content": text(0)} for name in names]
            messages += [{"role": "user", "content": text()}] if dice.random() < 0.25 else []
        else:
            messages.append({"role": "assistant", "content": text(), **thought})
            messages += [{"role": "user", "content": text()} for _ in range(1 if dice.random() < 0.8 else 2)]
    at = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    cut = "tool_calls" not in messages[at] and dice.random() < 0.4
    offered = TOOLS if any("tool_calls" in message for message in messages) or dice.random() < 0.5 else None
    return Case(messages[:at], messages[at], messages[at + 1 :], offered, dice.random() < 0.3, cut)


def _call(name: str, key: str) -> Message:
    return {"id": name, "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"key": key})}}


def sampled(chat: Chat, one: Case, prompt: Ids) -> tuple[Message, Ids]:
    """The reply as it is parsed and as it was sampled. A cut one ends anywhere, so it may say less, or think and say nothing."""
    said = chat.speak(one.history, one.reply, one.tail, one.tools)
    said = chat.spell(said) if one.spelled else said
    if not one.cut:
        return one.reply, said
    said = said[: random.Random(len(said)).randint(1, len(said) - 1)]
    parsed = chat.renderer.parse_response(said.tolist(), tools=one.tools, prompt_ids=prompt.tolist())
    thought = {"reasoning_content": parsed.reasoning_content} if parsed.reasoning_content else {}
    return {"role": "assistant", "content": parsed.content or "", **thought}, said


def compare(chat: Chat, seed: int) -> str:
    """Who bridges one conversation. Raises where the ids differ though they should not, or one bridges that should not."""
    one = case(chat.family, seed)
    prompt = chat.render(one.history, one.tools, True)
    reply, said = sampled(chat, one, prompt)
    whole = chat.render([*one.history, reply, *one.tail], one.tools, True)
    theirs = chat.theirs(prompt, said, one.tail, one.tools)
    outcome = chat.ours(one.history, SampledReply(reply, said, not one.cut), one.tail, one.tools)
    if isinstance(outcome, Unproven):
        assert theirs is None or not np.array_equal(theirs, whole), f"seed {seed}: refused as {outcome.reason}"
        return "neither" if theirs is None else f"only theirs: {outcome.reason}"
    ours = np.concatenate((prompt, said, outcome.ids))
    if theirs is None:
        return "only ours"
    if np.array_equal(ours, theirs):
        return "both"
    text = chat.tokenizer.decode
    after = [text(ids[len(prompt) + len(said) :]) for ids in (ours, theirs)]
    assert text(said) + after[0] != text(said) + after[1], f"seed {seed}: the same text in other ids"
    if one.cut and not reply["content"]:
        shown = text(chat.render([*one.history, reply], one.tools, False))
        assert show_end_of_thinking(shown, reply, text(said) + after[0]), f"seed {seed}: {after}"
        return "different: cut while thinking"
    assert chat.family.slip, f"seed {seed}: {after}"
    last = text(said).rstrip()[-1:]
    assert text(whole).endswith(last + after[0]) and not text(whole).endswith(last + after[1]), f"seed {seed}: {after}"
    return "different: slip"


def show_end_of_thinking(shown: str, reply: Message, between: str) -> bool:
    """Whether `between` holds what the rendering shows behind the reply's thinking, to the end of its turn.

    Newlines aside: templates differ in how many they take from a thought's end. A thought shorter than a word is found anywhere.
    """
    thought = "".join((reply.get("reasoning_content") or "").split())
    shown = "".join(shown.split())
    return len(thought) < 4 or shown[shown.rindex(thought) :] in "".join(between.split())


@pytest.mark.parametrize("retain", [False, True], ids=["template", "retain"])
@pytest.mark.parametrize("name", FAMILIES)
def test_where_both_bridge_the_ids_are_the_same(name: str, retain: bool) -> None:
    chat = Chat(FAMILIES[name], retain)
    own = range(list(FAMILIES).index(name), CONVERSATIONS * len(FAMILIES), len(FAMILIES))
    found = Counter(compare(chat, seed) for seed in (CUT, *own))
    assert found["both"] or (name == "deepseek-r1" and not retain), found
    assert found["different: slip"] or not FAMILIES[name].slip or not retain, found
    refused = sum(count for who, count in found.items() if who.startswith("only theirs"))
    assert refused <= CONVERSATIONS // 4, found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_token_that_ends_a_reply_says_nothing_in_it(name: str) -> None:
    """So that a reply can be read with it, as gpt-oss must be."""
    renderer = Chat(FAMILIES[name], retain=False).renderer
    call = {"id": "functions.lookup:0", "type": "function", "function": {"name": "lookup", "arguments": {"key": "a"}}}
    question, stops = {"role": "user", "content": "question"}, renderer.get_stop_token_ids()
    prompt = renderer.render_ids([question], tools=TOOLS, add_generation_prompt=True)
    for answer in ({"content": "hello world"}, {"content": "", "tool_calls": [call]}):
        turn = renderer.render_ids([question, {"role": "assistant", **answer}], tools=TOOLS, add_generation_prompt=False)
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, turn, strict=False))))
        said = list(itertools.takewhile(lambda token: token not in stops, turn[shared:]))
        read = renderer.parse_response(said, tools=TOOLS, prompt_ids=prompt)
        assert read.content or read.reasoning_content or read.tool_calls
        for stop in stops:
            assert renderer.parse_response([*said, stop], tools=TOOLS, prompt_ids=prompt) == read
