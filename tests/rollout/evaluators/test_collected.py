"""Files taken out of a runtime: they fill the node's memory no more than is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout.evaluators.base import EvaluationFailed
from rollout.evaluators.collected import collect, name_of
from tests.support.runtimes.evaluations import plain_runtime
from tests.support.runtimes.plain_runtime import PlainRuntime


async def test_a_file_with_many_names_counts_for_each_of_them(tmp_path: Path) -> None:
    """In an archive all names but the first have no size."""
    runtime = PlainRuntime(tmp_path)
    await runtime.start()
    await runtime.upload("reports/0.xml", b"x" * 1000)
    for number in range(1, 8):
        os.link(f"{runtime.workdir}/reports/0.xml", f"{runtime.workdir}/reports/{number}.xml")
    found = (await collect(runtime, ["reports"], 8000)).below("reports")
    assert sorted(found) == [f"reports/{number}.xml" for number in range(8)]
    assert set(found.values()) == {b"x" * 1000}
    with pytest.raises(EvaluationFailed, match="greater than 7999 bytes"):
        await collect(runtime, ["reports"], 7999)


async def test_a_second_name_of_what_is_no_file_is_none(tmp_path: Path) -> None:
    runtime = PlainRuntime(tmp_path)
    await runtime.start()
    os.symlink("/etc/hosts", f"{runtime.workdir}/a")
    os.link(f"{runtime.workdir}/a", f"{runtime.workdir}/b", follow_symlinks=False)
    assert (await collect(runtime, ["a", "b"])).below(".") == {}


async def test_a_link_or_a_folder_is_no_file(tmp_path: Path) -> None:
    """An agent cannot have a file of the evaluator's machine read by leaving a link to it."""
    (tmp_path / "secret").write_text("secret")
    async with plain_runtime(tmp_path) as runtime:
        (Path(runtime.workdir) / "link").symlink_to(tmp_path / "secret")
        (Path(runtime.workdir) / "folder").mkdir()
        found = await collect(runtime, ["link", "folder"])
        assert (found.at("link"), found.at("folder")) == (None, None)


async def test_paths_may_be_absolute(tmp_path: Path) -> None:
    paths = [f"{tmp_path}/work/in", f"{tmp_path}/elsewhere/out"]
    async with plain_runtime(tmp_path) as runtime:
        for path in paths:
            await runtime.upload(path, path.encode())
        found = await collect(runtime, paths)
        assert [found.at(path) for path in paths] == [path.encode() for path in paths]


@pytest.mark.parametrize(
    ("path", "name"), [("a/../b", "b"), ("/w/a", "a"), ("/w", "."), (".", "."), ("/wide", "wide"), ("../x", "x"), ("/", "")]
)
def test_names_in_archives_are_relative_to_the_workdir(path: str, name: str) -> None:
    assert name_of(path, "/w") == name
