"""What the weight tests share: an empty store of weights, a pool with its updater, raw generate calls, and the recomputation that
judges."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.engine.apis.base import EngineKind
from proxy.engine.pool.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.engine.weights.push import WeightUpdater
from proxy.settings import Settings
from proxy.store.service import WeightStore
from tests.support.service.redis_server import Store


@pytest.fixture
async def weights(redis_url: str) -> AsyncIterator[WeightStore]:
    """Empty, whatever the engine holds: its label is taken over at first contact."""
    store = Store.at(redis_url, timeout_seconds=60.0)
    yield store.weights
    await store.connection.close()


@pytest.fixture
def often_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools of this process look at their engines ten times as often as they would."""
    monkeypatch.setattr("proxy.engine.pool.standing.WATCH_SECONDS", 0.2)
    monkeypatch.setattr("proxy.engine.pool.standing.RETRY_SECONDS", 0.1)


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools of this process sample nothing at first contact: for engines that are made of a few answers."""

    async def sample_nothing(kind: EngineKind, replica: Replica, logprob_mode: str) -> None:
        pass

    monkeypatch.setattr("proxy.engine.apis.contact.read_sample", sample_nothing)


async def until(condition: Callable[[], bool], what: str | Callable[[], object]) -> None:
    """Wait for it; when it does not come, fail and say what was to come, or what is instead."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        await asyncio.sleep(0.01)


@dataclass
class Service:
    pool: EnginePool
    updater: WeightUpdater
    weights: WeightStore

    async def next_version(self) -> int:
        return (await self.weights.current()).version + 1


@asynccontextmanager
async def serving(weights: WeightStore, *urls: str, **settings: Any) -> AsyncIterator[Service]:
    """A pool with its updater, started; engines that are up have been admitted."""
    # On a slow machine it would begin without having met them.
    options = Settings(engine=list(urls), **{"engine_connect_seconds": 60.0, **settings})
    pool = EnginePool(options)
    updater = WeightUpdater(pool, weights, options)
    await pool.start()
    try:
        yield Service(pool, updater, weights)
    finally:
        await updater.stop()
        await pool.stop()


@dataclass
class Said:
    """One generate answer: `spans` are [version label, start, end]."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    finish_reason: str | None


async def generate(url: str, prompt_ids: list[int], max_tokens: int, *, model: str = "policy", **sampling: Any) -> Said:
    """A greedy reply of exactly `max_tokens`, unless something cuts it."""
    async for said in generating(url, prompt_ids, max_tokens, model=model, **sampling):
        last = said
    return last


async def generating(
    url: str, prompt_ids: list[int], max_tokens: int, *, model: str = "policy", **sampling: Any
) -> AsyncIterator[Said]:
    """The same reply, growing: yields it after every event of the stream."""
    parameters = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, **sampling}
    body = {"model": model, "token_ids": prompt_ids, "sampling_params": parameters, "stream": True}
    said = Said(prompt_ids, [], [], [], None)
    async with aiohttp.ClientSession() as http, http.post(f"{url}/inference/v1/generate", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data:") and b"[DONE]" not in line:
                _add(said, json.loads(line[5:]))
                yield said


def _add(said: Said, event: dict[str, Any]) -> None:
    for choice in event["choices"]:
        said.ids += choice["token_ids"] or []
        said.logprobs += [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or []]
        said.spans += [(span["version"], span["start"], span["end"]) for span in choice.get("weight_versions") or []]
        said.finish_reason = choice["finish_reason"] or said.finish_reason


class Judge:
    """Recomputes logprobs with transformers, in float32."""

    def __init__(self) -> None:
        self._models: dict[Path, Any] = {}

    def logprobs(self, checkpoint: Path, prompt_ids: list[int], ids: list[int]) -> list[float]:
        """log p(id) of each of `ids` after `prompt_ids` and the ids before it."""
        import torch

        with torch.no_grad():
            logits = self.model(checkpoint)(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        rows = torch.log_softmax(logits.float(), dim=-1)
        return [float(rows[position, token]) for position, token in enumerate(ids)]

    def model(self, checkpoint: Path) -> Any:
        if checkpoint not in self._models:
            import torch
            from transformers import AutoModelForCausalLM

            self._models[checkpoint] = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        return self._models[checkpoint]

    def largest_error(self, checkpoint: Path, said: Said, start: int = 0, end: int | None = None) -> float:
        """Over tokens start:end, the largest |said - recomputed|, in nats."""
        recomputed = self.logprobs(checkpoint, said.prompt_ids, said.ids)
        pairs = list(zip(said.logprobs, recomputed, strict=True))[start:end]
        assert pairs, "no token to judge"
        return max(abs(a - b) for a, b in pairs)
