"""Agents, a judge and TRL's own loop over them, which run where TRL and OpenEnv are. Prints what came out of each rollout as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import httpx
from accelerate.state import PartialState
from openenv.core.harness import TrainableSession

from trainer_client.integrations.openenv import VerbatimSessionFactory

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


def run_agent(task: Any, session: Any) -> int:
    task = task[-1]["content"] if isinstance(task, list) else task
    if task == "silent":
        return 0
    first = [{"role": "user", "content": task}]
    reply = chat(session, first)
    if task == "chains":
        chat(session, [{"role": "system", "content": "You help."}, {"role": "user", "content": "help"}])
        chat(session, [*first, reply, {"role": "user", "content": "Again."}])
        chat(session, [*first, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "Go on."}])
        assert "response.completed" in post(session, "responses", input="Say it.", stream=True).text
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
    from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

    PartialState()
    sampling = training_sampling({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0})
    running = _HarnessRolloutLoop.__new__(_HarnessRolloutLoop)
    running._adapter, running._rollout_reward_fn, running._fork_threshold_tokens = None, None, 0
    running._live_sessions, running._stop_event = set(), threading.Event()
    told = []
    for size, tasks in ((2, ("chains", "chains")), (None, ("hello", "silent", "late", "broken", "unscored", "illjudged"))):
        running._factory = VerbatimSessionFactory(run=run_agent, judge=judge, group_size=size, sampling=sampling)
        for task in tasks:
            (_, completion_ids, sequences, *_, reward), metrics = running._run_session(task, group_id=7)
            trained = sum(sum(each.completion_mask) for each in sequences)
            assert not metrics or trained == len(completion_ids)
            told.append({"task": task, "reward": reward, "trained": trained, "turns": metrics and metrics["turns"]})
    early = running._factory.create("chains")
    assert isinstance(early, TrainableSession)
    early.close()
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    loop()
