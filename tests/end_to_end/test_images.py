"""Images on the token path of a real vLLM, in two families that expand them differently, recomputed by transformers with the pixels."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from examples.screen.tiny_vision_model import Family
from reconstruct.media import Media
from reconstruct.records import pack_ids
from tests.support.engine.vllm_server import VisionEngine
from tests.support.sessions.pictures import FAMILIES, Album, picture
from tests.support.sessions.training_rows import spans, trajectory
from trainer_client.media import MediaFiles
from trainer_client.recompute import load_model, recompute

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOLERANCE = 1e-4


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_and_transformers_see_the_same_image(
    vision_engine: Callable[[Family], VisionEngine], family: Family
) -> None:
    """What all else rests on: the engine's processor and the trainer's make the same pixels, placeholders and positions."""
    engine, album = vision_engine(family), Album()
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
