"""Agents, a judge and TRL's own loop over them, which run where TRL and OpenEnv are. Prints what came out of each rollout as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
from accelerate.state import PartialState
from openenv.core.harness import TrainableSession

from trainer_client import TrainerClient
from trainer_client.integrations.openenv import VerbatimSessionFactory

URL, TOKEN = os.environ["VERBATIM_URL"], os.environ["VERBATIM_ADMIN_TOKEN"]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
# The engines are the service's: TRL would import vLLM, in each of its processes, and ask it nothing.
sys.modules["vllm"] = None  # type: ignore[assignment]


def post(session: Any, path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    answer = httpx.post(f"{session.base_urls['openai']}/{path}", headers=headers, json={"model": "any", **body}, timeout=120)
    answer.raise_for_status()
    return answer


def chat(session: Any, messages: list[Any]) -> Any:
    return post(session, "chat/completions", messages=messages).json()["choices"][0]["message"]


RAN: list[str] = []
"""The tasks whose agents ran."""


def run_agent(task: Any, session: Any) -> int:
    task = task[-1]["content"] if isinstance(task, list) else task
    RAN.append(task)
    if task == "silent":
        return 0
    first = [{"role": "user", "content": task}]
    reply = chat(session, first)
    if task == "chains":
        chat(session, [{"role": "system", "content": "You help."}, {"role": "user", "content": "help"}])
        chat(session, [*first, reply, {"role": "user", "content": "Again."}])
        chat(session, [*first, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "Go on."}])
        assert "response.completed" in post(session, "responses", input="Say it.", stream=True).text
    if task == "seeing":
        shown = {"kind": "image", "start": 0, "end": 1}
        session.calls = lambda: [{**call, "media": [shown]} for call in type(session).calls(session)]
    if task == "late":
        raise subprocess.TimeoutExpired("agent", 1)
    if task == "broken":
        raise ValueError("the agent broke down")
    return 0


def judge(task: Any, session: Any) -> float | None:
    if task == "unscored":
        return None
    if task == "illjudged":
        raise ValueError("no verdict")
    return float(session.session_id < "8")


def loop() -> None:
    """TRL reads its policy's sampling in the loop's constructor, which wants a model: the rest of it is what runs here."""
    from openenv.core.harness.capture.upstream import training_sampling
    from trl.experimental.async_grpo.openenv_harness import CaptureContractError, _HarnessRolloutLoop

    PartialState()
    sampling = training_sampling({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0})
    running = _HarnessRolloutLoop.__new__(_HarnessRolloutLoop)
    running._adapter, running._rollout_reward_fn, running._fork_threshold_tokens = None, None, 0
    running._live_sessions, running._stop_event = set(), threading.Event()
    make = partial(VerbatimSessionFactory, run=run_agent, judge=judge, sampling=sampling)

    def run(task: str, group_id: int) -> dict[str, Any]:
        (_, completion_ids, sequences, *_, reward), metrics = running._run_session(task, group_id=group_id)
        trained = sum(sum(each.completion_mask) for each in sequences)
        assert not metrics or trained == len(completion_ids)
        return {"task": task, "reward": reward, "trained": trained, "turns": metrics and metrics["turns"]}

    running._factory = make(group_size=2)
    told = [run("chains", 7), run("chains", 7)]
    with ThreadPoolExecutor(1) as pool:
        leased = pool.submit(lease_when_held_back)
        told += [run("hello", 8), run("hello", 8)]
    running._factory = make()
    told += [run(task, 7) for task in ("silent", "late", "broken", "unscored", "illjudged")]
    early = running._factory.create("chains")
    assert isinstance(early, TrainableSession)
    early.close()
    try:
        run("seeing", 7)
    except CaptureContractError as error:
        refused = str(error)
    running._factory = make(token="of-another-service")
    told.append(run("uncalled", 7))
    sys.stdout.write(json.dumps({"told": told, "leased": leased.result(), "refused": refused, "ran": RAN}) + "\n")


def lease_when_held_back() -> int:
    """The tokens that the next group trains, which is leased once another one is refused."""
    with TrainerClient(URL, TOKEN) as trainer:
        while "verbatim_backpressure_total 0.0" in httpx.get(f"{URL}/metrics", timeout=60).text:
            time.sleep(0.05)
        batch = trainer.lease()
        assert batch is not None
        with batch:
            return sum(int(row.loss_mask.sum()) for row in batch.rows)


if __name__ == "__main__":
    loop()
