"""Groups of finished sessions for tests of trainers: agents of two turns at a real service over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.template_families import FAMILIES
from tests.support.service.running_service import RunningService


@contextmanager
def service_of(model: Path, redis_url: str, **settings: Any) -> Iterator[RunningService]:
    """A service whose engine speaks with the tokenizer of the model in the folder `model`, and samples at random."""
    family = replace(FAMILIES["qwen3"], folder=model)
    with ScriptedEngine(family) as engine, RunningService(engine.url, redis_url, **settings) as service:
        yield service


def finish(service: RunningService, group_id: str, rewards: Sequence[float], *, turns: int = 2) -> list[str]:
    """The session ids of a group, one session per reward; each is one row with `turns` sampled segments."""
    ids = []
    for at, reward in enumerate(rewards):
        session = service.session(group_id=group_id, group_size=len(rewards))
        messages: list[Any] = [{"role": "user", "content": f"{group_id}, attempt {at}: look it up"}]
        for turn in range(turns):
            answer = session.answer(messages)
            messages += [answer, {"role": "user", "content": f"that was turn {turn}, go on"}]
        session.close(reward=reward)
        ids.append(session.session_id)
    return ids


def groups(service: RunningService) -> dict[str, int]:
    """How many groups are in each state that has any: ready, leased, acked and so on."""
    lines = service.request("GET", "/metrics").text.splitlines()
    counted = [line.split('state="')[1].split('"} ') for line in lines if line.startswith("verbatim_store_groups{")]
    return {state: int(float(number)) for state, number in counted if float(number)}
