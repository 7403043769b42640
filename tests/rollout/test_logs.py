"""Which logs of attempts a node keeps."""

from __future__ import annotations

import os
from pathlib import Path

from rollout.logs import SETTLED_SECONDS, KeptLogs
from tests.support.runtimes.rollout_nodes import ASK, World, a_task

BOUND_BYTES = 100_000


def write(root: Path, attempt: str, *, size: int = 40_000, age_seconds: float = 0.0) -> Path:
    folder = root / attempt
    folder.mkdir(parents=True)
    (folder / "agent.out").write_bytes(bytes(size))
    for path in (folder / "agent.out", folder):
        written_at = path.stat().st_mtime - age_seconds
        os.utime(path, (written_at, written_at))
    return folder


def list_kept(root: Path) -> set[str]:
    return {str(folder.relative_to(root)) for folder in root.glob("*/*")}


async def test_a_node_removes_the_oldest_logs_of_ended_rollouts_and_keeps_those_of_what_runs(world: World) -> None:
    """They filled its disk, or the pod was evicted for them. Each rollout prints 700 kB, and the node keeps 1 MiB."""
    noisy, gate = f"{ASK}\nhead -c 700000 /dev/zero", world.folder / "gate"
    running = await world.submit(a_task("running", f"{noisy}\nuntil test -e {gate}; do sleep 0.1; done"))
    folders = {name: world.folder / "logs" / name / "0.1" for name in ("running", "first", "second")}
    async with world.node(log_mb=1):
        await world.until(lambda: (folders["running"] / "agent.out").exists(), "it prints")
        for name in ("first", "second"):
            await world.ended(await world.submit(a_task(name, noisy)))
        await world.until(lambda: not folders["first"].parent.exists(), "the oldest are removed")
        assert (folders["running"] / "agent.out").exists() and (folders["second"] / "agent.out").stat().st_size == 700_000
        gate.touch()
        (state,) = await world.ended(running)
    assert state.status == "completed", state.verdict


def test_what_an_earlier_process_left_is_removed_first_and_in_its_order(tmp_path: Path) -> None:
    for name, hours in (("new/0.1", 2), ("old/0.1", 4), ("older/0.1", 5), ("old/1.1", 3)):
        write(tmp_path, name, age_seconds=hours * SETTLED_SECONDS)
    kept = KeptLogs(tmp_path, BOUND_BYTES)
    kept.find()
    assert list_kept(tmp_path) == {"new/0.1", "old/1.1"}
    assert not (tmp_path / "older").exists()
    kept.add(write(tmp_path, "ended/0.1"))
    assert list_kept(tmp_path) == {"new/0.1", "ended/0.1"}


def test_logs_that_another_node_may_still_write_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "theirs/0.1", size=BOUND_BYTES)
    kept = KeptLogs(tmp_path, BOUND_BYTES)
    kept.find()
    for index in range(3):
        kept.add(write(tmp_path, f"ours/{index}.1"))
    assert list_kept(tmp_path) == {"theirs/0.1", "ours/1.1", "ours/2.1"}
