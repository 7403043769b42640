"""Versions on disk as the command line shows, verifies, folds and prunes them, and a rollback to a delta."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contract.deltas import DELTA
from contract.tensor_files import map_tensors
from tests.support.engine.peer_deltas import make_versions, save, write_slime
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import verbatim
from trainer_client.publish_deltas import DeltaWriter


@pytest.fixture
def service(engines: list[ScriptedEngine], redis_url: str) -> Iterator[RunningService]:
    with RunningService([engine.url for engine in engines], redis_url) as running:
        yield running


@pytest.fixture
def versions(tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    """Versions 1 (an anchor with a config) to 4 in `tmp_path`."""
    (config := tmp_path / "config").mkdir()
    (config / "config.json").write_text("{}")
    state = {"w": torch.randn(40, 50).bfloat16(), "still": torch.ones(3)}
    writer, written, root = DeltaWriter(), [], None
    for version in range(1, 5):
        written.append({name: tensor.clone() for name, tensor in state.items()})
        options = {"served_root": root, "anchor_every": 9, "config": config, "shard_bytes": 10**9}
        writer.write(state, tmp_path, version, **options)  # type: ignore[arg-type]
        writer.confirm()
        root = json.loads(command("chain", str(tmp_path / f"version-{version}"), "--json").stdout)[-1]["root"]
        state["w"].view(-1)[::100] *= 1.5
    return written


def command(*args: str, url: str = "http://127.0.0.1:9") -> subprocess.CompletedProcess[str]:
    return verbatim("weights", *args, VERBATIM_URL=url, VERBATIM_ADMIN_TOKEN=ADMIN, COLUMNS="200")


def test_a_chain_is_shown_verified_and_folded(versions: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    last = str(tmp_path / "version-4")
    shown = json.loads(command("chain", last, "--json").stdout)
    assert [(row["version"], row["kind"], row["tensors"]) for row in shown] == [
        (1, "full", 2), (2, "delta", 1), (3, "delta", 1), (4, "delta", 1),
    ]  # fmt: skip
    assert shown[-1]["root"][:16] in command("chain", last).stdout
    assert f"version 4: 2 tensors are those that were published, root {shown[-1]['root']}" in command("verify", last).stdout
    out = tmp_path / "folded"
    assert command("fold", last, "--out", str(out)).returncode == 0
    folded = load_file(out / "model.safetensors")
    assert all(torch.equal(folded[name], tensor) for name, tensor in versions[3].items()) and (out / "config.json").exists()
    assert "exists: name a folder that does not" in command("fold", last, "--out", str(out)).stderr
    assert command("verify", str(out)).returncode == 0


def test_a_damaged_chain_is_named_and_nothing_is_written(versions: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    (tmp_path / "version-3" / DELTA).unlink()
    for args in (("chain",), ("verify",), ("fold", "--out", str(tmp_path / "folded"))):
        done = command(args[0], str(tmp_path / "version-4"), *args[1:])
        assert done.returncode == 1 and "version-3 is neither a delta nor an anchor" in done.stderr
    assert not (tmp_path / "folded").exists()
    for path, says in (
        (tmp_path / "config", "its digests.json cannot be read: No such file"),
        (tmp_path / "x", "is no folder"),
    ):
        assert says in command("verify", str(path)).stderr


def test_pruning_keeps_what_a_kept_delta_is_built_on_and_a_rollback_says_its_kind(
    versions: list[dict[str, torch.Tensor]], service: RunningService, engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    for version in range(1, 5):
        kind = "full" if version == 1 else "delta"
        assert command("push", str(tmp_path / f"version-{version}"), "--kind", kind, url=service.url).returncode == 0
    pruned = command("prune", str(tmp_path), "--keep-last", "1", url=service.url)
    assert "0 folders were removed, 4 stay" in pruned.stdout, pruned.stderr
    assert command("rollback", "3", url=service.url).returncode == 0
    current = service.request("GET", "/weights").json()["current"]
    assert (current["version"], current["kind"], current["path"]) == (5, "delta", str(tmp_path / "version-3"))
    root = current["root"][:16]
    assert all(root in command(*args, url=service.url).stdout for args in (("status",), ("chain", current["path"])))


def test_a_delta_of_slimes_is_folded_onto_the_checkpoint_that_engines_started_with(tmp_path: Path) -> None:
    made = make_versions(2)
    (save(tmp_path / "start", made[0]) / "config.json").write_text("{}")
    delta, out = str(write_slime(tmp_path / "deltas", 1, made[0], made[1])), tmp_path / "folded"
    based = ("--base", str(tmp_path / "start"))
    assert "version 1: 2 of 4 tensors changed, to those that were published" in command("verify", delta, *based).stdout
    assert command("fold", delta, *based, "--out", str(out)).returncode == 0
    assert np.array_equal(map_tensors(out)["body"].data, made[1]["body"].data) and (out / "config.json").exists()
    assert "4 tensors are those that were published" in command("verify", str(out)).stdout
    refused = command("fold", delta, "--out", str(tmp_path / "another"))
    assert refused.returncode == 1 and "started with: name it (--base)" in refused.stderr
    assert "--base goes with deltas of slime, miles or SkyRL" in command("verify", str(out), *based).stderr
    assert not (tmp_path / "another").exists()
