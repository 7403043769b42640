"""Agents with screenshots on a real vLLM, with the plugin and by the three routes: what is recorded is what the model saw, for two families
that expand images differently. The logprobs are recomputed by transformers from the images that the service keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from examples.screen.tiny_vision_model import Family
from proxy.engine.in_vllm.frames import SAMPLE
from tests.support.engine.real_engine import TOLERANCE, reaching
from tests.support.engine.scripted_images import url_of
from tests.support.engine.vllm_server import VisionEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import Session
from tests.support.service.verbatim_process import TRAINER
from tests.support.sessions.pictures import FAMILIES, digest_of, picture
from trainer_client.media import MediaFiles
from trainer_client.recompute import load_model, recompute
from trainer_client.wire import decode_trajectory

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SHOTS = (picture(1, 84, 140), picture(2, 168, 56), picture(3))
BRIEF = {"chat_template_kwargs": {"enable_thinking": False}}
"""A random reply is no thinking, which a next turn would drop."""
SAMPLING = {"temperature": 1.0, "seed": 3, "max_tokens": 8}


def user(*parts: str | bytes) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": url_of(part)}}
            for part in parts
        ],
    }


def play(session: Session, *, stream: bool) -> list[dict[str, Any]]:
    """Two turns with images and one without; its calls."""
    history: list[Any] = []
    for turn in (user("What do you see?", SHOTS[0]), user("Now", SHOTS[1], "and", SHOTS[2]), user("say what changed")):
        history.append(turn)
        if stream:
            list(session.ask(history, stream=True, extra_body=BRIEF))
            history.append(session.calls[-1]["reply"])
        else:
            history.append(session.answer(history, extra_body=BRIEF))
    return session.calls


def record(engine: VisionEngine, redis_server: RedisServer, *, plugin: bool, stream: bool) -> tuple[list[Any], Any, MediaFiles]:
    """The calls, the one row and its images. Call ids are alike, since templates may show them."""
    way = reaching("plugin" if plugin else "token", engine.url, redis_server.url)
    with way as (relay, service), pytest.MonkeyPatch.context() as patch:
        ids = itertools.count(1)
        patch.setattr("proxy.call.run.new_call_id", lambda: f"{next(ids):024x}")
        session = service.session(sampling=SAMPLING)
        calls = play(session, stream=stream)
        assert (relay.asked[SAMPLE] > 0) == plugin
        (row,), accounting = session.trajectories()
        assert accounting["complete"] and accounting["quarantined"] == []
        decoded = decode_trajectory(row)

        def fetch(session_id: str, digest: str) -> bytes:
            return service.request("GET", f"/sessions/{session_id}/media/{digest}", TRAINER).content

        files = MediaFiles.of([decoded], fetch)
        files.fetch()
        return calls, decoded, files


@pytest.mark.case(72)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_the_model_saw(
    vision_engine: Callable[[Family], VisionEngine], redis_server: RedisServer, family: Family
) -> None:
    engine = vision_engine(family)
    told = {
        (plugin, stream): record(engine, redis_server, plugin=plugin, stream=stream)
        for plugin in (True, False)
        for stream in (False, True)
    }
    calls, row, files = told[True, False]
    for others, _, _ in told.values():
        for call, other in zip(calls, others, strict=True):
            for name in (
                "prompt_ids",
                "completion_ids",
                "logprobs",
                "media",
                "branch_reason",
                "weight_versions",
                "finish_reason",
            ):
                assert other[name] == call[name], name
    assert [len(call["media"]) for call in calls] == [1, 3, 3]
    model, vision = load_model(engine.model)
    trained = row.loss_mask == 1
    again = recompute(model, row, vision=vision, media=files)
    np.testing.assert_allclose(again[trained], row.logprobs[trained], atol=TOLERANCE)
    other = picture(9, 84, 140)
    swapped = replace(row, media=(replace(row.media[0], digest=digest_of(other)), *row.media[1:]))
    unlike = recompute(
        model, swapped, vision=vision, media=MediaFiles.join([files, MediaFiles({digest_of(other): lambda: other})])
    )
    assert np.abs(unlike - row.logprobs)[trained].max() > 100 * TOLERANCE, "the images make a difference"
