"""The shapes of real agents' sessions: how many tokens each row has, and which of them were sampled.

    python -m benchmarks.agent_sessions      # plays every agent that `make harnesses` installs, and writes agent_sessions.json

Each plays the plain run of the harness tests once (read a file, change it, run it, say so) against the scripted engine, through the real
service. Kept is what a training step depends on:

    {"pi 0.73.1": [{"shared": 0, "runs": [3458, 41, 63, …]}]}

A row for each branch. `runs`: tokens that were not sampled, that were, and so on in turn. `shared`: how many of its first tokens it has in
common with the row before it. Tokens are those of the tests' tokenizer, which makes about twice as many of a text as a model's own.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from benchmarks.trees import SHAPES, Shape
from rollout.harnesses.catalogue import load
from tests.harnesses.agent_run import Cli
from tests.harnesses.stage import Stage
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService

AGENTS = ("aider", "claude_code", "codex", "gemini_cli", "mini_swe_agent", "opencode", "pi", "qwen_code")


def describe_rows(rows: list[dict[str, Any]]) -> Iterator[Shape]:
    before: list[int] = []
    for row in rows:
        ids, mask = row["token_ids"], row["loss_mask"]
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False))))
        runs = [len(list(run)) for _, run in groupby(mask)]
        yield {"shared": shared, "runs": runs if mask[:1] == [0] else [0, *runs]}
        before = ids


def play(stage: Stage, cli: Cli) -> list[Shape]:
    played = stage.play(cli, cli.steps(stage.workdir(cli, "plain")), "plain", timeout_seconds=900.0)
    if played.ended.exit_code or played.text_of("number.py") != "value = 42\n":
        raise SystemExit(f"{cli.harness}: {played.ended}")
    return list(describe_rows(played.rows))


def main() -> None:
    found: dict[str, list[Shape]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_redis() as redis,
        ScriptedEngine("qwen3", max_model_len=131_072) as engine,
        RunningService(engine.url, redis.url, engine_api="token") as service,
    ):
        stage = Stage(engine, service, Path(folder))
        for name in AGENTS:
            cli: Cli = importlib.import_module(f"tests.harnesses.test_{name}").CLI
            found[f"{cli.harness} {load(cli.harness).version}"] = play(stage, cli)
            print(f"{cli.harness}: {found[f'{cli.harness} {load(cli.harness).version}']}", flush=True)
    SHAPES.write_text(
        "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(shape)}" for name, shape in found.items()) + "\n}\n"
    )
    print(f"written: {SHAPES}")


if __name__ == "__main__":
    main()
