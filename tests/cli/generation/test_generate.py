"""`verbatim generate` as its users run it: a service and a node of its own, local runtimes, and a scripted engine for the model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from proxy.archive.folder import ArchiveReader, read_table
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import fresh_engine
from tests.support.machine import unavailable
from tests.support.runtimes.rollout_nodes import ASK, serving_world
from tests.support.runtimes.runtime_places import no_sandbox
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import environment, processes_using, verbatim, wait_until

__all__ = ["fresh_engine"]

SECONDS = 280.0
RUNTIME = {"kind": "local", "network": "full", "options": {"sandbox": "none"}, "cpus": 0.1, "memory_mb": 256}
LENGTH = 'printf "%s" "$(wc -w < said.txt)"'


def task(task_id: str, command: str = "grep -q 'hello world' said.txt", **fields: Any) -> dict[str, Any]:
    scored = {"kind": "command", "options": {"command": command, **fields.pop("options", {})}, "fresh_runtime": False}
    return {
        "task_id": task_id,
        "instruction": ASK,
        "runtime": RUNTIME,
        "evaluator": scored,
        "metadata": {"from": task_id},
        **fields,
    }


def written(path: Path, *tasks: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(task) for task in tasks) + "\n")
    return str(path)


def variables(tmp_path: Path) -> dict[str, str]:
    return {"VERBATIM_ENGINE_API": "token", "VERBATIM_LOCAL_DIR": str(tmp_path / "runtimes"), **ForkedVerbatim.forking_env()}


def generate(tmp_path: Path, engine: ScriptedEngine, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    given = ("--engine", engine.url, "--harness", "shell", "--out", str(tmp_path / "out"), *args)
    return verbatim("generate", *given, timeout_seconds=SECONDS, **variables(tmp_path), **more)


def stopped(tmp_path: Path, once: str, *given: str) -> str:
    """What the command has said in the end, which it was told to come to as soon as it said `once`."""
    with (tmp_path / "stderr").open("w") as told:
        process = ForkedVerbatim(
            ("generate", *given), env=environment(**variables(tmp_path)), stdin=subprocess.DEVNULL, stderr=told
        )
    try:
        stderr = (tmp_path / "stderr").read_text
        wait_until(lambda: once in stderr() or process.poll() is not None, SECONDS, f"it says {once!r}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM, stderr()
    finally:
        process.kill()
        process.wait()
    return stderr()


def left_behind(tmp_path: Path) -> list[str]:
    """The names of runtimes that have files."""
    return sorted(path.name for path in (tmp_path / "runtimes").glob("*"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_attempts_are_made_until_one_is_accepted_and_becomes_rows_and_messages(engine: ScriptedEngine, tmp_path: Path) -> None:
    """The third attempt says what is wanted; the command, given again, changes nothing and asks the model nothing."""
    engine.say("goodbye", "goodbye", "hello world")
    given = (written(tmp_path / "tasks.jsonl", task("a")), "--max-samples", "4", "--model", "policy")
    for _ in range(2):
        done = generate(tmp_path, engine, *given)
        assert done.returncode == 0, done.stderr
        assert "1 of 1 tasks ended, 1 with an accepted attempt; 3 attempts, 1 accepted, 1 kept" in done.stderr
        assert len(engine.generations) == 3
    out = tmp_path / "out"
    attempts = lines(out / "rollouts.jsonl")
    assert [(each["input"], each["reward"], each["accepted"], each["kept"]) for each in attempts] == [
        ("a", 0.0, False, False),
        ("a", 0.0, False, False),
        ("a", 1.0, True, True),
    ]
    (conversation,) = lines(out / "chat.jsonl")
    assert [(each["role"], each["content"]) for each in conversation["messages"]] == [
        ("user", "hello"),
        ("assistant", "hello world"),
    ]
    kept = attempts[-1]["session_id"]
    assert (conversation["session_id"], conversation["reward"], conversation["metadata"]["from"]) == (kept, 1.0, "a")
    (row,) = read_table(out / "accepted" / "trajectories-000000.parquet")
    assert (row["session_id"], row["reward"]) == (kept, 1.0) and sum(row["loss_mask"]) == attempts[-1]["tokens"]
    assert row["text"].endswith("hello world<|im_end|>") and "<|im_start|>user\nhello<|im_end|>" in row["text"]
    assert ArchiveReader(out / "accepted").manifest["complete"] is True
    for name in ("trajectories", "conversations"):
        (loaded,) = load_dataset(str(out), name, split="train", cache_dir=str(tmp_path / "cache"))
        assert (loaded["trajectory_id"], loaded["reward"], loaded["truncated"]) == (row["trajectory_id"], 1.0, False)
        assert loaded["tools"] is None
    assert loaded["messages"] == conversation["messages"]
    card = (out / "README.md").read_text()
    assert "1 of 3 attempts at 1 tasks were accepted and kept" in card and "| `--max-samples` | `4` |" in card
    assert (out / "logs" / "node.log").stat().st_size and not processes_using(out)


def test_settings_of_another_service_in_the_environment_are_not_its_own(engine: ScriptedEngine, tmp_path: Path) -> None:
    """The old bug: the second group was held back for ever, for no trainer took the first; harnesses called the other service; no call
    was recorded, for the embedded Redis has no replica."""
    engine.script = lambda generation, index: Say("hello world")
    another = {
        "VERBATIM_URL": "http://127.0.0.1:9",
        "VERBATIM_HARNESS_URL": "http://127.0.0.1:9",
        "VERBATIM_CONTROL_PORT": "0",
        "VERBATIM_REDIS": "redis://127.0.0.1:9",
        "VERBATIM_REDIS_WAIT": '{"replicas": 1, "aof": true}',
        "VERBATIM_ADMISSION": '{"undelivered_groups": 1, "staleness": 0, "groups_per_version": 1}',
        "VERBATIM_RETENTION": '{"without_archive": true, "seconds": 0.001}',
    }
    done = generate(tmp_path, engine, written(tmp_path / "tasks.jsonl", task("a"), task("b")), **another)
    assert done.returncode == 0 and "2 accepted, 2 kept" in done.stderr, done.stderr


def test_where_nothing_is_accepted_it_says_why_and_its_exit_code_is_not_0(engine: ScriptedEngine, tmp_path: Path) -> None:
    """What comes next in a script would fine-tune on nothing."""
    done = generate(tmp_path, engine, written(tmp_path / "tasks.jsonl", task("a", instruction="exit 3")))
    *_, ended, failed, totals, conversations, refused = done.stderr.splitlines()
    assert done.returncode == 1
    assert ended == "task a: 0 of 1 attempts accepted, 0 kept, 0 tokens, 1 harness_failed"
    assert failed.startswith("1 attempt failed as harness_failed: shell ended with exit code 3") and "(see generate:/" in failed
    assert totals.startswith("1 of 1 tasks ended, 0 with") and conversations.startswith("0 conversations in ")
    assert refused == f"verbatim: no attempt was accepted; {tmp_path / 'out' / 'rollouts.jsonl'} says why of each"


def test_attempts_that_all_fail_alike_end_it_and_it_begins_anew_once_mended(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Eight attempts failed of one cause, one after the other, for minutes."""
    broken = [task(f"t{n}", instruction="no-such-program --now; exit 3") for n in range(12)]
    given = (str(tmp_path / "tasks.jsonl"), "--at-once", "1")
    written(tmp_path / "tasks.jsonl", *broken)
    done = generate(tmp_path, engine, *given)
    assert done.returncode == 1, done.stderr
    assert "ok   harness shell" in done.stderr and "ok   runtime local" in done.stderr
    refusal = done.stderr.splitlines()[-1]
    assert "attempts failed for the same reason, so no others were made. harness_failed: shell ended with" in refusal
    assert "(see generate:/" in refusal and "it begins anew" in refusal
    made = len(lines(tmp_path / "out" / "rollouts.jsonl"))
    assert 3 <= made < 12
    engine.script = lambda generation, index: Say("hello world")
    written(tmp_path / "tasks.jsonl", *(task(f"t{n}") for n in range(2)))
    done = generate(tmp_path, engine, *given)
    assert done.returncode == 0 and "2 accepted, 2 kept" in done.stderr, done.stderr
    assert len(lines(tmp_path / "out" / "rollouts.jsonl")) == made + 2


def test_what_was_stopped_is_taken_up_where_it_was(engine: ScriptedEngine, tmp_path: Path) -> None:
    """One task is accepted, the other's harness sleeps until the command is told to end; the second time it does not sleep."""
    engine.script = lambda generation, index: Say("hello world")
    sleeping = {"instruction": f"test -e {tmp_path}/go || sleep 3600\n{ASK}"}
    file = written(tmp_path / "tasks.jsonl", task("a"), task("b", **sleeping))
    given = [file, "--engine", engine.url, "--harness", "shell", "--out", str(tmp_path / "out")]
    said = stopped(tmp_path, "task a: 1 of 1", *given)
    assert "repeat the command to continue" in said and not processes_using(tmp_path / "out")
    assert [each["kept"] for each in lines(tmp_path / "out" / "rollouts.jsonl")] == [True]
    assert [each["input"] for each in lines(tmp_path / "out" / "chat.jsonl")] == ["a"]
    (tmp_path / "go").touch()
    done = generate(tmp_path, engine, file)
    assert done.returncode == 0, done.stderr
    assert sorted(each["input"] for each in lines(tmp_path / "out" / "chat.jsonl")) == ["a", "b"]
    assert len(engine.generations) == 2


def test_what_a_killed_trial_or_node_left_is_removed_by_the_same_command(engine: ScriptedEngine, tmp_path: Path) -> None:
    """The old bug: the next node, whose service has another port, did not know the runtimes for its own, and they stayed for ever."""
    engine.script = lambda generation, index: Say("hello world")
    agent, begun, go = tmp_path / "agent", tmp_path / "begun", tmp_path / "go"
    install = (
        f"printf '#!/bin/sh\\nexec sh -c \"$1\"\\n' > {agent}; touch {begun}; test -e {go} || sleep 3600; chmod +x {agent}"
    )
    harness = {"name": "mine", "definition": {**MISSING, "argv": [str(agent), "{prompt}"], "install": [install]}}
    ask = f"touch {begun}; test -e {go} || sleep 3600\n{ASK}"
    file = written(tmp_path / "tasks.jsonl", task("a", harness=harness, instruction=ask))
    given = ("generate", file, "--engine", engine.url, "--out", str(tmp_path / "out"))

    def kill(find: Callable[[int], list[int]]) -> list[str]:
        """What is left once the harness is installed, or runs, and the processes are killed that `find` finds."""
        begun.unlink(missing_ok=True)
        with ForkedVerbatim(given, env=environment(**variables(tmp_path)), stderr=subprocess.DEVNULL) as process:
            wait_until(begun.exists, SECONDS, "the harness is installed, or runs")
            for pid in find(process.pid):
                # One of those of the node may have ended by itself.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(SECONDS)
        return left_behind(tmp_path)

    of_trial = kill(lambda command: [command])
    agent.chmod(0o755)
    of_node = kill(lambda _: processes_using(tmp_path / "out" / "logs"))
    assert of_trial and of_node
    go.touch()
    done = verbatim(*given, timeout_seconds=SECONDS, **variables(tmp_path))
    assert done.returncode == 0, done.stderr
    assert left_behind(tmp_path) == []


def test_an_accepted_reply_that_was_truncated_is_told_as_such(engine: ScriptedEngine, tmp_path: Path) -> None:
    """The old bug: chat.jsonl held half a reply as if it were whole, and nothing said so."""
    engine.script = lambda generation, index: Say("hello world", finish_reason="length")
    done = generate(tmp_path, engine, written(tmp_path / "tasks.jsonl", task("a")))
    assert done.returncode == 0, done.stderr
    (conversation,) = lines(tmp_path / "out" / "chat.jsonl")
    assert (conversation["truncated"], conversation["finish_reason"]) == (True, "length")
    assert "1 of 1 conversations are truncated (1 by length)" in done.stderr


Generate = Callable[..., Awaitable[subprocess.CompletedProcess[str]]]


@asynccontextmanager
async def generating(redis_url: str, engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[tuple[RunningService, Generate]]:
    """A service with a node, and the command that uses it."""
    async with serving_world(redis_url, engine.url, tmp_path) as world, world.node():
        given = ("--url", world.service.url, "--harness", "shell", "--out", str(tmp_path / "out"))

        async def generate(*args: str) -> subprocess.CompletedProcess[str]:
            return await asyncio.to_thread(
                verbatim, "generate", *given, *args, timeout_seconds=SECONDS, VERBATIM_ADMIN_TOKEN=ADMIN
            )

        yield world.service, generate


async def test_a_running_service_is_used_with_the_nodes_it_has(engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> None:
    """A line that was changed under its id is refused by its number; nothing of the service is ended."""
    engine.script = lambda generation, index: Say("hello world")
    async with generating(redis_url, engine, tmp_path) as (service, generate):
        file = written(tmp_path / "tasks.jsonl", task("a"), task("b"))
        done = await generate(file)
        assert done.returncode == 0, done.stderr
        written(tmp_path / "tasks.jsonl", task("a"), task("b", instruction="Something else."))
        refused = await generate(file)
        assert refused.returncode == 1 and "verbatim: line 2: " in refused.stderr, refused.stderr
        (out,) = [task["status"] for task in service.request("GET", "/tasks").json()["tasks"] if ".a." in task["task_id"]]
        assert out == "completed"
    assert [each["input"] for each in lines(tmp_path / "out" / "rollouts.jsonl")] == ["a", "b"]
    # In the order in which the tasks ended.
    assert sorted(each["input"] for each in lines(tmp_path / "out" / "chat.jsonl")) == ["a", "b"]
    assert not (tmp_path / "out" / "logs").exists()


async def test_the_best_of_several_attempts_is_kept(engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> None:
    said = iter(["one", "one two three", "one two"])
    engine.script = lambda generation, index: Say(next(said))
    file = written(tmp_path / "tasks.jsonl", task("a", LENGTH, options={"reward": "number"}))
    given = (file, "--samples", "3", "--want", "1", "--accept", "reward > 1")
    async with generating(redis_url, engine, tmp_path) as (_, generate):
        done = await generate(*given)
    assert done.returncode == 0, done.stderr
    attempts = lines(tmp_path / "out" / "rollouts.jsonl")
    assert sorted((each["reward"], each["accepted"], each["kept"]) for each in attempts) == [
        (1.0, False, False),
        (2.0, True, False),
        (3.0, True, True),
    ]
    (conversation,) = lines(tmp_path / "out" / "chat.jsonl")
    assert conversation["messages"][-1]["content"] == "one two three"


@pytest.mark.parametrize(
    ("tasks", "args", "code", "says"),
    [
        ([task("a")], ("--accept", "rewrd > 0"), 2, "--accept 'rewrd > 0' is invalid: there is no 'rewrd'"),
        ([task("a")], ("--harness", "nobodys"), 2, "there is no harness 'nobodys'"),
        ([task("a")], ("--runtime", "cloud"), 1, "line 1: runtime: there is no runtime 'cloud'"),
        ([task("a"), task("b", evaluator="oracle")], (), 1, "line 2: evaluator: there is no evaluator 'oracle'"),
        ([task("a"), task("a")], (), 1, "line 2: task 'a' is already on line 1"),
        ([task("a", evaluator=None)], (), 1, "line 1 has no evaluator"),
        ([task("a")], ("--want", "2"), 2, "--want 2 is more than the 1 attempts"),
        ([task("a")], ("--url", "http://127.0.0.1:9"), 2, "pass either --engine, to start a service, or --url"),
        ([], (), 1, "there are no tasks in "),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, tasks: list[dict[str, Any]], args: tuple[str, ...], code: int, says: str
) -> None:
    file = written(tmp_path / "tasks.jsonl", *tasks)
    harness = () if "--harness" in args else ("--harness", "shell")
    given = (file, "--engine", "http://127.0.0.1:9", "--out", str(tmp_path / "out"), *harness, *args)
    done = verbatim("generate", *given, timeout_seconds=SECONDS)
    assert done.returncode == code and says in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_without_an_engine_the_service_of_every_command_is_used(tmp_path: Path) -> None:
    given = (written(tmp_path / "tasks.jsonl", task("a")), "--harness", "shell", "--out", str(tmp_path / "out"))
    done = verbatim("generate", *given, VERBATIM_URL="http://127.0.0.1:9", VERBATIM_ADMIN_TOKEN=ADMIN)
    assert done.returncode == 1 and "no service at http://127.0.0.1:9" in done.stderr
    done = verbatim("generate", *given, "--at-once", "2")
    assert done.returncode == 2 and "--at-once configures the node that --engine starts" in done.stderr


MISSING = {
    "description": "is nowhere",
    "dialect": "chat",
    "argv": ["no-such-harness", "{prompt}"],
    "env": {"OPENAI_BASE_URL": "{openai}", "OPENAI_API_KEY": "{api_key}"},
}


@pytest.mark.parametrize(
    ("install", "told"),
    [
        ([], "line 2: mine: there is no 'no-such-harness' in the runtime, and is not to be installed here"),
        (["echo no package of that name >&2; exit 3"], "ended with exit code 3: no package of that name"),
    ],
)
def test_a_missing_harness_is_told_once_before_anything_is_started(install: list[str], told: str, tmp_path: Path) -> None:
    """Every attempt failed of it, one after the other, for minutes."""
    harness = {"name": "mine", "definition": {**MISSING, "install": install}, "install": bool(install)}
    file = written(
        tmp_path / "tasks.jsonl", {**task("a"), "harness": "shell"}, task("b", harness=harness), task("c", harness=harness)
    )
    given = (file, "--engine", "http://127.0.0.1:9", "--out", str(tmp_path / "out"), "--samples", "8")
    done = verbatim("generate", *given, timeout_seconds=SECONDS, **variables(tmp_path))
    assert done.returncode == 1 and "waiting" not in done.stderr, done.stderr
    assert done.stderr.count(told) == done.stderr.count("no-such-harness' in the runtime") == 1, done.stderr
    assert not processes_using(tmp_path / "out") and not left_behind(tmp_path)


def test_a_harness_that_a_sandbox_does_not_see_is_told_with_where_it_is(tmp_path: Path) -> None:
    if (reason := no_sandbox()) is not None:
        unavailable(reason)
    program = tmp_path / "bin" / "no-such-harness"
    program.parent.mkdir()
    program.touch(mode=0o755)
    harness = {"name": "mine", "definition": MISSING, "install": False}
    file = written(tmp_path / "tasks.jsonl", {**task("a"), "harness": harness, "runtime": "local"})
    given = (file, "--engine", "http://127.0.0.1:9", "--out", str(tmp_path / "out"))
    path = f"{program.parent}:{os.environ['PATH']}"
    done = verbatim("generate", *given, timeout_seconds=SECONDS, **{**variables(tmp_path), "PATH": path})
    assert done.returncode == 1 and f"this machine has {program}: name what it needs in VERBATIM_LOCAL_READABLE" in done.stderr


def test_what_runtimes_of_its_node_need_is_told_before_anything_is_started(tmp_path: Path) -> None:
    file = written(tmp_path / "tasks.jsonl", {**task("a"), "runtime": "local"})
    given = (file, "--engine", "http://127.0.0.1:9", "--out", str(tmp_path / "out"), "--harness", "shell")
    done = verbatim("generate", *given, timeout_seconds=SECONDS, **variables(tmp_path), VERBATIM_CGROUP=str(tmp_path / "none"))
    assert done.returncode == 1 and "fix  runtime local  " in done.stderr and "  VERBATIM_CGROUP: no control" in done.stderr
    assert done.stderr.splitlines()[-1] == "verbatim: nothing was started: fix runtime local"
    assert not processes_using(tmp_path / "out")


def test_an_engine_that_is_not_there_is_named_while_it_is_waited_for(tmp_path: Path) -> None:
    """It may be about to start; who waits for it sees what for, and may stop."""
    given = (written(tmp_path / "tasks.jsonl", task("a")), "--out", str(tmp_path / "out"), "--harness", "shell")
    *checks, waits, ended = stopped(tmp_path, "waiting", *given, "--engine", "http://127.0.0.1:9").splitlines()
    assert checks[0].startswith("note engine http://127.0.0.1:9  it does not answer yet")
    assert waits.startswith("waiting up to 300 s: no engine serves: ") and "127.0.0.1:9" in waits
    assert ended == "verbatim: stopped before anything started" and not processes_using(tmp_path / "out")


def test_lines_that_are_none_and_a_missing_harness_are_named_with_their_number(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(task("a")) + "\n{oops\n")
    given = (str(file), "--engine", "http://127.0.0.1:9", "--out", str(tmp_path / "out"))
    done = verbatim("generate", *given, "--harness", "shell", timeout_seconds=SECONDS)
    assert done.returncode == 1 and f"line 2 of {file} is not JSON at character 2: " in done.stderr
    file.write_text(json.dumps(task("a")))
    done = verbatim("generate", *given, timeout_seconds=SECONDS)
    assert done.returncode == 2 and "line 1 names no harness, and neither does --harness" in done.stderr
