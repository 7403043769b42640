"""Results carry the code they were measured with, and no table is written from those of other code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import delivery, measured_code, tables
from benchmarks.measured_code import describe_code, digest, name_commit
from benchmarks.results import measure

LEASES = {"groups": 20, "leases_per_second": 500.0, "cpu_ms_per_lease": 1.5}
PAGE = "<!-- table: delivery -->\n\nNot measured yet.\n\n<!-- end of table -->\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one file of code and one test, both committed."""
    for name in ("proxy/app.py", "tests/test_app.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("one\n")
    subprocess.run(["git", "-C", tmp_path, "init", "-q"], check=True)
    commit(tmp_path)
    return tmp_path


def commit(checkout: Path) -> None:
    for argv in (["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", checkout, *argv], check=True)


def test_code_is_described_by_its_commit_its_changes_and_its_content(checkout: Path) -> None:
    clean = describe_code(checkout)
    assert len(clean["commit"]) == 12 and not clean["dirty"]
    assert name_commit(clean) == f"commit {clean['commit']}"

    (checkout / "tests" / "test_app.py").write_text("two\n")
    assert describe_code(checkout) == clean, "tests are not what is measured"
    commit(checkout)
    assert describe_code(checkout) == clean, "nor are they when they are committed"

    (checkout / "proxy" / "new.py").write_text("two\n")
    changed = describe_code(checkout)
    assert changed["dirty"] and changed["commit"] == clean["commit"] and changed["code"] != clean["code"]
    assert name_commit(changed).endswith("with uncommitted changes")


def test_moving_text_from_one_file_to_another_changes_the_digest(checkout: Path) -> None:
    before = digest(checkout)
    (checkout / "proxy" / "app.py").rename(checkout / "proxy" / "main.py")
    assert digest(checkout) != before


def test_code_without_a_repository_has_a_digest_and_an_unknown_commit(tmp_path: Path) -> None:
    assert describe_code(tmp_path) == {"commit": "unknown", "dirty": False, "code": digest(tmp_path)}


def measured_delivery(folder: Path) -> dict[str, Any]:
    measure(
        "delivery", lambda _: {"group_size": 8, "leases": LEASES, "batches": []}, delivery.tables, None, quick=False, out=folder
    )
    found: dict[str, Any] = json.loads((folder / "delivery.json").read_text())
    return found


def test_a_table_of_other_code_is_refused_with_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    monkeypatch.setattr(tables, "FILES", (page,))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    machine = measured_delivery(tmp_path)["machine"]

    monkeypatch.setattr(measured_code, "digest", lambda root: "another")
    why = tables.write()
    assert page.read_text() == PAGE
    assert name_commit(machine) in why["delivery"]
    assert "make bench ONLY=delivery" in tables.refusal(why)

    monkeypatch.undo()
    assert not tables.outdated(["delivery"], tmp_path)
    assert name_commit(machine) in tables.written(PAGE, tmp_path)


def test_results_are_not_kept_if_the_code_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: bool) -> dict[str, Any]:
        monkeypatch.setattr(measured_code, "digest", lambda root: "another")
        return {}

    with pytest.raises(SystemExit, match="the code changed while it was measured"):
        measure("part", run, lambda _: (), None, quick=False, out=tmp_path)
    assert not (tmp_path / "part.json").exists()
