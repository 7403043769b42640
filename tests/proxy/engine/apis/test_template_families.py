"""Every chat format through the real service: what the model saw is what its template renders, and what it said is kept.

First the families themselves (does each have the property it stands for?), then conversations.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.engine.scripted_engine import Say, ScriptedEngine, logprobs_of
from tests.support.engine.template_families import FAMILIES, Family
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.sessions.conversations import TOOLS, turn
from tests.support.sessions.engine_ids import with_engine_ids

THINKING = ("qwen3", "glm4", "deepseek", "harmony")
"""The families whose models think before they speak."""


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def called(key: str, identifier: str = "call_0123456789_0") -> dict[str, Any]:
    function = {"name": "lookup", "arguments": f'{{"key": "{key}"}}'}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": identifier, "type": "function", "function": function}]}


# The families


def test_any_text_survives_encode_and_decode(family: Family) -> None:
    text = 'naïve "quotes"\n\n\t日本語 🙂 <|im_end|> [INST] {"a": 1}'
    assert family.decode(family.encode(text)) == text


def test_fishing_is_one_token_and_can_be_sampled_as_two(family: Family) -> None:
    assert family.encode("fishing") == [family.id_of("fishing")]
    split = [family.id_of("fish"), family.id_of("ing")]
    assert family.decode(split) == "fishing"


def test_what_the_model_says_is_what_the_engine_parses(family: Family) -> None:
    text = family.speak(calls=[("lookup", {"key": "alpha"})])
    assert family.parse(text, tools=True).calls == (("lookup", '{"key": "alpha"}'),)
    ended = {family.end, *family.other_ends}
    assert any(text.endswith(end) for end in ended)
    if family.name in THINKING:
        parsed = family.parse(family.speak("hello", reasoning="step by step"), tools=True, prompt="<think>")
        assert parsed.reasoning is not None and parsed.reasoning.strip() == "step by step"
        assert parsed.content is not None and "hello" in parsed.content


def test_a_rendered_history_is_the_prompt_and_what_was_said(family: Family) -> None:
    """Token by token, but for what a family's template shows otherwise in history (see its comment) and for ids of calls."""
    history = [turn("user", "q")]
    prompt = family.render(history, TOOLS)
    thinking = {"reasoning_content": "step by step"} if family.name in ("qwen3", "glm4", "harmony") else {}
    said = family.encode(family.speak("hello", reasoning=thinking.get("reasoning_content", "")))
    rendered = family.render([*history, {**turn("assistant", "hello"), **thinking}], TOOLS, add_generation_prompt=False)
    if family.name == "glm4":
        said = said[:-1]  # the stop token is the next turn's
    assert rendered[: len(prompt) + len(said)] == prompt + said


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.bos], ids=lambda family: family.name)
def test_bos_stands_once_at_the_beginning(family: Family) -> None:
    ids = family.render([turn("system", "s"), turn("user", "q"), turn("assistant", "a"), turn("user", "q")], TOOLS)
    assert ids.count(family.id_of(family.bos)) == 1
    assert ids[0] == family.id_of(family.bos)


def test_qwen3_drops_thinking_at_a_new_user_turn_and_keeps_it_inside_a_tool_loop() -> None:
    family = FAMILIES["qwen3"]
    thought = {**called("a"), "reasoning_content": "step"}
    result = {"role": "tool", "tool_call_id": "call_0123456789_0", "content": "7"}
    assert "step" in family.render_text([turn("user", "q"), thought, result], TOOLS)
    assert "step" not in family.render_text([turn("user", "q"), thought, result, turn("user", "more")], TOOLS)


def test_qwen3_has_an_empty_think_block_in_the_last_turn_alone() -> None:
    family = FAMILIES["qwen3"]
    history = [turn("user", "q"), turn("assistant", "a")]
    assert "<think>\n\n</think>\n\na" in family.render_text(history, add_generation_prompt=False)
    assert "<think>" not in family.render_text([*history, turn("user", "more")])
    assert family.render_text([turn("user", "q")], enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_llama3_ends_a_call_in_eom_when_its_builtin_tools_are_on() -> None:
    family = FAMILIES["llama3"]
    history = [turn("user", "q"), called("a")]
    assert family.render_text(history, TOOLS, add_generation_prompt=False).endswith("<|eot_id|>")
    assert family.render_text(history, TOOLS, add_generation_prompt=False, builtin_tools=["x"]).endswith("<|eom_id|>")


def test_harmony_says_return_only_while_the_answer_is_last() -> None:
    family = FAMILIES["harmony"]
    history = [turn("user", "q"), turn("assistant", "a")]
    assert family.render_text(history, add_generation_prompt=False).endswith("a<|return|>")
    assert "a<|end|>" in family.render_text([*history, turn("user", "more")])


def test_mistral_names_a_call_by_nine_characters_and_refuses_other_ids() -> None:
    family = FAMILIES["mistral"]
    history = [turn("user", "q"), called("a", "012345678"), {"role": "tool", "tool_call_id": "012345678", "content": "7"}]
    assert '"call_id": "012345678"' in family.render_text(history, TOOLS)
    for identifier in ("short", "call_0123456789_0"):
        with pytest.raises(Exception, match="nine"):
            family.render_text([turn("user", "q"), called("a", identifier)], TOOLS)


def test_kimi_shows_the_ids_that_its_model_samples() -> None:
    family = FAMILIES["kimi"]
    parsed = family.parse(family.speak(calls=[("lookup", {"key": "a"})]), tools=True)
    assert parsed.ids == ("functions.lookup:0",)
    result = {"role": "tool", "tool_call_id": "functions.lookup:0", "content": "7"}
    text = family.render_text([turn("user", "q"), called("a", "functions.lookup:0"), result], TOOLS)
    assert text.count("functions.lookup:0") == 2


def test_gemma_has_no_system_turn_and_takes_only_alternating_roles() -> None:
    family = FAMILIES["gemma"]
    assert family.render_text([turn("system", "s"), turn("user", "q")]).startswith("<bos><start_of_turn>user\ns\n\nq")
    with pytest.raises(Exception, match="alternate"):
        family.render_text([turn("user", "q"), turn("user", "q")])


# Conversations


class Talk:
    """A conversation with a scripted model: what it says, how the environment answers, and the messages so far."""

    def __init__(self, engine: ScriptedEngine, service: RunningService, **fields: Any) -> None:
        self.engine = engine
        self.session = service.session()
        self.messages: list[dict[str, Any]] = [turn("system", "be brief"), turn("user", "look up alpha and beta")]
        self.asked: list[list[dict[str, Any]]] = []
        self._fields = {"tools": TOOLS, **fields}

    def model(self, content: str = "", **said: Any) -> dict[str, Any]:
        """One turn of the model, taken into the history as a harness does."""
        self.engine.say(self.engine.family.speak(content, **said))
        self.asked.append(list(self.messages))
        self.messages.append(self.session.answer(self.messages, **self._fields))
        return self.messages[-1]

    def tool(self, content: str) -> None:
        call = self.messages[-1]["tool_calls"][0]
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    def user(self, content: str) -> None:
        self.messages.append(turn("user", content))


def tool_talk(talk: Talk, reasoning: str) -> None:
    """Two tool calls, an answer, and an answer to a second question."""
    for key, value in (("alpha", "7"), ("beta", "8")):
        talk.model(reasoning=reasoning, calls=[("lookup", {"key": key})])
        talk.tool(value)
    talk.model("seven and eight", reasoning=reasoning)
    talk.user("thank you")
    talk.model("you are welcome", reasoning=reasoning)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Any:
    with ScriptedEngine(request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def service(engine: ScriptedEngine, redis_server: RedisServer) -> Any:
    redis_server.flushall()
    with RunningService(engine.url, redis_server.url) as service:
        yield service


THINKING_BRANCHES: dict[str, list[str | None]] = {
    # It is gone from every earlier turn, also inside a tool loop.
    "deepseek": [None, "thinking_dropped", "thinking_dropped", "thinking_dropped"],
    "qwen3": [None, None, None, "thinking_dropped"],
    "glm4": [None, None, None, "thinking_dropped"],
    "harmony": [None, None, None, "thinking_dropped"],
}


def test_a_tool_calling_conversation_is_one_row_of_what_the_template_renders_or_branches_with_a_reason(
    engine: ScriptedEngine, service: RunningService
) -> None:
    talk = Talk(engine.reset(), service)
    tool_talk(talk, reasoning="")
    assert [call["branch_reason"] for call in talk.session.calls] == [None] * 4
    assert_prompts_as_rendered(talk)
    assert_rows_true(talk, rows=1)


@pytest.mark.parametrize("engine", THINKING, indirect=True)
def test_a_thinking_conversation_branches_where_its_template_drops_the_thinking_and_says_so(
    engine: ScriptedEngine, service: RunningService
) -> None:
    thinking = {"extra_body": {"chat_template_kwargs": {"thinking": True}}} if engine.family.name == "deepseek" else {}
    talk = Talk(engine.reset(), service, **thinking)
    tool_talk(talk, reasoning="step by step")
    reasons = [call["branch_reason"] for call in talk.session.calls]
    assert reasons == THINKING_BRANCHES[engine.family.name]
    assert_prompts_as_rendered(talk, **thinking.get("extra_body", {}).get("chat_template_kwargs", {}))
    assert_rows_true(talk, rows=1 + sum(reason is not None for reason in reasons))


@pytest.mark.case(2)
def test_a_split_of_its_own_survives_every_familys_next_turn(engine: ScriptedEngine, service: RunningService) -> None:
    family = engine.reset().family
    canonical = family.encode(family.speak("fishing"))
    at = canonical.index(family.id_of("fishing"))
    sampled = [*canonical[:at], family.id_of("fish"), family.id_of("ing"), *canonical[at + 1 :]]
    talk = Talk(engine, service)
    engine.say(Say(token_ids=sampled))
    talk.messages.append(talk.session.answer(talk.messages, tools=TOOLS))
    assert talk.messages[-1]["content"].strip() == "fishing"
    talk.user("more")
    talk.model("yes")
    first, second = talk.session.calls
    assert first["completion_ids"] == sampled
    assert second["branch_reason"] is None
    assert second["prompt_ids"][: len(first["prompt_ids"]) + len(sampled)] == first["prompt_ids"] + sampled
    assert_rows_true(talk, rows=1)


@pytest.mark.case(62)
@pytest.mark.parametrize(
    ("engine", "calls", "usual", "other"),
    [
        ("qwen3", False, "<|im_end|>", "<|endoftext|>"),
        ("qwen3", True, "<|im_end|>", "<|endoftext|>"),
        ("llama3", False, "<|eot_id|>", "<|end_of_text|>"),
        ("llama3", True, "<|eot_id|>", "<|eom_id|>"),
        ("gemma", False, "<end_of_turn>", "<eos>"),
        ("gemma", True, "<end_of_turn>", "<eos>"),
        # It ends no turn: what follows opens the next one.
        ("glm4", False, "<|user|>", "<|endoftext|>"),
        # No history shows it.
        ("harmony", False, "<|return|>", "<|return|>"),
        ("harmony", False, "<|return|>", "<|endoftext|>"),
    ],
    indirect=["engine"],
)
def test_a_reply_that_ends_with_the_models_other_end_token_is_continued_and_declared(
    engine: ScriptedEngine, service: RunningService, calls: bool, usual: str, other: str
) -> None:
    """As under a grammar, or where a model's generation config lists several: each such reply began a row."""
    family = engine.reset().family
    spoken = family.speak("" if calls else "hello", calls=[("lookup", {"key": "alpha"})] if calls else ())
    assert spoken.endswith(usual)
    talk = Talk(engine, service)
    engine.say(spoken.removesuffix(usual) + other)
    talk.messages.append(talk.session.answer(talk.messages, tools=TOOLS))
    talk.tool("7") if calls else talk.user("more")
    talk.model("yes")
    first, second = talk.session.calls
    seen = first["prompt_ids"] + first["completion_ids"]
    assert first["completion_ids"][-1] == family.id_of(other) and second["branch_reason"] is None
    assert second["prompt_ids"][: len(seen)] == seen
    assert second["projection"] == "turn_end"
    assert 'verbatim_projections_total{projection="turn_end"}' in service.request("GET", "/metrics").text
    assert_rows_true(talk, rows=1)


@pytest.mark.case(6)
def test_a_literal_end_of_turn_in_what_the_user_and_the_tool_say_changes_nothing(
    engine: ScriptedEngine, service: RunningService
) -> None:
    """The marks are text here; where a template writes them as they are, the ids are its own and the row is still true."""
    family = engine.reset().family
    marks = " ".join((family.end, *family.other_ends))
    talk = Talk(engine, service)
    talk.messages[-1]["content"] = f"what does {marks} mean"
    talk.model(calls=[("lookup", {"key": "alpha"})])
    talk.tool(f"it means {marks}")
    talk.model("an end")
    assert [call["branch_reason"] for call in talk.session.calls] == [None, None]
    assert_prompts_as_rendered(talk)
    assert_rows_true(talk, rows=1)


def test_a_turn_cut_by_length_goes_on_with_the_templates_own_end(engine: ScriptedEngine, service: RunningService) -> None:
    family = engine.reset().family
    talk = Talk(engine, service)
    engine.say(Say(family.speak("hello world in Paris")))
    length = len(family.encode(family.speak("hello world"))) - 1
    reply = talk.session.ask(talk.messages, max_tokens=length, tools=TOOLS).choices[0]
    assert reply.finish_reason == "length"
    talk.messages.append(reply.message.model_dump(exclude_none=True))
    talk.user("go on")
    talk.model("in Paris")
    first, second = talk.session.calls
    seen = first["prompt_ids"] + first["completion_ids"]
    assert second["prompt_ids"][: len(seen)] == seen
    assert second["prompt_ids"] == family.render(talk.asked[-1], TOOLS)
    assert_rows_true(talk, rows=1)


def assert_prompts_as_rendered(talk: Talk, **kwargs: Any) -> None:
    """The model sampled canonical ids, so each prompt is also a fresh rendering of the messages, with the engine's ids of tool calls."""
    family, calls = talk.engine.family, talk.session.calls
    for asked, call in zip(talk.asked, calls, strict=True):
        text = family.render_text(with_engine_ids(asked, calls), TOOLS, **kwargs)
        if family.name == "mistral":
            # The model does not sample the ids of its calls; the template would add those that the engine gave them.
            text = re.sub(r', "id": ".{9}"\}', "}", text)
        if call["projection"] == "turn_end":
            # The end that the model chose for its answer stays before the template's own.
            text = re.sub(r"(<\|channel\|>final<\|message\|>[^<]*)<\|end\|>", r"\1<|return|><|end|>", text)
        assert family.decode(call["prompt_ids"]) == text
        assert call["prompt_ids"] == family.encode(text)


def assert_rows_true(talk: Talk, *, rows: int) -> None:
    """Before each trained token stand exactly the ids the engine was given and had sampled; each token is trained once."""
    made, accounting = talk.session.trajectories()
    assert len(made) == rows
    assert accounting["quarantined"] == []
    given = {tuple(one.prompt_ids): one.sampled[0] for one in talk.engine.generations}
    trained = 0
    for row in made:
        assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        if talk.engine.family.bos:
            assert row["token_ids"].count(talk.engine.family.id_of(talk.engine.family.bos)) == 1
        for start, end in runs(row["loss_mask"]):
            prompt, sampled = row["token_ids"][:start], row["token_ids"][start:end]
            assert given[tuple(prompt)] == sampled
            assert row["logprobs"][start:end] == logprobs_of(prompt, sampled)
            trained += end - start
    assert trained == accounting["sampled_tokens"] == sum(map(len, given.values()))


def runs(mask: list[int]) -> list[tuple[int, int]]:
    """The stretches of ones."""
    edges = [at for at in range(len(mask) + 1) if (mask[at] if at < len(mask) else 0) != (mask[at - 1] if at else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))
