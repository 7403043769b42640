"""What a local runtime lacks is installed once per machine, and every later sandbox has it, read-only."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from contract.tasks import RuntimeSpec
from rollout.runtimes.base import BadRuntime, Install, Installed, Logs, ProxyAddress, RuntimeFailed
from rollout.runtimes.installs import OPTION, PREFIX
from rollout.runtimes.local.runtime import LocalKind
from rollout.runtimes.settings import SYSTEM_PATH, RuntimeSettings
from tests.support.machine import unavailable

MARK = uuid4().hex[:8]
"""In the names of runtimes: those of a machine are all different."""
SPEC, PROXY = RuntimeSpec(), ProxyAddress("127.0.0.1", 9)
SCRIPT = "mkdir -p $NPM_CONFIG_PREFIX/bin && printf '#!/bin/sh\\necho here\\n' > $NPM_CONFIG_PREFIX/bin/agent-x"
LINES = ("echo ran", SCRIPT, f"chmod +x {PREFIX}/bin/agent-x")
INSTALL = Install("agent-x", LINES)


@pytest.fixture
async def kind(tmp_path: Path) -> LocalKind:
    kind = LocalKind(RuntimeSettings(local_dir=tmp_path / "runtimes", local_path=SYSTEM_PATH, installs_kept=1))
    if (reason := await kind.probe()) is not None:
        unavailable(reason)
    return kind


def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "install.out", tmp_path / "install.err")


async def said(kind: LocalKind, spec: RuntimeSpec, line: str) -> tuple[int, str]:
    runtime = kind.make(spec, f"r-{MARK}-after", PROXY)
    await runtime.start()
    try:
        done = await runtime.exec(("sh", "-c", line), timeout_seconds=60)
        return done.exit_code, done.stdout.decode()
    finally:
        await runtime.stop()


async def test_it_is_installed_once_and_seen_read_only_by_every_later_runtime(kind: LocalKind, tmp_path: Path) -> None:
    made = await asyncio.gather(
        *(kind.install(SPEC, INSTALL, f"r-{MARK}-{number}", PROXY, logs(tmp_path)) for number in range(3))
    )
    specs = [each.spec for each in made]
    assert (tmp_path / "install.out").read_text() == "ran\n"
    assert specs == [replace(SPEC, options={OPTION: specs[0].options[OPTION]})] * 3
    assert await said(kind, specs[0], "agent-x") == (0, "here\n")
    code, _ = await said(kind, specs[0], f"echo no > {PREFIX}/bin/agent-x")
    assert code != 0 and await said(kind, specs[0], "agent-x") == (0, "here\n")
    assert (await said(kind, SPEC, "agent-x"))[0] == 127
    assert list((tmp_path / "runtimes").iterdir()) == []


async def test_another_process_of_the_machine_finds_it_there(kind: LocalKind, tmp_path: Path) -> None:
    made = await kind.install(SPEC, INSTALL, f"r-{MARK}-1", PROXY, logs(tmp_path))
    other = LocalKind(kind.settings)
    assert await other.install(SPEC, INSTALL, f"r-{MARK}-2", PROXY, logs(tmp_path)) == made
    assert (tmp_path / "install.out").read_text() == "ran\n"


@pytest.mark.parametrize(
    ("install", "failure"),
    [
        (Install("sh", LINES), ""),
        (Install("agent-x", ("echo no network; exit 3",)), "exit code 3: no network"),
        (Install("agent-x", ("true",)), "'agent-x' does not exist after its installation"),
        (Install("agent-x", ("touch ~/agent-x",)), "'agent-x' does not exist after its installation"),
    ],
    ids=["is there anyway", "fails", "installs nothing", "installs into the home"],
)
async def test_what_is_there_anyway_or_cannot_be_kept_leaves_the_spec_as_it_is_and_why_is_told(
    kind: LocalKind, tmp_path: Path, install: Install, failure: str
) -> None:
    for number in range(2):
        made = await kind.install(SPEC, install, f"r-{MARK}-{number}", PROXY, logs(tmp_path))
        assert made.spec == SPEC and failure in made.failure and bool(failure) is bool(made.failure)
    assert not any((tmp_path / "runtimes").iterdir())


async def test_without_a_sandbox_nothing_is_kept(kind: LocalKind, tmp_path: Path) -> None:
    bare = replace(SPEC, network="full", options={"sandbox": "none"})
    assert await kind.install(bare, INSTALL, f"r-{MARK}-1", PROXY, logs(tmp_path)) == Installed(bare)


def test_nobody_can_submit_a_folder_of_the_machine_as_an_install(tmp_path: Path) -> None:
    with pytest.raises(BadRuntime, match="installed"):
        LocalKind(RuntimeSettings()).check(replace(SPEC, options={OPTION: "/root"}))


def there(spec: RuntimeSpec) -> bool:
    return Path(spec.options[OPTION]).is_dir()


def grown_old(folder: Path) -> None:
    """All were used long ago, in the order in which they were."""
    marks = sorted((folder / "runtimes-installed" / ".uses").glob("*"), key=lambda mark: mark.stat().st_mtime_ns)
    for number, mark in enumerate(marks):
        os.utime(mark, (1000.0 + number, 1000.0 + number))


async def test_what_was_unused_for_longest_is_removed_and_nothing_in_use(kind: LocalKind, tmp_path: Path) -> None:
    """One is kept, beside what a runtime of any process has."""
    specs, runtimes = [], []
    for number in range(3):
        install = Install("agent-x", (*LINES, f"echo {number}"))
        grown_old(tmp_path)
        made = await LocalKind(kind.settings).install(SPEC, install, f"r-{MARK}-{number}", PROXY, logs(tmp_path))
        specs.append(made.spec)
        if number == 0:
            runtimes.append(LocalKind(kind.settings).make(specs[0], f"r-{MARK}-using", PROXY))
            await runtimes[0].start()
    await runtimes[0].stop()
    assert [there(spec) for spec in specs] == [True, False, True]
    grown_old(tmp_path)
    made = await kind.install(SPEC, Install("agent-x", (*LINES, "echo 3")), f"r-{MARK}-3", PROXY, logs(tmp_path))
    specs.append(made.spec)
    assert [there(spec) for spec in specs] == [False, False, False, True]
    with pytest.raises(RuntimeFailed, match="was removed"):
        await kind.make(specs[0], f"r-{MARK}-late", PROXY).start()
    again = await kind.install(SPEC, Install("agent-x", (*LINES, "echo 0")), f"r-{MARK}-4", PROXY, logs(tmp_path))
    assert await said(kind, again.spec, "agent-x") == (0, "here\n")


async def test_a_runtime_may_start_while_its_install_is_removed(kind: LocalKind, tmp_path: Path) -> None:
    """It waited for the removal's lock in the thread in which the removal had to go on: the node stood still."""
    made = await kind.install(SPEC, INSTALL, f"r-{MARK}-1", PROXY, logs(tmp_path))
    other = replace(INSTALL, lines=(*LINES, "echo other"))
    await LocalKind(replace(kind.settings, installs_kept=2)).install(SPEC, other, f"r-{MARK}-2", PROXY, logs(tmp_path))
    grown_old(tmp_path)
    removal, held = asyncio.ensure_future(kind.installs._remove_excess()), None
    await asyncio.sleep(0)
    try:
        held = kind.installs.hold(made.spec)
    except RuntimeFailed as error:
        assert "was removed" in str(error)
    await removal
    assert there(made.spec) is (held is not None)
    if held is not None:
        os.close(held)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
async def test_an_install_in_a_folder_of_another_user_is_not_used(kind: LocalKind, tmp_path: Path) -> None:
    """Who owns the folder can put any program in there, also while nothing is installed yet."""
    planted = kind.installs.folder / INSTALL.key
    planted.mkdir(parents=True)
    os.chown(kind.installs.folder, 1000, 1000)
    with pytest.raises(RuntimeFailed, match="belongs to another user; set VERBATIM_LOCAL_DIR"):
        await kind.install(SPEC, INSTALL, f"r-{MARK}-1", PROXY, logs(tmp_path))
