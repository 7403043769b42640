"""Images on the token path of a real vLLM, in two families that expand them differently: from a harness through engine, store and lease
to a trainer, recomputed by transformers with the pixels, across a push in the middle of the session."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.screen.tiny_vision_model import make_tiny_vision_model
from reconstruct.media import Media
from reconstruct.records import pack_ids
from tests.support.engine.vllm_server import IMAGES, VisionEngine, require_vllm, running_vllm
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session, streamed_text
from tests.support.service.verbatim_process import TRAINER, wait_until
from tests.support.sessions.pictures import FAMILIES, Album, digest_of, picture
from tests.support.sessions.training_rows import spans, trajectory
from trainer_client import TrainerClient
from trainer_client.media import MediaFiles
from trainer_client.recompute import compare, load_model, recompute

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOLERANCE = 1e-4


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionEngine]:
    """Not the shared one: weights are pushed to it."""
    require_vllm()
    directory = tmp_path_factory.mktemp("vision")
    model = make_tiny_vision_model(directory / "model", family=request.param)
    with running_vllm(model, directory, *IMAGES) as server:
        yield VisionEngine(request.param, model, server)


@pytest.mark.case(73)
def test_the_engine_and_transformers_see_the_same_image(engine: VisionEngine) -> None:
    """What all else rests on: the engine's processor and the trainer's make the same pixels, placeholders and positions."""
    album = Album()
    shown = [album.add(picture(1, 84, 140)), album.add(picture(2, 168, 56))]
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What changed?"}]
    parts += [{"type": "image_url", "image_url": {"url": data_url(album.files[digest])}} for digest in shown]
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 3,
    }
    rendered = httpx.post(f"{engine.url}/v1/chat/completions/render", json=body, timeout=120).json()
    asked = body | {"logprobs": True, "return_token_ids": True}
    answer = httpx.post(f"{engine.url}/v1/chat/completions", json=asked, timeout=120).json()
    choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
    assert prompt == rendered["token_ids"]
    places = rendered["features"]["mm_placeholders"]["image"]
    row = trajectory(
        token_ids=pack_ids(prompt + choice["token_ids"]),
        loss_mask=np.array([0] * len(prompt) + [1] * len(choice["token_ids"]), dtype=np.int8),
        logprobs=np.array([0.0] * len(prompt) + [each["logprob"] for each in choice["logprobs"]["content"]], dtype=np.float32),
        weight_versions=spans(len(prompt), [0] * len(choice["token_ids"])),
        media=tuple(Media(digest, "image", at["offset"], at["length"]) for digest, at in zip(shown, places, strict=True)),
    )
    model, vision = load_model(engine.model)
    told = recompute(model, row, vision=vision, media=MediaFiles.of([row], album.fetch))
    np.testing.assert_allclose(told[len(prompt) :], row.logprobs[len(prompt) :], atol=TOLERANCE)
    other = replace(row, media=(replace(row.media[0], digest=album.add(picture(9, 84, 140))), row.media[1]))
    unlike = recompute(model, other, vision=vision, media=MediaFiles.of([other], album.fetch))
    assert np.abs(unlike - row.logprobs)[len(prompt) :].max() > 1000 * TOLERANCE


@dataclass(frozen=True, slots=True)
class Training:
    """A service over the engine, a trainer of it, and a folder for what that publishes."""

    service: RunningService
    trainer: TrainerClient
    directory: Path


@pytest.fixture
def training(engine: VisionEngine, redis_server: RedisServer, tmp_path: Path) -> Iterator[Training]:
    """However a test ends, the next one finds the engine with the weights that it started with."""
    redis_server.flushall()
    scorers: dict[str, Any] = {"self": {}, "hindsight": {"prompt": "hindsight"}}
    with (
        RunningService(engine.url, redis_server.url, scorers=scorers) as service,
        TrainerClient(service.url, TRAINER) as trainer,
    ):
        service.await_ready()
        yield Training(service, trainer, tmp_path)
        after = trainer.weights()["current"]["version"] + 1
        trainer.publish(load_model(engine.model)[0].state_dict(), after, directory=tmp_path)


@pytest.mark.case(73)
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_that_sees_is_one_row_that_a_trainer_can_recompute(
    engine: VisionEngine, training: Training, stream: bool
) -> None:
    """Three turns: two images in one message; an image in a tool's result; the first one again, under pushed weights."""
    trainer = training.trainer
    first, second, third = (picture(seed, *size) for seed, size in ((1, (84, 140)), (2, (168, 56)), (3, (56, 56))))
    models = [load_model(engine.model)[0], perturb(load_model(engine.model)[0])]
    before = trainer.weights()["current"]["version"]
    session = training.service.session(group_id="g", group_size=1)
    messages: list[Any] = [{"role": "user", "content": [*shown(first), text("Look."), *shown(second)]}]
    messages.append(answer(session, messages, stream))
    call = {"id": "call_1", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}
    messages += [
        {"role": "user", "content": "Take a screenshot."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": [text("Done:"), *shown(third)]})
    messages.append(answer(session, messages, stream))
    trainer.publish(models[1].state_dict(), before + 1, directory=training.directory)
    messages.append({"role": "user", "content": [text("Like the first?"), *shown(first)]})
    answer(session, messages, stream)
    session.close(reward=1.0)
    assert [(each["api"], each["branch_reason"]) for each in session.calls] == [("token", None)] * 3
    batch = trainer.lease(wait_seconds=60)
    assert batch is not None
    with batch:
        (row,) = batch.rows
        assert [item.digest for item in row.media] == [digest_of(each) for each in (first, second, third, first)]
        assert len(batch.media) == 3 and batch.media[digest_of(third)] == third
        vision = load_model(engine.model)[1]
        assert {span.version for span in row.weight_versions} == {before, before + 1}
        for version, model in zip((before, before + 1), models, strict=True):
            found = compare(model, [row], version=version, vision=vision, media=batch.media)
            assert found.tokens > 0 and found.largest < TOLERANCE, found
        wrong = compare(models[0], [row], version=before + 1, vision=vision, media=batch.media)
        assert wrong.largest > 10 * TOLERANCE


def perturb(model: Any) -> Any:
    """Every weight a little different, those of the vision tower too."""
    import torch

    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return model


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def shown(data: bytes) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": data_url(data)}}]


def answer(session: Session, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The assistant's message as a harness keeps it.

    Seeded, since a random model sometimes samples the mark that ends a thought, whose text the template hides from later turns: that
    session is more than one row, and should be."""
    fields: dict[str, Any] = {"max_tokens": 12, "seed": 3, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    if not stream:
        return session.answer(messages, **fields)
    return {"role": "assistant", "content": streamed_text(session.ask(messages, stream=True, **fields))[0]}


def await_score(service: RunningService, session: Session, scorer: str) -> dict[str, Any]:
    """The session's one row, once it is scored."""
    path, ended = f"/sessions/{session.session_id}/scores", ("scored", "failed")
    wait_until(lambda: service.request("GET", path).json()["scorers"][scorer]["state"] in ended, 300, "it is scored")
    (row,) = session.trajectories()[0]
    assert "error" not in row["scores"][scorer]
    return dict(row)


@pytest.mark.case(94)
def test_a_scorer_sees_the_pixels_too(engine: VisionEngine, training: Training) -> None:
    """The policy itself, which gives each token what it gave when it sampled it: without the images, or with others, it would not."""
    session = training.service.session(scores=["self"])
    messages: list[Any] = [
        {"role": "user", "content": [*shown(picture(1, 84, 140)), text("Look."), *shown(picture(2, 168, 56))]}
    ]
    messages.append(answer(session, messages, False))
    messages.append({"role": "user", "content": [text("And this?"), *shown(picture(3, 56, 56))]})
    answer(session, messages, False)
    session.close()
    row = await_score(training.service, session, "self")
    told = row["scores"]["self"]
    for at, trained in enumerate(row["loss_mask"]):
        if trained:
            assert abs(told["logprobs"][at] - row["logprobs"][at]) < TOLERANCE


def test_hindsight_sees_the_pixels_too(engine: VisionEngine, training: Training) -> None:
    """After the prompt that the engine renders of the messages with the hint, recomputed by transformers."""
    session, album = training.service.session(scores=["hindsight"]), Album()
    digests = [album.add(picture(1, 84, 140)), album.add(picture(2, 168, 56))]
    parts = [*shown(album.files[digests[0]]), text("Look."), *shown(album.files[digests[1]])]
    answer(session, [{"role": "user", "content": parts}], False)
    said = {"call_id": session.calls[0]["call_id"], "hint": "It is a square."}
    assert training.service.request("POST", f"/sessions/{session.session_id}/feedback", json=said).status_code == 204
    session.close()
    row = await_score(training.service, session, "hindsight")
    begin, ids = row["loss_mask"].index(1), row["token_ids"]
    hinted = [{"role": "user", "content": [*parts, text("\n\nHint: It is a square.")]}]
    body = {"model": "policy", "messages": hinted, "chat_template_kwargs": {"enable_thinking": False}}
    rendered = httpx.post(f"{engine.url}/v1/chat/completions/render", json=body, timeout=120).json()
    prompt, places = rendered["token_ids"], rendered["features"]["mm_placeholders"]["image"]
    whole = trajectory(
        token_ids=pack_ids(prompt + ids[begin:]),
        loss_mask=np.array([0] * len(prompt) + row["loss_mask"][begin:], dtype=np.int8),
        logprobs=np.zeros(len(prompt) + len(ids) - begin, dtype=np.float32),
        weight_versions=spans(len(prompt), [0] * (len(ids) - begin)),
        media=tuple(Media(digest, "image", at["offset"], at["length"]) for digest, at in zip(digests, places, strict=True)),
    )
    model, vision = load_model(engine.model)
    expected = recompute(model, whole, vision=vision, media=MediaFiles.of([whole], album.fetch))
    own = np.array(row["scores"]["hindsight"]["logprobs"][begin:], np.float64)
    np.testing.assert_allclose(own, expected[len(prompt) :], atol=TOLERANCE)
    # Without the hint the same ids have other logprobs.
    assert np.abs(own - np.array(row["logprobs"][begin:])).max() > 10 * TOLERANCE
