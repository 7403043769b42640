"""Texts that cannot fit into the window of any engine are refused before one is asked, and nothing that fits is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.call.window import TOKEN_BYTES, check_texts, find_texts, measure_texts
from proxy.errors import ContextTooLong
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import RunningService
from tests.support.sessions.questions import ask_in_each_dialect

WINDOW = 512
SETTINGS = {"max_model_len": WINDOW}
TOO_MUCH = "lorem ipsum " * (WINDOW * TOKEN_BYTES // 10 + 1)
USER = [{"role": "user", "content": TOO_MUCH}]
ASKED = {
    **ask_in_each_dialect(TOO_MUCH),
    "count": ("/v1/messages/count_tokens", {"model": "policy", "messages": USER}),
}


def read_by(engine: ScriptedEngine) -> list[str]:
    """The paths of the requests that had the text."""
    return [asked.path for asked in engine.received if TOO_MUCH[:1000] in str(asked.body)]


@pytest.mark.parametrize("dialect", ASKED)
def test_a_text_that_cannot_fit_is_refused_and_no_engine_tokenises_it(
    engine: ScriptedEngine, token_service: RunningService, dialect: str
) -> None:
    engine.reset()
    session = token_service.session()
    path, body = ASKED[dialect]
    answer = session.post(path, body)
    assert answer.status_code == 400, answer.text
    # In the words by which each vendor's clients know that they have to shorten the history.
    words = {"messages": "prompt is too long", "count": "prompt is too long", "gemini": "exceeds the maximum number of tokens"}
    assert words.get(dialect, "maximum context length") in answer.text
    assert read_by(engine) == [] and session.calls == []


def test_texts_of_several_messages_count_together(engine: ScriptedEngine, token_service: RunningService) -> None:
    engine.reset()
    session = token_service.session()
    half = {"role": "user", "content": [{"type": "text", "text": TOO_MUCH[: len(TOO_MUCH) * 2 // 3]}]}
    body = {"model": "policy", "messages": [half, half]}
    answer = session.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and read_by(engine) == []


def test_what_no_prompt_need_show_is_left_to_the_engine(engine: ScriptedEngine, token_service: RunningService) -> None:
    """Templates trim blanks, drop earlier thinking and know no other fields."""
    engine.reset()
    session = token_service.session()
    said = {"role": "assistant", "content": "a", "reasoning_content": TOO_MUCH}
    messages = [
        {"role": "user", "content": "q", "note": TOO_MUCH},
        said,
        {"role": "user", "content": "b" + " \n" * len(TOO_MUCH)},
    ]
    session.post("/v1/chat/completions", {"model": "policy", "messages": messages})
    assert read_by(engine) == ["/v1/chat/completions/render"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300), st.integers(1, 4))
def test_a_text_of_as_many_tokens_as_the_window_is_never_refused(text: str, window: int) -> None:
    tokens = [text.encode()[at : at + TOKEN_BYTES] for at in range(0, len(text.encode()), TOKEN_BYTES)]
    if len(tokens) <= window:
        check_texts([text], window, "messages")
    assert measure_texts([text], 10**9) == len("".join(text.split()).encode())


def test_a_text_is_refused_by_a_byte_too_much_and_says_how_many_tokens_it_has_at_least() -> None:
    check_texts(["é" * TOKEN_BYTES], 2, "messages")
    with pytest.raises(ContextTooLong) as refused:
        check_texts(["é" * TOKEN_BYTES, " \n", "a"], 2, "messages")
    assert (refused.value.tokens, refused.value.window, refused.value.param) == (3, 2, "messages")


def test_texts_are_found_in_both_forms_of_content() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": ["b", {"type": "text", "text": "c"}, {"type": "image", "digest": "d"}]},
        {"role": "assistant", "content": "e"},
        {"role": "tool", "content": None},
    ]
    assert list(find_texts(messages)) == ["a", "b", "c"]
