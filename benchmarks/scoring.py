"""What a stream suffers beside scoring on its own engine: its gaps with no scoring, with all of the engine's time for it, and with half.

One vLLM of a random model in float32 on a CPU, with steps of STEP_TOKENS, and one service for each share. In turn each service opens
sessions with prompts of PROMPT_WORDS words, streams one reply after the other beside nothing for STEADY_SECONDS, and then while the engine
scores the sessions that it sampled. `gap` is the time between two tokens; a round's longest is one step with a whole chunk in it.

    python -m benchmarks.scoring [--quick]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.processes import redis_server, request, serving
from benchmarks.results import Grid, main, number, progress
from benchmarks.weights import Load
from examples.demo.tiny_model import make_tiny_model
from examples.vllm_server import VllmServer, free_port, vllm_command

SHARES = (1.0, 0.5)
SESSIONS, ROUNDS = 4, 5
PROMPT_WORDS = 250
STEP_TOKENS = 2048
STEADY_SECONDS = 4.0
WIDTH, LAYERS = 256, 4
LOOK_SECONDS = 0.2


def run(quick: bool) -> Iterator[dict[str, Any]]:
    rounds = 2 if quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-") as name, ExitStack() as stack, progress() as bar:
        task = bar.add_task("scoring", total=rounds * len(SHARES))
        model = make_tiny_model(Path(name) / "model", hidden_size=WIDTH, layers=LAYERS)
        port = free_port()
        argv, env = vllm_command(model, port, tool_parser=None, extra=("--max-num-batched-tokens", str(STEP_TOKENS)))
        log = Path(name) / "vllm.log"
        engine = stack.enter_context(VllmServer(argv, env, f"http://127.0.0.1:{port}", log, deadline_seconds=900))
        services = {}
        for share in SHARES:
            settings = {"VERBATIM_SCORERS": json.dumps({"self": {"at": "demand"}}), "VERBATIM_SCORING": f'{{"share": {share}}}'}
            _, services[share] = stack.enter_context(serving(engine.url, stack.enter_context(redis_server()), env=settings))
        measured: dict[str, list[dict[str, float]]] = {}
        for place in range(rounds):
            for share, url in services.items():
                alone, beside = measure(url, model, f"{place} {share}")
                measured.setdefault("none", []).append(alone)
                measured.setdefault(f"share {share:g}", []).append(beside)
                bar.advance(task)
        yield {"rounds": rounds, "sessions": SESSIONS, "kinds": {kind: summarize(items) for kind, items in measured.items()}}


def measure(url: str, model: Path, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """The stream's figures without scoring, and beside it."""
    sessions = [_play(url, f"{name} {place}") for place in range(SESSIONS)]
    with Load(url, 1, model) as load:
        while not load.seen:
            time.sleep(LOOK_SECONDS)
        began = time.monotonic()
        time.sleep(STEADY_SECONDS)
        start = time.monotonic()
        for session in sessions:
            request(url, "POST", f"/sessions/{session}/scores", {"scorer": "self"})
        while not all(_is_scored(url, session) for session in sessions):
            time.sleep(LOOK_SECONDS)
        end = time.monotonic()
        alone, beside = load.between(began, start), load.between(start, end)
    return _describe(alone, start - began), _describe(beside, end - start)


def _play(url: str, text: str) -> str:
    """A closed session with one reply of a long prompt."""
    session = request(url, "POST", "/sessions", {"trained": False})
    content = f"{text}: " + " ".join(f"word{place}" for place in range(PROMPT_WORDS))
    body = {"model": "policy", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "ignore_eos": True}
    request(url, "POST", f"/s/{session['session_id']}/v1/chat/completions", body, token=session["api_key"])
    request(url, "POST", f"/sessions/{session['session_id']}/close", {"status": "completed"})
    return str(session["session_id"])


def _is_scored(url: str, session: str) -> bool:
    told = request(url, "GET", f"/sessions/{session}/scores")["scorers"]["self"]
    assert told["state"] != "failed", told
    return bool(told["state"] == "scored")


def _describe(moments: Sequence[float], seconds: float) -> dict[str, float]:
    gaps = [after - before for before, after in pairwise(moments)]
    return {"gap": statistics.median(gaps), "longest": max(gaps), "rate": len(moments) / seconds, "seconds": seconds}


def summarize(items: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median over the rounds of each figure, and the longest gap of all."""
    found = {name: round(statistics.median(item[name] for item in items), 4) for name in items[0]}
    return found | {"most": round(max(item["longest"] for item in items), 4)}


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    columns = ("scoring", "median gap s", "longest gap s", "longest of all s", "tokens/s", "seconds")
    rows = tuple(
        (kind, *(number(figures[name]) for name in ("gap", "longest", "most", "rate", "seconds")))
        for kind, figures in result["kinds"].items()
    )
    what = (
        f"{result['sessions']} sessions scored in each of {result['rounds']} rounds, beside one stream; medians over the rounds"
    )
    return [Grid(what, columns, rows)]


if __name__ == "__main__":
    main("scoring", __doc__, run, tables, alone=False)
