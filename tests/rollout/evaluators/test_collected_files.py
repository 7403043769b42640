"""Files taken out of a runtime: they fill the node's memory no more than is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout.evaluators.base import EvaluationFailed
from rollout.evaluators.diff import collect
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
