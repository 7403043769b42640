"""The versions of engines in the documentation and those that the kinds of engines name are the ones of the committed runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.apis.base import EngineKind
from proxy.engine.apis.chat import OpenAiChat
from proxy.engine.apis.vllm import VllmTokens
from tests.support.documents.engine_versions import COMMAND, PAGE, Run, read_runs, record, write_table

RUN = Run("vLLM", "0.31.0", "token", False, 18, 18, 1.9e-6, ("keep", "abort"), "2026-11-28")
MARKS = "before\n<!-- table: engine versions -->\nold\n<!-- end of table -->\nafter"


def test_the_table_of_versions_is_the_one_of_the_committed_runs() -> None:
    text = PAGE.read_text()
    assert write_table(text, read_runs()) == text, f"{PAGE.name} is not what the runs say: {COMMAND}"


@pytest.mark.parametrize("kind", [VllmTokens, OpenAiChat], ids=lambda kind: kind.name)
def test_a_kind_was_run_on_just_the_versions_that_it_names(kind: type[EngineKind]) -> None:
    named = {(each.program, minor) for each in kind.versions for minor in each.run}
    assert named == {(run.engine, ".".join(run.version.split(".")[:2])) for run in read_runs() if run.path == kind.name}


def test_a_run_replaces_an_earlier_one_of_its_version_path_and_plugin(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    older, chat, plugin = replace(RUN, version="0.9.2"), replace(RUN, path="chat", pushes=()), replace(RUN, plugin=True)
    for run in (older, RUN, chat, plugin, again := replace(RUN, exact=17, logprob_difference=None)):
        record(run, path)
    assert read_runs(path) == [chat, plugin, again, older]
    assert write_table(MARKS, read_runs(path)).splitlines()[3:-3] == [
        "| engine | path | plugin | sessions exact | largest logprob difference | pushes | run on |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| vLLM 0.31.0 | `chat` | no | 18 of 18 | 1.9e-06 | none | 2026-11-28 |",
        "| vLLM 0.31.0 | `token` | yes | 18 of 18 | 1.9e-06 | keep, abort | 2026-11-28 |",
        "| vLLM 0.31.0 | `token` | no | 17 of 18 | not compared | keep, abort | 2026-11-28 |",
        "| vLLM 0.9.2 | `token` | no | 18 of 18 | 1.9e-06 | keep, abort | 2026-11-28 |",
    ]


@pytest.mark.parametrize("page", ["no marks", MARKS + MARKS])
def test_a_page_has_the_table_once(page: str) -> None:
    with pytest.raises(ValueError, match="not one"):
        write_table(page, [RUN])
