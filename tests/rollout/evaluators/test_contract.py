"""What every kind of evaluator keeps to, whatever it looks at."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from contract.tasks import EvaluatorSpec, HarnessSpec
from rollout.evaluators.base import BadEvaluator, Case, EvaluationFailed
from rollout.evaluators.catalogue import list_names, load
from rollout.runtimes.base import Executed, RuntimeFailed
from rollout.task_sources import swebench_task
from tests import ROOT
from tests.support.runtimes.evaluations import TASK, case_of, check
from tests.support.runtimes.plain_runtime import PlainRuntime
from tests.support.runtimes.swebench_instance import FIXED, make_instance

HERE = __name__
ALL = ["command", "harbor", "http", "llm_judge", "pytest", "python", "swebench"]
DOCS = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
STAND_INS = ("/testbed", "/agent-result", "/tests", "/logs")
JUDGED = {"rubric": "r", "model": "m", "show": "diff", "diff_command": "cat diff"}


@dataclass
class Said:
    """What the other side of kinds that ask somebody says; None: never anything."""

    reward: float | None = 1.0
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def judge(self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> str:
        return f'{{"score": {await self._given()} }}'

    async def function(self) -> float:
        return await self._given()

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        try:
            body = f'{{"reward": {await self._given()} }}'.encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
            await writer.drain()
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()

    async def _given(self) -> float:
        self.asked.set()
        if self.reward is None:
            await asyncio.Event().wait()
        return self.reward or 0.0


SAID = Said()


async def reward_of(case: Case) -> float:
    assert case.runtime is not None
    await case.runtime.exec(["true"], timeout_seconds=60)
    return await SAID.function()


@dataclass(frozen=True)
class Setup:
    """One kind ready to be asked. `good` earns 1.0; `hanging` never ends."""

    runtime: PlainRuntime
    good: dict[str, Any]
    hanging: dict[str, Any]


async def set_up(name: str, folder: Path, url: str) -> Setup:
    runtime = PlainRuntime(folder, STAND_INS, "/agent-result" if name == "swebench" else "")
    await runtime.start()
    await runtime.upload("diff", b"changed\n")
    good = await asyncio.to_thread(good_options, name, folder, url)
    if name == "swebench":
        repository = folder / "stand_ins" / "testbed"
        await runtime.upload("slugs.py", FIXED.encode())
        for path in (".gitignore", "old.py", "checks/check_slugs.py"):
            await runtime.upload(path, (repository / path).read_bytes())
    hanging: dict[str, Any] = {
        "command": {"command": "sleep 600"},
        "pytest": {"command": "sleep 600"},
        "harbor": {"tests": {"test.sh": "sleep 600"}},
        "swebench": {**good, "instance": {**good.get("instance", {}), "eval_script": "sleep 600"}},
        **dict.fromkeys(("http", "python", "llm_judge"), good),
    }
    return Setup(runtime, good, hanging[name])


def good_options(name: str, folder: Path, url: str) -> dict[str, Any]:
    if name == "swebench":
        row = make_instance(folder / "stand_ins" / "testbed").row
        task = swebench_task(row, HarnessSpec("pi"))
        assert task.evaluator is not None
        return dict(task.evaluator.options)
    report = '<testsuite><testcase name="a"/></testsuite>'
    options: dict[str, dict[str, Any]] = {
        "command": {"command": "true"},
        "harbor": {"tests": {"test.sh": "echo 1 > /logs/verifier/reward.txt"}},
        "http": {"url": url, "files": ["diff"]},
        "llm_judge": {**JUDGED, "maximum": 1},
        "pytest": {"command": f"echo '{report}' > report.xml"},
        "python": {"entry": f"{HERE}:reward_of"},
    }
    return options[name]


@pytest.fixture
async def url() -> Any:
    server = await asyncio.start_server(lambda reader, writer: SAID.http(reader, writer), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    server.close()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    answers = Said()
    monkeypatch.setattr(f"{__name__}.SAID", answers)
    return answers


def case(name: str, setup: Setup, options: dict[str, Any], folder: Path, said: Said) -> Case:
    return case_of(setup.runtime, options, folder, ask=said.judge, seconds=240.0)


def test_these_are_all_the_kinds() -> None:
    assert [name for name in list_names() if name in ALL] == ALL


@pytest.mark.parametrize("name", ALL)
async def test_good_work_earns_the_full_reward(name: str, tmp_path: Path, url: str, said: Said) -> None:
    setup = await set_up(name, tmp_path, url)
    check(name, json.loads(json.dumps(setup.good)))
    score = await load(name).evaluate(case(name, setup, setup.good, tmp_path, said))
    assert score.reward == 1.0
    json.dumps([score.feedback, dict(score.metadata), dict(score.per_call), dict(score.per_branch)])


@pytest.mark.parametrize("name", ALL)
async def test_an_unknown_option_is_named_with_the_known_ones_which_are_documented(name: str, tmp_path: Path, url: str) -> None:
    good = (await set_up(name, tmp_path, url)).good
    with pytest.raises(BadEvaluator, match=f"evaluator {name}: there is no option 'treshold'") as raised:
        check(name, {**good, "treshold": 1})
    known = re.findall(r"\w+", str(raised.value).rpartition("known: ")[2])
    section = "".join(DOCS.partition(f"\n### {title}\n")[2].partition("\n##")[0] for title in (name, "Commands"))
    assert known
    assert [option for option in known if f"`{option}`" not in section] == []


@pytest.mark.parametrize("name", ALL)
async def test_what_is_refused_at_submission_is_a_failure_on_a_node(name: str, tmp_path: Path, url: str, said: Said) -> None:
    """Where it never asks the runtime or anybody else."""
    setup = await set_up(name, tmp_path, url)
    with pytest.raises(EvaluationFailed, match="this node refuses options that the service accepted"):
        await load(name).evaluate(case(name, setup, {**setup.good, "treshold": 1}, tmp_path, said))
    assert setup.runtime.commands == []
    assert not said.asked.is_set()


class Broken(PlainRuntime):
    async def upload(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        raise RuntimeFailed("gone")

    async def download(self, paths: Sequence[str], *, bound_bytes: int) -> bytes:
        raise RuntimeFailed("gone")

    async def exec(self, argv: Sequence[str], **more: Any) -> Executed:
        raise RuntimeFailed("gone")


@pytest.mark.parametrize("name", ALL)
async def test_a_runtime_that_breaks_is_no_fault_of_the_evaluator(name: str, tmp_path: Path, url: str, said: Said) -> None:
    setup = await set_up(name, tmp_path, url)
    broken = Setup(Broken(tmp_path), setup.good, {})
    with pytest.raises(RuntimeFailed, match="gone"):
        await load(name).evaluate(case(name, broken, setup.good, tmp_path, said))


@pytest.mark.parametrize("name", ALL)
async def test_an_evaluation_ends_where_it_is_stopped(name: str, tmp_path: Path, url: str, said: Said) -> None:
    """Kinds that ask somebody are stopped while they wait for the answer, the others while their command runs."""
    said.reward = None
    setup = await set_up(name, tmp_path, url)
    evaluation = asyncio.ensure_future(load(name).evaluate(case(name, setup, setup.hanging, tmp_path, said)))
    if name in ("http", "python", "llm_judge"):
        await said.asked.wait()
    else:
        while not any("sleep" in text for text in (await running(tmp_path))):
            assert not evaluation.done(), evaluation
            await asyncio.sleep(0.05)
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    assert not any("sleep" in text for text in await running(tmp_path))


async def running(folder: Path) -> list[str]:
    """The command lines of the processes that work below `folder`."""

    def found() -> list[str]:
        lines = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "cwd").resolve(strict=True).is_relative_to(folder):
                    lines.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        return lines

    return await asyncio.to_thread(found)


@pytest.mark.parametrize("name", ALL)
def test_a_kind_looks_at_nothing_but_the_options_when_it_checks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it looked elsewhere")

    evaluator = load(name)
    for place in ("asyncio.create_subprocess_exec", "subprocess.Popen", "socket.socket.connect", "pathlib.Path.read_bytes"):
        monkeypatch.setattr(place, refuse)
    with pytest.raises(BadEvaluator):
        evaluator.check(EvaluatorSpec(name, {"treshold": 1}), TASK)
