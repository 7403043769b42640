"""Each vendor's SDK at work on a real vLLM: three turns, streamed and whole, and every trained token's logprob recomputed.

The model is a random one, so what it says means nothing; what is recorded of it must be true all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from google import genai

from examples.vllm_server import VllmServer
from tests.support.engine.real_engine import assert_true, rows_of
from tests.support.service.verbatim_process import Serving

pytestmark = pytest.mark.engine

QUESTIONS = ("Find the number.", "Is it even?", "Say it again.")
TOKENS = 24


@pytest.fixture(scope="module")
def serving(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving("--engine", vllm_server.url, data_dir=tmp_path_factory.mktemp("data")) as service:
        service.await_ready()
        yield service


def by_chat(urls: dict[str, str], key: str) -> None:
    with openai.OpenAI(base_url=urls["openai"], api_key=key, max_retries=0) as client:
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            chunks = client.chat.completions.create(model="policy", messages=messages, max_tokens=TOKENS, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            messages.append({"role": "assistant", "content": said})


def by_completions(urls: dict[str, str], key: str) -> None:
    with openai.OpenAI(base_url=urls["openai"], api_key=key, max_retries=0) as client:
        prompt = ""
        for question in QUESTIONS:
            prompt += question
            answer = client.completions.create(model="policy", prompt=prompt, max_tokens=TOKENS)
            prompt += answer.choices[0].text


def by_responses(urls: dict[str, str], key: str) -> None:
    with openai.OpenAI(base_url=urls["openai"], api_key=key, max_retries=0) as client:
        fields: dict[str, Any] = {"model": "policy", "max_output_tokens": TOKENS, "reasoning": {"effort": "none"}}
        items: list[Any] = []
        for number, question in enumerate(QUESTIONS):
            items.append({"role": "user", "content": question})
            if number % 2:
                answer = client.responses.create(input=items, **fields)
            else:
                last = list(client.responses.create(input=items, stream=True, **fields))[-1]
                assert last.type in ("response.completed", "response.incomplete")
                answer = last.response
            items += [item.model_dump(exclude_none=True) for item in answer.output]


def by_messages(urls: dict[str, str], key: str) -> None:
    with anthropic.Anthropic(base_url=urls["anthropic"], api_key=key, max_retries=0) as client:
        fields: dict[str, Any] = {"model": "policy", "max_tokens": TOKENS, "thinking": {"type": "disabled"}}
        messages: list[Any] = []
        for number, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question})
            assert client.messages.count_tokens(model="policy", messages=messages).input_tokens > 0
            if number % 2:
                answer = client.messages.create(messages=messages, **fields)
            else:
                with client.messages.stream(messages=messages, **fields) as stream:
                    answer = stream.get_final_message()
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content] or "-"})


def by_gemini(urls: dict[str, str], key: str) -> None:
    with genai.Client(api_key=key, http_options={"base_url": urls["gemini"]}) as client:
        config: Any = {"max_output_tokens": TOKENS, "thinking_config": {"thinking_budget": 0}}
        chat = client.chats.create(model="policy", config=config)
        for number, question in enumerate(QUESTIONS):
            if number % 2:
                chat.send_message(question)
            else:
                assert list(chat.send_message_stream(question))


@pytest.mark.case(37)
@pytest.mark.parametrize("converse", [by_chat, by_completions, by_responses, by_messages, by_gemini])
def test_three_turns_through_a_vendors_sdk_are_recorded_as_they_were_sampled(
    serving: Serving, tiny_model: Path, converse: Callable[[dict[str, str], str], None]
) -> None:
    session = serving.session(sampling={"seed": 5})
    root = session.base_url.removesuffix("/v1")
    converse({"openai": session.base_url, "anthropic": root, "gemini": root}, session.api_key)
    calls = session.calls
    assert [call["status"] for call in calls] == ["finished"] * len(QUESTIONS)
    assert {call["dialect"] for call in calls} == {converse.__name__.removeprefix("by_")}
    assert all(call["api"] == "token" and call["completion_ids"] for call in calls)
    _, accounting = session.trajectories()
    assert accounting["exported_tokens"] == accounting["sampled_tokens"] > 0
    assert_true(rows_of(session), tiny_model)
