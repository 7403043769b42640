"""The engine of the tests: does it do what vLLM does? At the end, beside a real vLLM, the same requests to both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.template_families import FAMILIES, Family
from tests.support.engine.template_markup import QWEN3
from tests.support.sessions.conversations import TOOLS

GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
RENDER, DERENDER = "/v1/chat/completions/render", "/v1/chat/completions/derender"
QUESTION = [{"role": "user", "content": "q"}]
WORLD = FAMILIES["qwen3"].encode("hello world")[-1]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(verify=False, timeout=60) as made:
        yield made


class Asking:
    """The routes of an engine, real or scripted."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = url

    def post(self, path: str, body: Any, **headers: str) -> Any:
        answer = self._client.post(self._url + path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        answer = self._client.post(self._url + path, json=body)
        return answer.status_code, answer.json()

    def get(self, path: str) -> Any:
        return self._client.get(self._url + path).json()

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        with self._client.stream("POST", self._url + path, json={**body, "stream": True}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def render(self, **fields: Any) -> dict[str, Any]:
        rendered: dict[str, Any] = self.post(RENDER, {"model": "policy", "messages": QUESTION, **fields})
        return rendered


def generate_body(asking: Asking, **sampling: Any) -> dict[str, Any]:
    rendered = asking.render()
    return {**rendered, "sampling_params": {**rendered["sampling_params"], "logprobs": 0, **sampling}, "return_token_ids": True}


@pytest.mark.parametrize(
    ("sampling", "ids", "reason", "stop"),
    [
        ({"max_tokens": 2}, "hello world", "length", None),
        ({"stop": ["world"]}, "hello world", "stop", "world"),
        ({"stop_token_ids": [WORLD]}, "hello world", "stop", WORLD),
    ],
)
def test_it_stops_as_vllm_does(client: httpx.Client, sampling: dict[str, Any], ids: str, reason: str, stop: Any) -> None:
    with ScriptedEngine("qwen3") as engine:
        asking = Asking(client, engine.url)
        engine.say("hello world in Paris")
        (choice,) = asking.post(GENERATE, generate_body(asking, **sampling))["choices"]
    assert choice["token_ids"] == engine.family.encode(ids)
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_steps_of_a_stream_and_the_whole_derender_to_the_same_message(client: httpx.Client, name: str) -> None:
    with ScriptedEngine(name) as engine:
        family, asking = engine.family, Asking(client, engine.url)
        for said in ({"content": "hello world"}, {"content": "", "calls": [("lookup", {"key": "alpha"})]}):
            ids = family.encode(family.speak(**said))[:-1]
            request = {"model": "policy", "messages": QUESTION, "tools": TOOLS}
            assert step_by_step(asking, ids, request, 1) == whole_message(asking, ids, request)


def whole_message(asking: Asking, ids: list[int], request: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
    body = {"model": "policy", "generate_response": {"choices": [choice], "request_id": "x"}, "prompt_token_ids": [1, 2]}
    (told,) = asking.post(DERENDER, {**body, "chat_request": request})["choices"]
    return plain(told["message"])


def step_by_step(asking: Asking, ids: list[int], request: dict[str, Any], size: int) -> dict[str, Any]:
    """The message that a client puts together from derender's streaming steps of `size` tokens."""
    state, message = None, dict[str, Any](role="assistant", content="", reasoning="", tool_calls={})
    for start in range(0, len(ids), size):
        finish = "stop" if start + size >= len(ids) else None
        choice = {"index": 0, "token_ids": ids[start : start + size], "finish_reason": finish}
        body = {"stream": True, "model": "policy", "generate_chunk": {"choices": [choice]}, "stream_state": state}
        step = asking.post(DERENDER, {**body, "prompt_token_ids": [1, 2], "chat_request": request})
        state, delta = step["stream_state"], step["chunk"]["choices"][0]["delta"]
        for field in ("content", "reasoning"):
            message[field] += delta.get(field) or ""
        for piece in delta.get("tool_calls") or ():
            call = message["tool_calls"].setdefault(piece["index"], {"name": "", "arguments": ""})
            for field in call:
                call[field] += piece["function"].get(field) or ""
    calls = [{"function": message["tool_calls"][index]} for index in sorted(message["tool_calls"])]
    return plain({**message, "tool_calls": calls})


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """What matters of a message; a space before a tool call is no content."""
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    return {
        "content": content if content.strip() or not calls else "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
    }


def prepare_nothing(asking: Asking) -> Any:
    """The answer about a path that is not there, once it has been looked for."""
    while True:
        answer = asking.post("/collective_rpc", {"method": "verbatim_prepare", "args": ["ticket", "/not/there", "full"]})
        if answer["results"][0]["done"]:
            return answer


# Beside a real vLLM: the same requests to both, answers of the same shape. Lists are compared by their first element,
# and where one says null the other may say more.

UNALIKE = {"system_fingerprint", "permission", "completion_tokens_details"}
"""Of the engine's installation, not of its shapes."""


def assert_alike(ours: Any, theirs: Any, path: str = "") -> None:
    if ours is None or theirs is None:
        return
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), path
        assert set(ours) - UNALIKE == set(theirs) - UNALIKE, path
        for key in set(ours) & set(theirs) - UNALIKE:
            assert_alike(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list):
        assert isinstance(ours, list), path
        if ours and theirs:
            assert_alike(ours[0], theirs[0], f"{path}[0]")
    else:
        number = (int, float)
        same = isinstance(ours, type(theirs)) or (isinstance(ours, number) and isinstance(theirs, number))
        assert same, f"{path}: {ours!r} and {theirs!r}"


def streams(
    pair: tuple[Asking, Asking, ScriptedEngine], path: str, body: Any
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Both engines' events in pairs. vLLM puts tokens into one event that were sampled before it came to send the first: where it did,
    it is asked again. It may do so every time (what it tells of a long prompt takes longer than sampling three tokens): then the
    first event of each is one pair, and their last ones are the others."""
    ours = pair[0].events(path, body)
    for _ in range(20):
        theirs = pair[1].events(path, body)
        if len(theirs) >= len(ours):
            break
    assert theirs and count_ids(ours) == count_ids(theirs)
    joined = max(len(ours) - len(theirs), 0)
    yield from zip([ours[0], *ours[1 + joined :]], theirs, strict=True)


def count_ids(events: list[dict[str, Any]]) -> int:
    return sum(len(choice.get("token_ids") or ()) for event in events for choice in event["choices"])


@pytest.fixture(scope="module")
def pair(vllm_server: Any, tiny_model: Path, client: httpx.Client) -> Iterator[tuple[Asking, Asking, ScriptedEngine]]:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    family = Family("tiny", special, "<|im_end|>", QWEN3, other_ends=("<|endoftext|>",), folder=tiny_model)
    with ScriptedEngine(family) as engine:
        yield Asking(client, engine.url), Asking(client, vllm_server.url), engine


@pytest.mark.engine
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["x"], "max_tokens": 5, "n": 2, "logprobs": True},
        {
            "tools": TOOLS,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"b":1, "a":2}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "7"},
                {"role": "assistant", "content": "a", "tool_calls": []},
                {"role": "user", "content": "naïve 🙂 <|im_end|>"},
            ],
        },
    ],
)
def test_vllm_renders_the_same_ids_and_parameters(pair: tuple[Asking, Asking, ScriptedEngine], fields: dict[str, Any]) -> None:
    ours, theirs = pair[0].render(**fields), pair[1].render(**fields)
    assert ours["token_ids"] == theirs["token_ids"]
    assert_alike({**ours, "sampling_params": None}, theirs)
    for name, value in theirs["sampling_params"].items():
        assert ours["sampling_params"].get(name) == value, name


COMPLETE = "/v1/completions"


@pytest.mark.engine
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello world"},
        {"prompt": "naïve 🙂 <|im_end|>\n", "add_special_tokens": False},
        {"prompt": [40, 41, 42], "max_tokens": 5, "stop": ["xyz", "w"], "temperature": 0.5, "seed": 3, "n": 2, "logprobs": 2},
    ],
)
def test_vllm_renders_a_prompt_to_the_same_ids_and_parameters(
    pair: tuple[Asking, Asking, ScriptedEngine], fields: dict[str, Any]
) -> None:
    (ours,), (theirs,) = (one.post(f"{COMPLETE}/render", {"model": "policy", **fields}) for one in pair[:2])
    assert ours["token_ids"] == theirs["token_ids"]
    assert_alike({**ours, "sampling_params": None}, theirs)
    defaults = {"max_tokens": 16, "skip_special_tokens": True}
    for name, value in {**defaults, **theirs["sampling_params"]}.items():
        if name != "output_text_buffer_length":
            assert ours["sampling_params"].get(name) == value, name


@pytest.mark.engine
@pytest.mark.parametrize("top", [0, 3])
def test_vllms_completions_have_the_same_shape(pair: tuple[Asking, Asking, ScriptedEngine], top: int) -> None:
    ours, theirs, _ = pair
    (rendered,) = theirs.post(f"{COMPLETE}/render", {"model": "policy", "prompt": "hello"})
    sampling = {**rendered["sampling_params"], "max_tokens": 3, "logprobs": top, "ignore_eos": True, "stop": ["zzzz"]}
    body = {**rendered, "sampling_params": sampling, "output_mode": "text"}
    assert_alike(ours.post(GENERATE, body), theirs.post(GENERATE, body))
    streamed = {**body, "stream_options": {"include_usage": True}}
    for mine, real in streams(pair, GENERATE, streamed):
        assert_alike(mine, real)
    asked = {
        "model": "policy",
        "prompt": "hello",
        "max_tokens": 3,
        "logprobs": top,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    assert_alike(keyless(ours.post(COMPLETE, asked)), keyless(theirs.post(COMPLETE, asked)))
    streamed = {**asked, "stream_options": {"include_usage": True}}
    for mine, real in streams(pair, COMPLETE, streamed):
        assert_alike(keyless(mine), keyless(real))


def keyless(answer: dict[str, Any]) -> dict[str, Any]:
    """Top logprobs have the tokens themselves for keys: only whether there are any is of the shape."""
    for choice in answer["choices"]:
        assert all(choice["logprobs"]["top_logprobs"])
        choice["logprobs"]["top_logprobs"] = None
    return answer


@pytest.mark.engine
def test_vllm_tells_details_of_tokens_in_the_same_shape(pair: tuple[Asking, Asking, ScriptedEngine]) -> None:
    ours, theirs, _ = pair
    rendered = theirs.post(RENDER, {"model": "policy", "messages": [{"role": "user", "content": "the sea " * 200}]})
    details = {"logprobs": 4, "prompt_logprobs": 0, "skip_reading_prefix_cache": True}
    body = {**rendered, "sampling_params": {**rendered["sampling_params"], **details, "max_tokens": 3, "ignore_eos": True}}
    for _ in range(2):
        answers = [one.post(GENERATE, body) for one in (ours, theirs)]
        assert_alike(*answers)
    for answer in answers:
        told = answer["prompt_logprobs"]
        assert told[0] is None
        assert [next(iter(entry)) for entry in told[1:]] == [str(token) for token in rendered["token_ids"][1:]]
        for entry in answer["choices"][0]["logprobs"]["content"]:
            assert entry["top_logprobs"][0]["token_id"] == entry["token_id"] and len(entry["top_logprobs"]) == 4
    for mine, real in streams(pair, GENERATE, body):
        assert_alike(mine, real)
        assert "prompt_logprobs" not in real


@pytest.mark.engine
def test_vllms_chat_tells_tokens_as_ids_and_scores_prompts_in_the_same_shape(
    pair: tuple[Asking, Asking, ScriptedEngine],
) -> None:
    asked = {
        "model": "policy",
        "messages": QUESTION,
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 4,
        "prompt_logprobs": 0,
    }
    asked |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    answers = [one.post(CHAT, asked) for one in pair[:2]]
    assert_alike(*answers)
    for answer in answers:
        (choice,) = answer["choices"]
        assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
        for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            assert entry["top_logprobs"][0]["token"] == f"token_id:{token_id}" and len(entry["top_logprobs"]) == 4


@pytest.mark.engine
@pytest.mark.parametrize("skip_special", [True, False])
def test_vllm_spells_ids_out_the_same(pair: tuple[Asking, Asking, ScriptedEngine], skip_special: bool) -> None:
    ours, theirs, engine = pair
    for text in ("hello world", " naïve 🙂", "<think>a</think><|im_end|>\n"):
        for ids in (engine.family.encode(text), engine.family.encode(text)[:-1]):
            answer = {"choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}], "request_id": "x"}
            request = {"model": "policy", "prompt": "?", "skip_special_tokens": skip_special}
            body = {
                "model": "policy",
                "generate_responses": [answer],
                "prompt_token_ids": [[40, 41]],
                "completion_request": request,
            }
            mine, real = (one.post(f"{COMPLETE}/derender", body) for one in (ours, theirs))
            assert_alike(mine, real)
            assert mine["choices"][0]["text"] == real["choices"][0]["text"]


@pytest.mark.engine
@pytest.mark.parametrize("top", [0, 3])
def test_vllms_answers_have_the_same_shape(pair: tuple[Asking, Asking, ScriptedEngine], top: int) -> None:
    ours, theirs, _ = pair
    body = generate_body(theirs, max_tokens=3, logprobs=top, ignore_eos=True)
    assert_alike(ours.post(GENERATE, body), theirs.post(GENERATE, body))
    for mine, real in streams(pair, GENERATE, body):
        assert_alike(mine, real)
    chat = {"model": "policy", "messages": QUESTION, "max_tokens": 3, "logprobs": True, "top_logprobs": top}
    chat |= {"return_token_ids": True, "ignore_eos": True}
    assert_alike(ours.post(CHAT, chat), theirs.post(CHAT, chat))
    streamed = {**chat, "stream_options": {"include_usage": True}}
    for mine, real in streams(pair, CHAT, streamed):
        assert_alike({**mine, "choices": deltaless(mine)}, {**real, "choices": deltaless(real)})


def deltaless(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    """Which field a token's text stands in depends on the text."""
    return [{**choice, "delta": None} for choice in chunk["choices"]]


WHOLE_SAYINGS = [
    ("hello world", False),
    ("hello<|im_end|>", False),
    ("<think>\nstep\n</think>\n\nhello", True),
    ("<think>\nnever ended", True),
    ('look\n<tool_call>\n{"name": "lookup", "arguments": {"key":  "a"}}\n</tool_call>', False),
    ('<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call><|im_end|>', False),
    ('<think>\nstep\n</think>\n\n<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>', True),
]
CUT_SAYINGS = [('<tool_call>\n{"name": "lookup", "arguments": ', False)]
"""Told whole this is text; vLLM's streaming parser has given out a call without arguments by then."""


@pytest.mark.engine
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(("text", "thinking"), [*WHOLE_SAYINGS, *CUT_SAYINGS])
def test_vllm_parses_to_the_same_message(
    pair: tuple[Asking, Asking, ScriptedEngine], text: str, thinking: bool, tools: bool
) -> None:
    ours, theirs, engine = pair
    ids, request = engine.family.encode(text), parser_request(thinking, tools)
    assert whole_message(ours, ids, request) == whole_message(theirs, ids, request)


@pytest.mark.engine
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(("text", "thinking"), WHOLE_SAYINGS)
def test_vllm_parses_a_stream_to_the_same_message(
    pair: tuple[Asking, Asking, ScriptedEngine], text: str, thinking: bool, tools: bool
) -> None:
    ours, theirs, engine = pair
    ids, request = engine.family.encode(text), parser_request(thinking, tools)
    for size in (1, 4):
        assert step_by_step(ours, ids, request, size) == step_by_step(theirs, ids, request, size), size


def parser_request(thinking: bool, tools: bool) -> dict[str, Any]:
    request: dict[str, Any] = {"model": "policy", "messages": QUESTION, "chat_template_kwargs": {"enable_thinking": thinking}}
    return request | ({"tools": TOOLS} if tools else {})


@pytest.mark.engine
def test_vllm_refuses_in_the_same_shape(pair: tuple[Asking, Asking, ScriptedEngine]) -> None:
    ours, theirs, _ = pair
    long = [{"role": "user", "content": "q " * 9000}]
    for path, body in (
        (GENERATE, {}),
        (RENDER, {}),
        (DERENDER, {}),
        (CHAT, {}),
        ("/tokenize", {}),
        ("/nothing/here", {}),
        (RENDER, {"model": "other", "messages": QUESTION}),
        (RENDER, {"model": "policy", "messages": long}),
        (CHAT, {"model": "other", "messages": QUESTION}),
        (CHAT, {"model": "policy", "messages": QUESTION, "max_tokens": 9000}),
        (CHAT, {"model": "policy", "messages": long}),
        (GENERATE, {"model": "other", "token_ids": [1], "sampling_params": {}}),
        (GENERATE, {"model": "policy", "token_ids": [1] * 9000, "sampling_params": {}}),
        (GENERATE, {"model": "policy", "token_ids": [1, 99999], "sampling_params": {}}),
        *((path, {"model": "policy", "prompt": ""}) for path in (COMPLETE, f"{COMPLETE}/render")),
        *((path, {"model": "other", "prompt": "q"}) for path in (COMPLETE, f"{COMPLETE}/render")),
        *((path, {"model": "policy", "prompt": "q " * 9000}) for path in (COMPLETE, f"{COMPLETE}/render")),
        *((path, {"model": "policy", "prompt": "q", "max_tokens": 9000}) for path in (COMPLETE, f"{COMPLETE}/render")),
        (f"{COMPLETE}/derender", {"model": "policy", "generate_responses": [{"choices": [{"index": 0, "token_ids": []}]}]}),
    ):
        (status, mine), (real_status, real) = ours.refused(path, body), theirs.refused(path, body)
        assert status == real_status, path
        assert_alike(mine, real, path)
        if body:
            assert mine.get("error", {}).get("param") == real.get("error", {}).get("param"), path
            assert mine["error"]["type"] == real["error"]["type"], path


@pytest.mark.engine
def test_vllms_other_routes_answer_the_same(pair: tuple[Asking, Asking, ScriptedEngine]) -> None:
    ours, theirs, _ = pair
    assert_alike(ours.get("/v1/models"), theirs.get("/v1/models"))
    assert_alike(ours.get("/weight_info"), theirs.get("/weight_info"))
    assert ours.get("/is_paused") == theirs.get("/is_paused")
    asked: tuple[tuple[str, Any], ...] = (
        ("/tokenize", {"model": "policy", "prompt": "hello world", "return_token_strs": True}),
        ("/tokenize", {"model": "policy", "messages": QUESTION}),
        ("/detokenize", {"model": "policy", "tokens": [40, 41, 42]}),
        ("/abort_requests", {"request_ids": ["nobody"]}),
    )
    for path, body in asked:
        assert ours.post(path, body) == theirs.post(path, body), path
    loaded = {"method": "verbatim_weights"}
    assert_alike(ours.post("/collective_rpc", loaded), theirs.post("/collective_rpc", loaded))
    assert_alike(prepare_nothing(ours), prepare_nothing(theirs))
