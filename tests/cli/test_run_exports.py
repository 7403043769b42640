"""`verbatim runs export`: what TensorBoard's own reader and W&B's own records have of a run, also after restarts."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.counted_run import count, play_rollouts
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import environment, verbatim, wait_until

PLAYED = play_rollouts(48)
"""Of the weight versions 0 to 5."""
BLOCK = 32768
"""Bytes of a block of W&B's records, which are in LevelDB's log format."""


@pytest.fixture(scope="module", name="running")
def one_service(redis_server: RedisServer) -> Iterator[RunningService]:
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, engine_api="token") as service:
        yield service


@pytest.fixture(name="service")
def service_with_two_policies(running: RunningService, redis_server: RedisServer) -> RunningService:
    redis_server.flushall()
    count(redis_server.url, PLAYED)
    count(redis_server.url, [replace(each, policy="judge") for each in PLAYED[:16]], "judge-")
    return running


def variables(service: RunningService, folder: Path) -> dict[str, Any]:
    own = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "HOME": str(folder)}
    return {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN, **own}


def export(service: RunningService, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    done = verbatim("runs", "export", "default", *args, **variables(service, folder))
    assert done.returncode == 0, done.stderr
    return done


def read_points(service: RunningService, policy: str = "") -> dict[int, dict[str, Any]]:
    points = service.request("GET", "/run", params={"run": "default"}).json()["points"]
    return {point["start"]: point for point in points if point["policy"] == policy}


def read_events(folder: Path, tag: str = "verbatim/reward") -> list[tuple[int, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, pytest.approx(event.value)) for event in found.Scalars(tag)]


def read_steps(folder: Path) -> list[tuple[str, int, dict[str, float]]]:
    """Run, step and numbers of all that W&B recorded in the folder, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, run = [], ""
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in split_log(file.read_bytes()):
            record = Record.FromString(content)
            run = record.run.run_id or run
            if record.HasField("history"):
                items = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
                own = {name: value for name, value in items.items() if not name.startswith("_")}
                found.append((run, record.history.step.num, own))
    return found


def split_log(log: bytes) -> Iterator[bytes]:
    at, content = 7, b""
    while at + 7 <= len(log):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        content += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield content
            content = b""


def add_late(redis_server: RedisServer, version: int, prefix: str) -> None:
    late = replace(PLAYED[0], version=version, reward=1.0, solved=True, status="completed")
    count(redis_server.url, [late] * 8, prefix)


def test_event_files_have_each_version_once_and_are_revised(
    service: RunningService, redis_server: RedisServer, tmp_path: Path
) -> None:
    for _ in range(2):  # the second adds nothing
        export(service, tmp_path, "--tensorboard", str(tmp_path / "logs"))
        (file,) = (tmp_path / "logs/default").glob("events.*")
        assert read_events(file.parent) == [(at, point["reward"]) for at, point in read_points(service).items()]
    assert [step for step, _ in read_events(file.parent / "judge")] == [0, 1]
    add_late(redis_server, 3, "late-")
    add_late(redis_server, 6, "new-")
    export(service, tmp_path, "--tensorboard", str(tmp_path / "logs"))
    points = read_points(service)
    assert list(points) == [*range(7)] and points[3]["rollouts"] == 16
    for name in ("reward", "rollouts", "sampled_tokens"):
        assert read_events(file.parent, f"verbatim/{name}") == [(at, point[name]) for at, point in points.items()]


def test_event_files_of_something_else_are_left_alone(service: RunningService, tmp_path: Path) -> None:
    from tensorboard.summary import Writer

    writer = Writer(str(tmp_path / "default"))
    writer.add_scalar("loss", 1.0, 3)
    writer.close()
    before = [(file.name, file.read_bytes()) for file in (tmp_path / "default").iterdir()]
    done = verbatim("runs", "export", "default", "--tensorboard", str(tmp_path), **variables(service, tmp_path))
    assert done.returncode == 1 and "(loss): choose another folder" in done.stderr
    assert [(file.name, file.read_bytes()) for file in (tmp_path / "default").iterdir()] == before


def test_wandb_gets_each_settled_version_once_whatever_is_started_again(
    service: RunningService, redis_server: RedisServer, tmp_path: Path
) -> None:
    export(service, tmp_path, "--wandb", "agents")
    add_late(redis_server, 6, "new-")
    export(service, tmp_path, "--wandb", "agents")
    service.request("PATCH", "/runs/default", json={"ended": True})
    export(service, tmp_path, "--wandb", "agents", "--follow")
    points = read_points(service)
    told = read_steps(tmp_path)
    own: list[tuple[int, Any]] = [
        (step, numbers["verbatim/reward"]) for run, step, numbers in told if run.startswith("default-default-")
    ]
    assert own == [(at, pytest.approx(point["reward"])) for at, point in points.items()]
    assert [step for run, step, _ in told if run.startswith("default-judge-")] == [0, 1]


def test_a_run_is_followed_until_it_is_over(service: RunningService, redis_server: RedisServer, tmp_path: Path) -> None:
    args = ("runs", "export", "default", "--tensorboard", str(tmp_path), "--follow")
    with ForkedVerbatim(args, env=environment(**variables(service, tmp_path)), stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: [*tmp_path.glob("default/events.*")], 120, "the first points are written")
        add_late(redis_server, 6, "new-")
        wait_until(lambda: read_events(tmp_path / "default")[-1][0] == 6, 120, "the new version is written")
        service.request("PATCH", "/runs/default", json={"ended": True})
        assert process.wait(120) == 0, process.stderr.read()
    assert [step for step, _ in read_events(tmp_path / "default")] == [*range(7)]


def test_an_export_without_a_place_or_of_no_run_says_so(service: RunningService, tmp_path: Path) -> None:
    for args, words in ((("default",), "--tensorboard DIR"), (("nobodys", "--tensorboard", str(tmp_path)), "no run 'nobodys'")):
        done = verbatim("runs", "export", *args, **variables(service, tmp_path))
        assert done.returncode in (1, 2) and words in done.stderr
    assert [*tmp_path.iterdir()] == []
    online = {**variables(service, tmp_path), "WANDB_MODE": "online"}
    done = verbatim("runs", "export", "default", "--wandb", "agents", **online)
    assert done.returncode == 1 and "No API key" in done.stderr and "WANDB_MODE=offline writes files" in done.stderr
