"""What servers say of a field that they do not take, and what else they say in which a field is only mentioned."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.engine.wire.refusals import find_refused, read_message, read_retry_after
from tests.support.engine.strict_server import WORDS

FIELDS = ("return_token_ids", "logprobs", "top_logprobs", "stream_options", "max_tokens")
PRINTED = (
    "[{'type': 'extra_forbidden', 'loc': ('body', 'logprobs'), 'msg': 'Extra inputs are not permitted', 'input': True}, "
    "{'type': 'int_type', 'loc': ('body', 'top_logprobs'), 'msg': 'Input should be a valid integer', 'input': 'x'}]"
)


def read(message: Any, **more: Any) -> set[str]:
    text, param = read_message(json.dumps({"error": {"message": message, **more}}).encode())
    return set(find_refused(text, param, FIELDS))


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_field_that_is_not_taken_is_found_in_the_words_of_each_server(words: Any) -> None:
    for field in FIELDS[:4]:
        text, param = read_message(json.dumps(words([field])[1]).encode())
        assert find_refused(text, param, FIELDS) == {field}
        assert find_refused(text, param, set(FIELDS) - {field}) == set()


@pytest.mark.parametrize("name", ["openai, all", "pydantic", "mistral", "tensorrt", "gemini"])
def test_all_fields_that_one_answer_names_are_found(name: str) -> None:
    text, param = read_message(json.dumps(WORDS[name](["logprobs", "return_token_ids"])[1]).encode())
    assert find_refused(text, param, FIELDS) == {"logprobs", "return_token_ids"}


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("1 validation error for Request\nlogprobs\n  Extra inputs are not permitted [type=extra_forbidden]", {"logprobs"}),
        ("Extra inputs are not permitted, field: 'return_token_ids', value: True", {"return_token_ids"}),
        ("openai does not support parameters: ['return_token_ids'], for model=x.", {"return_token_ids"}),
        ("Malformed input request: #: extraneous key [top_logprobs] is not permitted", {"top_logprobs"}),
        ("Additional properties are not allowed ('return_token_ids' was unexpected)", {"return_token_ids"}),
        ("create() got an unexpected keyword argument 'return_token_ids'", {"return_token_ids"}),
        ("parameter 'return_token_ids' is not a valid field", {"return_token_ids"}),
        ("Unknown parameter: 'stream_options.include_usage'.", {"stream_options"}),
        ("Argument not supported on this model: logprobs", {"logprobs"}),
        (PRINTED, {"logprobs"}),
    ],
)
def test_other_words_for_it(message: str, refused: set[str]) -> None:
    assert read(message) == refused


@pytest.mark.parametrize(
    "message",
    [
        "Unknown parameter: 'foo'. Supported parameters: logprobs, return_token_ids.",
        "unknown field `foo`, expected one of `logprobs`, `stream_options` at line 1",
        "property 'foo' is unsupported, did you mean 'logprobs'?",
        "Unsupported parameter: 'temperature' is not supported with this model.",
        "Invalid value for 'top_logprobs': must be between 0 and 5",
        "max_tokens is too large: 9999. This model supports at most 4096 completion tokens",
        "Requested sample logprobs of 30, which is greater than max allowed: 20",
        "This model's maximum context length is 100 tokens, and you requested 120 (100 in the messages, 20 by max_tokens)",
        "'logprobs' must be true if 'top_logprobs' is set",
        "The model `logprobs-7b` does not support tools",
        "Invalid type for 'messages[0].content': expected one of a string or array of objects",
    ],
)
def test_a_field_that_is_only_mentioned_is_not_refused(message: str) -> None:
    assert read(message) == read(message, param="messages") == set()


def test_the_message_is_read_from_every_shape() -> None:
    problem = {"type": "missing", "loc": ["body", "messages", 0, "role"], "msg": "Field required", "input": {"logprobs": True}}
    assert read_message(json.dumps({"detail": [problem]}).encode()) == ("messages.0.role: Field required", None)
    assert read_message(json.dumps({"message": "no", "param": 3}).encode()) == ("no", None)
    assert read_message(b"<html>no</html>") == ("<html>no</html>", None)
    assert read_message(b'[{"error": {"message": "no", "param": "n"}}]') == ("no", "n")


def test_the_time_to_wait_is_a_number_or_a_date() -> None:
    assert (read_retry_after("12"), read_retry_after("0.5")) == (12.0, 0.5)
    assert read_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert (read_retry_after("Fri, 21 Oct 2095 07:28:00 GMT") or 0) > 1e9
    for text in ("", "soon", "-3", "1e9", "nan", "Fri, 99 Oct 2095"):
        assert read_retry_after(text) is None
