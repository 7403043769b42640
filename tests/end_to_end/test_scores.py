"""Scores by a real vLLM, through the plugin and through its own routes, against transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from examples.vllm_server import VllmServer
from proxy.engine.in_vllm.frames import ROUTE
from tests.support.engine.real_engine import PLAIN, TOLERANCE, load
from tests.support.engine.recording_relay import RecordingRelay
from tests.support.engine.vllm_server import require_vllm, running_vllm
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session
from tests.support.service.verbatim_process import wait_until

pytestmark = pytest.mark.engine

SCORERS = {
    "teacher": {"policy": "teacher", "top_k": 4},
    "raw": {"at": "call", "when": "grammar"},
    "hindsight": {"policy": "teacher", "top_k": 4, "prompt": "hindsight"},
}


@pytest.fixture(scope="module")
def teacher_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_vllm()
    from examples.demo.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "seed1", seed=1)


@pytest.fixture(scope="module")
def teacher(teacher_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with running_vllm(teacher_model, tmp_path_factory.mktemp("teacher-log")) as server:
        yield server


def test_engines_with_one_vocabulary_tell_one_digest_of_it(vllm_server: VllmServer, teacher: VllmServer) -> None:
    one, other = (httpx.get(f"{server.url}{ROUTE}").json()["vocabulary"] for server in (vllm_server, teacher))
    assert one == other and len(one) == 64


@pytest.fixture(params=["plugin", "routes"])
def service(
    request: pytest.FixtureRequest, vllm_server: VllmServer, teacher: VllmServer, redis_server: RedisServer
) -> Iterator[RunningService]:
    redis_server.flushall()
    with ExitStack() as stack:
        urls = [vllm_server.url, teacher.url]
        if request.param == "routes":
            urls = [stack.enter_context(RecordingRelay(url, plugin=False)).url for url in urls]
        service = RunningService([urls[0], f"teacher={urls[1]}"], redis_server.url, engine_api="token", scorers=SCORERS)
        stack.enter_context(service)
        service.await_ready(300)
        yield service


def recompute(model: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    """log_softmax after each of the ids, (n, vocabulary)."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        found: NDArray[np.float32] = torch.log_softmax(logits.float(), -1).numpy()
        return found


def compare(row: dict[str, Any], scorer: str, expected: NDArray[np.float32]) -> int:
    """The scores of a row are the logprobs `expected` after each of its ids, and nothing but sampled tokens has one; how many do."""
    told, mask = row["scores"][scorer], row["loss_mask"]
    assert "error" not in told
    for at, trained in enumerate(mask):
        if not trained:
            assert told["logprobs"][at] is None
            continue
        after = expected[at - 1]
        assert abs(told["logprobs"][at] - after[row["token_ids"][at]]) < TOLERANCE
        best = np.sort(after)[::-1][:4]
        assert np.abs(np.array(told["top_logprobs"][at]) - best).max() < TOLERANCE
        assert np.abs(after[told["top_ids"][at]] - best).max() < TOLERANCE
    return sum(mask)


def count_distinct(rows: Sequence[list[int]]) -> int:
    """Ids of the tree that the rows make."""
    ordered, before, count = sorted(rows), list[int](), 0
    for ids in ordered:
        pairs = zip(ids, before, strict=False)
        count += len(ids) - next((at for at, (own, other) in enumerate(pairs) if own != other), min(len(ids), len(before)))
        before = list(ids)
    return count


def wait_for(service: RunningService, session: Session, scorer: str) -> None:
    def is_scored() -> bool:
        told = service.request("GET", f"/sessions/{session.session_id}/scores").json()["scorers"].get(scorer)
        assert told is None or told["state"] != "failed", told
        return told is not None and told["state"] == "scored"

    wait_until(is_scored, 300, f"{session.session_id} is scored by {scorer}")


@pytest.mark.case(94)
def test_a_teachers_scores_of_a_tree_are_those_of_transformers_and_cost_little_more_than_its_distinct_tokens(
    request: pytest.FixtureRequest, service: RunningService, teacher_model: Path
) -> None:
    session = service.session(scores=["teacher"])
    # What the teacher has scored before is in its cache, all of it, and has to be computed again.
    text = f"{session.session_id}: find the number, and say how you found it. "
    question: list[Any] = [{"role": "user", "content": text + "Think before you answer. " * 60}]
    asked = {"max_tokens": 40, "temperature": 1.0, "extra_body": {**PLAIN, "ignore_eos": True}}
    first = session.answer(question, seed=1, **asked)
    further = [*question, first, {"role": "user", "content": "Once more, and take another way this time. " * 20}]
    for seed in range(6):
        session.ask(further, seed=seed, **{**asked, "max_tokens": 200})
    session.close()
    wait_for(service, session, "teacher")
    rows, _ = session.trajectories()
    model, sampled = load(teacher_model), 0
    for row in rows:
        sampled += compare(row, "teacher", recompute(model, row["token_ids"]))
    assert sampled == 40 + 6 * 200
    if "routes" in request.node.name:
        # What was in memory there may be no number that JSON has; then a row is asked for without the cache.
        return
    page = service.request("GET", "/metrics").text
    found = re.search(r'^verbatim_score_computed_tokens_total\{scorer="teacher"\} (\S+)$', page, re.MULTILINE)
    assert found is not None
    assert float(found[1]) <= 1.3 * count_distinct([row["token_ids"] for row in rows])


def test_raw_logprobs_of_tokens_under_a_grammar_recompute_where_their_stored_ones_do_not(
    service: RunningService, tiny_model: Path
) -> None:
    session = service.session(scores=["raw"])
    grammar = {"structured_outputs": {"regex": "[a-z]{20,40}"}}
    session.ask("Say a word.", max_tokens=30, temperature=1.0, seed=3, extra_body={**PLAIN, **grammar})
    wait_for(service, session, "raw")
    (row,) = session.trajectories()[0]
    expected, raw = recompute(load(tiny_model), row["token_ids"]), row["scores"]["raw"]["logprobs"]
    trained = [at for at, each in enumerate(row["loss_mask"]) if each]
    for at in trained:
        assert abs(raw[at] - expected[at - 1][row["token_ids"][at]]) < TOLERANCE
        assert raw[at] <= row["logprobs"][at] + TOLERANCE
    assert min(raw[at] - row["logprobs"][at] for at in trained) < -1


def test_scores_in_hindsight_are_those_of_transformers_after_the_sampled_ids_with_a_hint(
    service: RunningService, teacher_model: Path
) -> None:
    """The first reply is sampled at random, so its ids are not those of its text. The later call has them, and a hint in its own turn."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(teacher_model).encode
    session = service.session(scores=["hindsight"])
    asked = {"max_tokens": 24, "temperature": 1.0, "extra_body": {**PLAIN, "ignore_eos": True}}
    questions = [f"{session.session_id}: find the number.", "Is that (all of it)"]
    messages: list[Any] = [{"role": "user", "content": questions[0]}]
    messages += [session.answer(messages, seed=1, **asked), {"role": "user", "content": questions[1]}]
    session.answer(messages, seed=2, **asked)
    hints = ["It is 7.", "look before you answer"]
    for call, hint in zip(session.calls, hints, strict=True):
        said = {"call_id": call["call_id"], "hint": hint}
        assert service.request("POST", f"/sessions/{session.session_id}/feedback", json=said).status_code == 204
    session.close()
    wait_for(service, session, "hindsight")
    model, rows = load(teacher_model), session.trajectories("per_call")[0]
    for row, question, hint in zip(rows, questions, hints, strict=True):
        begin = row["loss_mask"].index(1)
        turns = [f"<|im_start|>user\n{text}<|im_end|>\n" for text in (question, f"{question}\n\nHint: {hint}")]
        plain, hinted = (encode(f"{turn}<|im_start|>assistant\n<think>\n\n</think>\n\n") for turn in turns)
        assert row["token_ids"][begin - len(plain) : begin] == plain
        ids = [*row["token_ids"][: begin - len(plain)], *hinted, *row["token_ids"][begin:]]
        # The places of the row: what the hint adds stands before the reply.
        expected = recompute(model, ids)[len(hinted) - len(plain) :]
        assert compare(row, "hindsight", expected) == 24
