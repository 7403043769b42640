"""What is noted of a call's sampling parameters, and the mode of its logprobs: both by exclusion."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.call.distribution import describe_sampling, find_mode
from proxy.engine.apis.vllm import VllmTokens
from reconstruct.records import LOGPROB_MODES, MASKED, PROCESSED, RAW, UNKNOWN_MODE

VLLM = VllmTokens.leaves_raw

RENDERED = {
    **{"n": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3, "max_tokens": 8, "stop": ["x"], "stop_token_ids": [9]},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0},
    **{
        "bad_words": [],
        "logit_bias": None,
        "structured_outputs": None,
        "ignore_eos": False,
        "output_kind": 1,
        "skip_clone": True,
    },
    **{"skip_special_tokens": False, "skip_reading_prefix_cache": False, "logprobs": 0, "extra_args": None},
}
"""What vLLM 0.32 renders of a request that bends nothing."""

values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def test_of_a_request_that_bends_nothing_nothing_is_noted() -> None:
    sampling = describe_sampling(RENDERED)
    assert sampling.extra == {}
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.7, 0.9, 20, 3)
    assert (sampling.max_tokens, sampling.stop) == (8, ("x",))
    modes = [find_mode(RENDERED, engine, VLLM) for engine in ("raw_logprobs", "processed_logprobs", "", "raw_logits")]
    assert modes == ["raw", "processed", "unknown", "logits"]


@pytest.mark.case(64)
@given(st.from_regex(r"[a-z]{3,9}_of_tomorrow", fullmatch=True), values)
def test_whatever_else_is_set_is_noted_and_never_leaves_raw_logprobs_raw(name: str, value: Any) -> None:
    parameters = {**RENDERED, name: value}
    extra = describe_sampling(parameters).extra
    assert extra.keys() == {name}
    assert msgpack.unpackb(msgpack.packb(extra, unicode_errors="surrogatepass"), strict_map_key=False).keys() == {name}
    for engine in ("raw_logprobs", "processed_logprobs", ""):
        assert find_mode(parameters, engine, VLLM) == UNKNOWN_MODE


@given(
    st.sampled_from(["raw_logprobs", "processed_logprobs", "", "something new"]), values.filter(lambda value: value is not None)
)
def test_under_a_grammar_no_engines_logprobs_are_anything_but_masked(engine: str, value: Any) -> None:
    assert find_mode({**RENDERED, "structured_outputs": value}, engine, VLLM) == MASKED


@pytest.mark.parametrize(
    ("bending", "raw", "processed"),
    [
        ({"logit_bias": {"5": 1.5}}, RAW, PROCESSED),
        ({"min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 1, "repetition_penalty": 1.1}, RAW, PROCESSED),
        ({"ignore_eos": True}, RAW, PROCESSED),
        # Before processed logprobs are taken these take tokens away.
        ({"allowed_token_ids": [5, 6]}, RAW, MASKED),
        ({"bad_words": ["x"]}, RAW, MASKED),
        ({"min_tokens": 4}, RAW, MASKED),
        # Not measured, or an operator's own.
        ({"thinking_token_budget": 0}, UNKNOWN_MODE, UNKNOWN_MODE),
        ({"extra_args": {"my_processor": 1}}, UNKNOWN_MODE, UNKNOWN_MODE),
    ],
)
def test_what_bends_the_choice_is_noted_whether_or_not_it_bends_the_number(
    bending: dict[str, Any], raw: str, processed: str
) -> None:
    parameters = {**RENDERED, **bending}
    assert describe_sampling(parameters).extra == bending
    modes = [find_mode(parameters, engine, VLLM) for engine in ("raw_logprobs", "processed_logprobs", "")]
    assert modes == [raw, processed, UNKNOWN_MODE] and {*modes} <= {*LOGPROB_MODES}


def test_of_another_engine_nothing_that_bends_the_choice_is_known_to_leave_the_number_alone() -> None:
    assert find_mode({**RENDERED, "min_p": 0.1}, "raw_logprobs", frozenset()) == UNKNOWN_MODE


def test_what_vllm_itself_puts_beside_a_request_is_not_noted() -> None:
    parameters = {**RENDERED, "extra_args": {"kv_transfer_params": {"prompt_token_ids": [1, 2]}}}
    assert describe_sampling(parameters).extra == {} and find_mode(parameters, "raw_logprobs", VLLM) == RAW
