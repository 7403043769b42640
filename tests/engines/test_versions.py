"""Another version of vLLM than the tests' own: sessions of a harness, token by token recomputed by transformers, on every path it has.

    make test-engines VLLM=0.29.0                        all of it; writes a row per path into docs/engines.md
    make test-engines VLLM=0.29.0 ARGS='-k one_session'  what CI plays

VERBATIM_TESTS_VLLM names the version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_server import VllmServer
from tests.end_to_end.test_engines import states
from tests.support.documents.engine_versions import Run, record
from tests.support.engine.other_vllm import other_vllm
from tests.support.engine.real_engine import PLAIN, TOOLS, reaching, tool_turns
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import TRAINER, RunningService, Session, streamed_text
from trainer_client import TrainerClient
from trainer_client.client import Mode

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

VERSION = os.environ.get("VERBATIM_TESTS_VLLM", "")
TOLERANCE = 1e-4
MODES: tuple[Mode, ...] = ("keep", "wait", "abort")
QUESTION = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    assert VERSION, "make test-engines VLLM=..., which names the version of vLLM, runs these tests"
    with other_vllm(VERSION, tiny_model, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every version that was pushed: the engine keeps them from path to path."""
    return tmp_path_factory.mktemp("weights")


def read_replica(service: RunningService) -> dict[str, Any]:
    (replica,) = service.request("GET", "/engines").json()["replicas"]
    return dict(replica)


# What harnesses do. Each plays in a session of its own.


def converse(session: Session, *, stream: bool, turns: int = 3, **fields: Any) -> None:
    messages: list[Any] = [*QUESTION]
    for turn in range(turns):
        answer = session.ask(messages, max_tokens=24, seed=turn, stream=stream, **{"extra_body": PLAIN, **fields})
        text = streamed_text(answer)[0] if stream else answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {turn}?"}]


def think(session: Session) -> None:
    """A new question drops the thinking: each reply is a row."""
    messages: list[Any] = [*QUESTION]
    for turn in range(3):
        message = session.ask(messages, max_tokens=16, seed=turn).choices[0].message
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]


def fork(session: Session) -> None:
    """Two ways on from one reply, and an edit of the question before it."""
    reply = session.ask(QUESTION, max_tokens=16, seed=1, extra_body=PLAIN).choices[0].message.model_dump(exclude_none=True)
    for told, asked in ((QUESTION, "Go on."), (QUESTION, "Stop."), ([{"role": "user", "content": "Of the wind."}], "Go on.")):
        session.ask([*told, reply, {"role": "user", "content": asked}], max_tokens=16, seed=2, extra_body=PLAIN)


def choose(session: Session, *, stream: bool) -> None:
    """Several choices, cut at stop strings."""
    answer = session.ask(QUESTION, n=3, max_tokens=40, stop=["e", "an"], seed=1, stream=stream, extra_body=PLAIN)
    texts = [""] * 3
    for choice in (choice for chunk in answer for choice in chunk.choices) if stream else answer.choices:
        texts[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert not any(stop in text for text in texts for stop in ("e", "an"))


def complete(session: Session, *, prompt: Any, stream: bool) -> None:
    for turn in range(2):
        asked = {"max_tokens": 12, "seed": turn, "stream": stream, "stop": ["q"], "extra_body": {"return_token_ids": True}}
        answer = session.client.completions.create(model="policy", prompt=prompt, **asked)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        if isinstance(prompt, str):
            prompt += "".join(choice.text for choice in choices) + "\nGo on:"
        else:
            prompt = [*prompt, *(token for choice in choices for token in choice.token_ids or ()), 50 + turn]


PLAYS: dict[str, Callable[[Session], Any]] = {
    "a loop of tools": lambda session: tool_turns(session, 4),
    "a loop of tools, streamed": lambda session: converse(session, stream=True, tools=TOOLS),
    "a conversation": lambda session: converse(session, stream=False),
    "a conversation, streamed": lambda session: converse(session, stream=True),
    "thinking": think,
    "forks": fork,
    "choices": lambda session: choose(session, stream=False),
    "choices, streamed": lambda session: choose(session, stream=True),
    "logprobs": lambda session: converse(session, stream=False, logprobs=True, top_logprobs=2),
    "logprobs, streamed": lambda session: converse(session, stream=True, logprobs=True, top_logprobs=2),
    "a prompt of text": lambda session: complete(session, prompt="The fox", stream=False),
    "a prompt of text, streamed": lambda session: complete(session, prompt="The fox", stream=True),
    "a prompt of ids": lambda session: complete(session, prompt=[40, 41, 42], stream=False),
    "a prompt of ids, streamed": lambda session: complete(session, prompt=[40, 41, 42], stream=True),
}
SAMPLING = {"logprobs": {"top_logprobs": 2}, "a conversation": {"top_logprobs": 2, "prompt_logprobs": True}}
"""Details that a trainer wants of some of them."""


def find_difference(session: Session, model: Path, weights: Path) -> float:
    """The largest difference of a stored logprob from the recomputed one, once every sampled token is in a row."""
    import torch

    from examples.demo.recompute import largest_difference

    rows, accounting = session.trajectories()
    assert accounting["quarantined"] == []
    assert accounting["exported_tokens"] == accounting["sampled_tokens"] > 0
    largest, tokens = largest_difference(rows, str(model), weights, dtype=torch.float32)
    assert tokens == accounting["sampled_tokens"]
    return largest


def play_all(service: RunningService, model: Path, weights: Path) -> tuple[dict[str, str], float]:
    """What went wrong, by session, and the largest difference of the others."""
    wrong, largest = {}, 0.0
    for name, play in PLAYS.items():
        session = service.session(sampling=SAMPLING.get(name, {}))
        try:
            play(session)
            difference = find_difference(session, model, weights)
            assert difference < TOLERANCE
            largest = max(largest, difference)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    return wrong, largest


def push_all(service: RunningService, first: int, model: Path, weights: Path) -> list[str]:
    """The modes in which new weights came and the next reply was theirs, whole and streamed; versions count from `first`."""
    pushed: list[str] = []
    with TrainerClient(service.url, TRAINER) as trainer:
        for mode, (version, state) in zip(MODES, _states_from(model, first), strict=False):
            assert trainer.publish(state, version, directory=weights, mode=mode).applied
            session = service.session()
            for stream in (False, True):
                converse(session, stream=stream, turns=1)
            spans = [call["weight_versions"] for call in session.calls]
            assert [[each[0] for each in span] for span in spans] == [[version]] * 2
            assert find_difference(session, model, weights) < TOLERANCE
            pushed.append(mode)
    return pushed


def _states_from(model: Path, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((version, state) for version, state in states(model) if version >= first)


@pytest.mark.parametrize("path", ["plugin", "token", "chat"])
def test_every_session_is_exact_on_a_path_and_weights_can_be_pushed(
    engine: VllmServer, redis_server: RedisServer, tiny_model: Path, weights: Path, path: str
) -> None:
    redis_server.flushall()
    with reaching(path, engine.url, redis_server.url) as (_, service):
        replica = read_replica(service)
        if path == "plugin" and not replica["plugin"]:
            pytest.skip(f"vLLM {VERSION} has no plugin")
        assert replica["version"].split("+")[0] == VERSION
        wrong, largest = play_all(service, tiny_model, weights)
        pushes: Sequence[str] = []
        if replica["takes_weights"]:
            pushes = push_all(service, len(list(weights.iterdir())) + 1, tiny_model, weights)
    api = "chat" if path == "chat" else "token"
    exact, today = len(PLAYS) - len(wrong), date.today().isoformat()
    record(Run("vLLM", VERSION, api, path == "plugin", len(PLAYS), exact, largest, tuple(pushes), today))
    assert wrong == {}
    assert len(pushes) == (len(MODES) if replica["takes_weights"] else 0)


def test_one_session_is_exact_whole_and_streamed(
    engine: VllmServer, redis_server: RedisServer, tiny_model: Path, weights: Path
) -> None:
    redis_server.flushall()
    with reaching("token", engine.url, redis_server.url) as (_, service):
        for stream in (False, True):
            session = service.session()
            converse(session, stream=stream, tools=TOOLS, stop=["zz"] if stream else None)
            assert {call["api"] for call in session.calls} == {"token"}
            assert find_difference(session, tiny_model, weights) < TOLERANCE
