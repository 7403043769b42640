"""What of a reply goes out while it is sampled: all that is certain, each part once, whatever pieces it comes in."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.engine.apis.reply import CertainText

texts = st.text("ab \n", max_size=4)
pieces = st.lists(
    st.one_of(
        st.fixed_dictionaries({"content": texts}),
        st.fixed_dictionaries({"reasoning_content": texts}),
        st.fixed_dictionaries({"content": texts, "reasoning_content": texts}),
    ),
    max_size=12,
)
CALL: dict[str, Any] = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}


@given(pieces, st.lists(st.booleans(), min_size=12, max_size=12), pieces)
def test_all_that_is_certain_goes_out_once_and_the_rest_at_the_end(
    before: list[dict[str, str]], takes: list[bool], after: list[dict[str, str]]
) -> None:
    """Certain is all reasoning, and text without the white space at its end, before the first tool call."""
    live, content, reasoning = CertainText(0), "", ""
    whole = {name: "".join(piece.get(name, "") for piece in before) for name in ("content", "reasoning_content")}
    said = {"content": "", "reasoning_content": ""}
    for piece, take in zip(before, takes, strict=False):
        live.add_delta(piece)
        said = {name: text + piece.get(name, "") for name, text in said.items()}
        if take:
            delta = live.take_certain()
            content, reasoning = (content + delta.content, reasoning + delta.reasoning) if delta else (content, reasoning)
            assert (content, reasoning) == (said["content"].rstrip(), said["reasoning_content"])
            assert live.has_sent == bool(content or reasoning)
    live.add_delta(CALL)
    for piece in after:
        live.add_delta(piece)
        assert live.take_certain() is None
    whole = {name: text + "".join(piece.get(name, "") for piece in after) for name, text in whole.items()}
    assert (live.is_prefix_of(whole) and not live.is_prefix_of({"content": f"x{whole['content']}"})) or not content + reasoning
    rest = live.take_rest({**whole, **CALL})
    assert rest is not None and [call["id"] for call in rest.tool_calls] == ["c"]
    assert (content + rest.content, reasoning + rest.reasoning) == (whole["content"], whole["reasoning_content"])
    told = live.message()
    assert (told["content"] or "", told.get("reasoning_content", "")) == (whole["content"], whole["reasoning_content"])
    assert told["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
