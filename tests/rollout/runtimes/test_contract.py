"""What every kind of runtime promises, on each of them for real (`rollout.runtimes.base`).

Two runtimes of each kind serve all tests of the module. A test starts one of its own only where starting or stopping is what it tests; one
that looks at everything in the workdir calls `emptied` first.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import pytest_asyncio

from rollout.runtimes import processes, seccomp
from rollout.runtimes.base import KEPT_BYTES, BadRuntime, DiskFull, Executed, Logs, ProxyAddress, Runtime, RuntimeFailed
from tests.support.runtimes.runtime_places import (
    ANSWER,
    NOWHERE,
    SECONDS,
    Place,
    answering,
    contained,
    out,
    python,
    sandboxed,
    shell,
    unconfined,
)
from tests.support.service.verbatim_process import runs

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = ["bwrap", "unconfined", "container", "kubernetes", "apptainer"]
OPEN = ("unconfined", "kubernetes")
"""Kinds that keep nothing from the network themselves: a cluster does it for its pods."""
OF_ONE_NETWORK = ("unconfined", "kubernetes", "apptainer")
"""Kinds in which all commands have the same."""
GREAT = b"y" * 300_000
NAMED = ProxyAddress("proxy.example", 443)
"""A proxy with TLS, whose certificate is for that name."""
FETCH = r"""
import socket, sys
for address, path in zip(sys.argv[1::2], sys.argv[2::2]):
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), 120) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            told = b""
            while more := connection.recv(1 << 16):
                told += more
        print(told.partition(b"\r\n\r\n")[2].decode())
    except OSError as error:
        print(error.strerror)
"""
"""Prints what each address answers at its path, or the error."""
DETACHED = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
    os._exit(0)
os.wait()
print("started", flush=True)
time.sleep(float(sys.argv[2]))
"""
"""Leaves a process behind that has nothing to do with it any more, and whose command line holds the first argument."""
DEAF = "trap '' TERM; echo started; while :; do sleep 1; done"


def but(*left_out: str) -> list[object]:
    """The other kinds."""
    marks = {"apptainer": [pytest.mark.apptainer]}
    return [pytest.param(kind, marks=marks.get(kind, [])) for kind in KINDS if kind not in left_out]


@pytest.fixture(params=but())
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


closed = pytest.mark.parametrize("kind", but(*OPEN))
"""Kinds that keep commands from the network."""
opening = pytest.mark.parametrize("kind", but(*OF_ONE_NETWORK))
"""Kinds in which a single command may have another network than its runtime."""


@dataclass(frozen=True, slots=True)
class Started:
    """A kind with the two runtimes that its tests share. In kinds that keep commands from the network, `other` has the proxy `NAMED`."""

    place: Place
    runtime: Runtime
    other: Runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy() -> AsyncIterator[ProxyAddress]:
    async with answering(at={"/great": GREAT}) as proxy:
        yield proxy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(
    proxy: ProxyAddress, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Callable[[str], Awaitable[Started]]]:
    """Starts them for the first test of the kind."""
    known: dict[str, Started] = {}
    made: list[Runtime] = []

    async def started(kind: str) -> Started:
        if kind not in known:
            place = place_of(kind, tmp_path_factory.mktemp(kind))
            runtimes = [place.runtime(each) for each in ((NOWHERE, NOWHERE) if kind in OPEN else (proxy, NAMED))]
            made.extend(runtimes)
            with pytest.MonkeyPatch.context() as environment:
                of_the_node(environment)
                await asyncio.gather(*(each.start() for each in runtimes))
            known[kind] = Started(place, *runtimes)
        return known[kind]

    yield started
    await asyncio.gather(*(each.stop() for each in made))


@pytest_asyncio.fixture(loop_scope="module")
async def place(kind: str, started: Callable[[str], Awaitable[Started]]) -> Place:
    return (await started(kind)).place


@pytest_asyncio.fixture(loop_scope="module")
async def runtime(kind: str, started: Callable[[str], Awaitable[Started]]) -> Runtime:
    return (await started(kind)).runtime


@pytest_asyncio.fixture(loop_scope="module")
async def other(kind: str, started: Callable[[str], Awaitable[Started]]) -> Runtime:
    return (await started(kind)).other


@pytest.fixture
def word() -> str:
    """An argument that no other process of the machine has."""
    return f"detached-{uuid4().hex}"


def of_the_node(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("VERBATIM_ADMIN_TOKEN", "secret-of-the-node")
    environment.setenv("LD_LIBRARY_PATH", "/secret-of-the-node")


def apart(place: Place) -> Place:
    """The same kind under other names: sweeping it leaves the shared runtimes alone."""
    return Place(place.kind, place.spec)


async def emptied(runtime: Runtime) -> Runtime:
    await out(runtime, "chmod -R u+rwX . && find . -mindepth 1 -delete")
    return runtime


def place_of(name: str, folder: Path) -> Place:
    from tests.support.runtimes.apptainer_installed import in_real_instances
    from tests.support.runtimes.kube_cluster import in_pods
    from tests.support.runtimes.kube_server import PROFILE

    places: dict[str, Callable[[Path], Place]] = {
        "bwrap": sandboxed,
        "unconfined": unconfined,
        "container": contained,
        "kubernetes": lambda folder: in_pods(kubernetes_seccomp_profile=PROFILE),
        "apptainer": in_real_instances,
    }
    return places[name](folder)


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            opened.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def entries(*members: tuple[str, bytes, str]) -> bytes:
    """An archive of (name, type, what it links to)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as opened:
        for name, kind, linked in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, linked
            opened.addfile(member)
    return buffer.getvalue()


def texts(data: bytes) -> dict[str, str]:
    """Name -> content of the files in an archive."""
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        files = {member.name: opened.extractfile(member) for member in opened if member.isfile()}
        return {name: file.read().decode() for name, file in files.items() if file}


def command_line(pid: int) -> bytes:
    """Nothing of a process that has just ended: those of other tests come and go."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def running_with(word: str) -> list[int]:
    """Processes of the machine that were started with that argument."""
    return [pid for pid in processes.list_pids() if word.encode() in command_line(pid).split(b"\0") and runs(pid)]


def detached(word: str) -> bool:
    """Whether the process that `DETACHED` leaves behind runs. The command itself has one more argument after the word."""
    return any(command_line(pid).endswith(f"\0{word}\0".encode()) for pid in running_with(word))


async def in_time(run: Callable[[float], Awaitable[Executed]], begun: Callable[[Executed], object]) -> Executed:
    """What a command did that ran out of time. It gets more and more of it until it had `begun` by then, however slow the machine is."""
    for seconds in (1.0, 5.0, 25.0):
        done = await run(seconds)
        if begun(done):
            return done
    return await run(SECONDS)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


@pytest.mark.cell("L7", "N7", "D7", "A7", "K7")
async def test_home_and_workdir_are_there_empty_and_writable_and_nobody_elses(place: Place, runtime: Runtime) -> None:
    await runtime.upload("of-another", b"")
    async with place.started() as fresh:
        assert await out(fresh, "pwd") == f"{fresh.workdir}\n"
        assert await out(fresh, 'echo "$HOME"; ls -A') == f"{fresh.home}\n"
        assert set((await out(fresh, 'ls -A "$HOME"')).split()) <= ({".bashrc", ".profile"} if place.spec.image else set())
        await out(fresh, 'echo kept > here; echo kept > "$HOME/there"')
        assert await out(fresh, 'cat here "$HOME/there"') == "kept\nkept\n"


async def test_argv_is_passed_as_it_is(runtime: Runtime) -> None:
    words = ["-n", "a b", "ü\n'\"$HOME`", "", "--", "*", "\\"]
    done = await python(runtime, "import sys; print(ascii(sys.argv[1:]))", *words)
    assert done.stdout.decode() == f"{words!a}\n"


async def test_stdout_stderr_stdin_and_the_exit_code_are_the_commands_own(runtime: Runtime) -> None:
    done = await shell(runtime, "cat; echo err >&2; exit 3", stdin=b"\0in\xff\n")
    assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (3, b"\0in\xff\n", b"err\n", False)


async def test_no_exit_code_is_taken_for_something_else(runtime: Runtime) -> None:
    """Engines, shells and supervisors have codes of their own for what went wrong with them."""
    for code in (0, 1, 125, 126, 127, 137, 255):
        done = await shell(runtime, f"echo Error: of the command >&2; exit {code}")
        assert (done.exit_code, done.stderr) == (code, b"Error: of the command\n")


async def test_a_signal_counts_as_a_shell_counts_it(runtime: Runtime) -> None:
    assert (await shell(runtime, "kill -11 $$")).exit_code == 139


async def test_a_command_that_is_not_there_or_cannot_be_started_has_the_exit_code_of_a_shell(runtime: Runtime) -> None:
    await runtime.upload("text", b"no program", mode=0o644)
    missing = await runtime.exec(["no-such-command"], timeout_seconds=SECONDS)
    assert missing.exit_code == 127
    assert b"no-such-command" in missing.stderr
    assert (await runtime.exec(["./text"], timeout_seconds=SECONDS)).exit_code == 126
    assert (await runtime.exec(["echo", "a\0b"], timeout_seconds=SECONDS)).exit_code == 126
    assert (await runtime.exec(["echo", "x" * (1 << 22)], timeout_seconds=SECONDS)).exit_code == 126
    assert (await runtime.exec(["true"], workdir="no/such/folder", timeout_seconds=SECONDS)).exit_code == 126


@pytest.mark.parametrize("kind", but("bwrap", "unconfined"))
async def test_a_variable_that_no_shell_can_set_keeps_a_command_from_being_started(runtime: Runtime) -> None:
    done = await shell(runtime, "echo ran", env={"a-b": "c"})
    assert (done.exit_code, done.stdout) == (126, b"")
    assert b"'a-b' is not a variable name that a shell can set" in done.stderr


async def test_variables_reach_the_command_whole_and_those_of_the_node_do_not(
    place: Place, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node had these variables when the runtime was started, too."""
    of_the_node(monkeypatch)
    given = {"ONE": "a\nb 'c' \"d\" $HOME \\", "TWO": "", "THREE": "ü=#"}
    done = await python(runtime, "import os; print(ascii(dict(os.environ)))", env=given)
    seen = eval(done.stdout)
    assert {name: seen[name] for name in given} == given
    assert "secret-of-the-node" not in done.stdout.decode()
    # That of an image, with what apptainer adds to it.
    of_image = {"LD_LIBRARY_PATH"} if place.spec.kind == "apptainer" else set()
    assert set(seen) - set(given) - of_image <= {
        "HOME",
        "LANG",
        "LC_CTYPE",
        "PATH",
        "PWD",
        "OLDPWD",
        "TMPDIR",
        "HOSTNAME",
        "TERM",
        "container",
        "VERBATIM_EXEC",
    }
    assert (seen["HOME"], seen["PWD"]) == (runtime.home, runtime.workdir)


async def test_a_variable_is_not_to_be_seen_by_other_users_of_the_machine(runtime: Runtime, tmp_path: Path) -> None:
    logs = Logs(tmp_path / "out", tmp_path / "err")
    running = asyncio.ensure_future(shell(runtime, "echo $SECRET; sleep 600", env={"SECRET": "the-secret-value"}, logs=logs))
    await until(lambda: logs.stdout.exists() and bool(logs.stdout.read_bytes()), "the command has started")
    assert not [pid for pid in processes.list_pids() if b"the-secret-value" in command_line(pid)]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_paths_may_hold_anything(runtime: Runtime) -> None:
    for path in ("-rf", "a b/ü'\"$(id)", "*", f"{runtime.home}/.config/x\ny"):
        await runtime.upload(path, path.encode())
        assert (await runtime.exec(["cat", "--", path], timeout_seconds=SECONDS)).stdout == path.encode()
    downloaded = await runtime.download(["-rf", "a b", "*", "not there", f"{runtime.workdir}/-rf"], bound_bytes=1 << 20)
    assert {"-rf", "a b/ü'\"$(id)", "*"} == set(texts(downloaded))


async def test_an_upload_has_its_mode_and_replaces_what_was_there(runtime: Runtime) -> None:
    await runtime.upload("tool", b"#!/bin/sh\necho one\n", mode=0o555)
    await runtime.upload("tool", b"#!/bin/sh\necho two\n", mode=0o700)
    assert await out(runtime, "./tool; stat -c %a tool") == "two\n700\n"
    with pytest.raises(RuntimeFailed, match="/proc/version"):
        await runtime.upload("/proc/version", b"")


async def test_what_is_downloaded_unpacks_elsewhere_as_it_was(runtime: Runtime, other: Runtime) -> None:
    await out(await emptied(runtime), "mkdir -p a/b; echo text > a/b/c; ln -s b/c a/link; chmod 750 a/b; touch .hidden")
    whole = await runtime.download(["."], bound_bytes=1 << 20)
    outside = await runtime.download([f"{runtime.home}/../..{runtime.workdir}/a", "/etc/hosts"], bound_bytes=1 << 20)
    assert "etc/hosts" in texts(outside)
    await (await emptied(other)).unpack(".", whole)
    assert await out(other, "cat a/link; stat -c %a a/b; ls -A") == "text\n750\n.hidden\na\n"


async def test_a_download_of_nothing_is_an_archive_of_nothing_and_one_too_great_is_refused(runtime: Runtime) -> None:
    assert texts(await (await emptied(runtime)).download(["nothing"], bound_bytes=1 << 20)) == {}
    await out(runtime, "head -c 1000000 /dev/urandom > great")
    with pytest.raises(RuntimeFailed, match="exceeds 100000 bytes"):
        await runtime.download(["great"], bound_bytes=100_000)
    assert await out(runtime, "ls") == "great\n"


async def test_an_archive_that_leads_out_is_refused(runtime: Runtime) -> None:
    await emptied(runtime)
    for name in ("../out", "/out", "a/../../out"):
        with pytest.raises(RuntimeFailed, match="leads out"):
            await runtime.unpack("in", archive(**{"first": "x", name: "out"}))
    for data in (
        entries(("link", tarfile.SYMTYPE, "../../.."), ("link/file", tarfile.REGTYPE, "")),
        entries(("a", tarfile.SYMTYPE, "/"), ("b/c", tarfile.SYMTYPE, "../a/tmp"), ("b/c/file", tarfile.REGTYPE, "")),
        entries(("a", tarfile.SYMTYPE, "/etc"), ("b", tarfile.LNKTYPE, "a/hosts")),
        entries(("a", tarfile.LNKTYPE, "../../etc/hosts")),
        entries(("null", tarfile.CHRTYPE, "")),
        b"no archive",
        b"",
        archive(a="text")[:-20],
    ):
        with pytest.raises(RuntimeFailed, match="archive"):
            await runtime.unpack("in", data)
    assert await out(runtime, "ls -A") == ""


async def test_what_an_agent_leaves_reaches_another_runtime_whatever_it_is(runtime: Runtime, other: Runtime) -> None:
    """Environments of Python are full of links to the system's programs, and tests leave files that nobody may read."""
    links = "ln -s /etc/hosts absolute; ln -s ../../.. up; mkfifo pipe"
    left = f"{links}; mkdir -p shut/in; echo text > shut/in/file; chmod 0 shut/in/* shut/in shut"
    await out(await emptied(runtime), left)
    await (await emptied(other)).unpack(".", await runtime.download(["."], bound_bytes=1 << 20))
    assert await out(other, "readlink absolute up; test -p pipe; cat shut/in/file") == "/etc/hosts\n../../..\ntext\n"


async def test_a_great_output_is_bounded_in_memory_and_in_the_logs(runtime: Runtime, tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs" / "out", tmp_path / "logs" / "err", bound_bytes=1 << 20)
    program = (
        "import sys; [sys.stdout.write('x' * (1 << 20)) for _ in range(8)]; print('the end'); print('err', file=sys.stderr)"
    )
    done = await python(runtime, program, logs=logs)
    assert (done.exit_code, len(done.stdout), done.stdout[-8:]) == (0, KEPT_BYTES, b"the end\n")
    logged = logs.stdout.read_bytes()
    assert logged[: 1 << 20] == b"x" * (1 << 20)
    assert logged[1 << 20 :] == b"\n[%d more bytes are not in this log]\n" % (7 * (1 << 20) + 8)
    assert logs.stderr.read_bytes() == b"err\n"


async def test_a_log_is_written_while_the_command_runs_and_the_next_one_goes_on_in_it(runtime: Runtime, tmp_path: Path) -> None:
    logs = Logs(tmp_path / "out", tmp_path / "err")
    line = "echo one; until [ -e written ]; do sleep 0.1; done"
    running = asyncio.ensure_future(shell(runtime, line, logs=logs))
    await until(lambda: logs.stdout.exists() and logs.stdout.read_bytes() == b"one\n", "the log is written")
    await runtime.upload("written", b"")
    assert (await running).exit_code == 0
    await shell(runtime, "echo two", logs=logs)
    assert logs.stdout.read_bytes() == b"one\ntwo\n"


async def test_a_log_that_cannot_be_written_ends_the_command(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="/dev/full"):
        await shell(runtime, "echo one; sleep 600", logs=Logs(Path("/dev/full"), tmp_path / "err"))


async def test_a_command_whose_time_is_up_is_told_and_all_it_started_is_ended(runtime: Runtime, word: str) -> None:
    # One that starts only as its time runs out may not get to say so, or may miss SIGTERM and be killed at the end of the grace time.
    told = (True, 143, b"started\n")
    done = await in_time(
        lambda seconds: python(runtime, DETACHED, word, "600", timeout_seconds=seconds),
        lambda done: (done.timed_out, done.exit_code, done.stdout) == told,
    )
    assert (done.timed_out, done.exit_code, done.stdout) == told
    await until(lambda: not running_with(word), "the detached process has ended")


async def test_a_command_that_does_not_mind_being_told_is_killed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_grace_seconds", 0.1)
    done = await in_time(lambda seconds: shell(runtime, DEAF, timeout_seconds=seconds), lambda done: done.stdout)
    assert (done.timed_out, done.exit_code, done.stdout) == (True, 137, b"started\n")


@pytest.mark.cell("L3", "N3", "D3", "A3", "K3")
async def test_what_a_command_left_running_ends_with_it(runtime: Runtime, word: str) -> None:
    """Also where it holds the command's output, for which one would wait for ever."""
    done = await python(runtime, DETACHED, word, "0")
    assert (done.exit_code, done.stdout) == (0, b"started\n")
    await until(lambda: not running_with(word), "the detached process has ended")


async def test_a_cancelled_caller_ends_the_command(runtime: Runtime, word: str, tmp_path: Path) -> None:
    logs = Logs(tmp_path / "out", tmp_path / "err")
    running = asyncio.ensure_future(python(runtime, DETACHED, word, "600", logs=logs))
    await until(lambda: logs.stdout.exists() and bool(logs.stdout.read_bytes()), "the command has started")
    assert running_with(word)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not running_with(word), "the command has ended")
    assert await out(runtime, "echo alive") == "alive\n"


async def test_many_commands_run_beside_each_other(runtime: Runtime) -> None:
    """Each waits until all have begun."""

    async def beside(number: int) -> Executed:
        line = f"cat; : > begun-{number}; until [ $(ls | grep -c begun-) = 8 ]; do sleep 0.1; done; echo {number} >&2; exit {number}"
        return await shell(runtime, line, stdin=b"%d" % number)

    for number, done in enumerate(await asyncio.gather(*map(beside, range(8)))):
        assert (done.exit_code, done.stdout, done.stderr) == (number, b"%d" % number, b"%d\n" % number)


async def test_a_command_that_ends_leaves_the_others_alone(runtime: Runtime, tmp_path: Path) -> None:
    logs = Logs(tmp_path / "out", tmp_path / "err")
    line = "echo one; until [ -e ended ]; do sleep 0.1; done; echo two"
    running = asyncio.ensure_future(shell(runtime, line, logs=logs))
    await until(lambda: running.done() or (logs.stdout.exists() and bool(logs.stdout.read_bytes())), "it has started")
    assert not running.done(), running.result()
    await shell(runtime, "sleep 600 & true")
    await runtime.upload("ended", b"")
    assert (await running).stdout == b"one\ntwo\n"


@pytest.mark.cell("L5", "N5", "D5", "A5", "K5")
async def test_a_command_that_takes_too_much_memory_ends_with_137(runtime: Runtime) -> None:
    done = await python(runtime, "import time; x = bytearray(1 << 29); x[::4096] = b'x' * len(x[::4096]); time.sleep(600)")
    assert (done.exit_code, done.timed_out) == (137, False)
    assert await out(runtime, "echo alive") == "alive\n"


@pytest.mark.cell("L2", "D2", "A2")
@closed
async def test_the_proxy_is_reached_and_nothing_else(runtime: Runtime, proxy: ProxyAddress) -> None:
    url = runtime.map_url(f"http://{proxy.host}:{proxy.port}/s/x/v1?a=b")
    assert url.endswith("/s/x/v1?a=b")
    inside = urlsplit(url).netloc
    async with answering(b"outside") as beside:
        refused = [f"127.0.0.1:{port}" for port in (beside.port, proxy.port)]
        asked = [word for address in (inside, *refused, "192.0.2.1:80") for word in (address, "/")]
        told = (await python(runtime, FETCH, *asked)).stdout.decode().splitlines()
    assert told == [ANSWER.decode(), "Connection refused", "Connection refused", "Network is unreachable"]
    assert (await python(runtime, FETCH, inside, "/", workdir="/")).stdout == ANSWER + b"\n"


@opening
async def test_a_step_may_have_the_whole_network(place: Place, runtime: Runtime) -> None:
    async with answering(b"outside", host="0.0.0.0") as beside:
        asked = (f"{await node_seen_from(place, runtime)}:{beside.port}", "/")
        assert (await python(runtime, FETCH, *asked, network="full")).stdout == b"outside\n"
        assert (await python(runtime, FETCH, *asked)).stdout in (b"Connection refused\n", b"Network is unreachable\n")


@pytest.mark.cell("L2", "N2")
async def test_with_the_whole_network_the_proxy_is_reached_and_what_is_outside(place: Place, proxy: ProxyAddress) -> None:
    async with place.started(proxy, network="full") as whole, answering(b"outside", host="0.0.0.0") as beside:
        inside = urlsplit(whole.map_url(f"http://{proxy.host}:{proxy.port}/")).netloc
        asked = (inside, "/", f"{await node_seen_from(place, whole)}:{beside.port}", "/")
        assert (await python(whole, FETCH, *asked)).stdout == ANSWER + b"\noutside\n"


async def node_seen_from(place: Place, runtime: Runtime) -> str:
    """The node's address in the whole network: of a network of the engine's own it is the gateway."""
    if place.spec.kind != "docker":
        return "127.0.0.1"
    code = "print(open('/proc/net/route').read().splitlines()[1].split()[2])"
    gateway = (await python(runtime, code, network="full")).stdout.decode()
    return ".".join(str(each) for each in reversed(bytes.fromhex(gateway)))


@closed
async def test_a_proxy_with_tls_keeps_its_name(place: Place, other: Runtime) -> None:
    """Its certificate is for that name."""
    url = other.map_url(f"https://{NAMED.host}/s/x")
    assert url.startswith(f"https://{NAMED.host}:")
    program = f"import socket; print(socket.gethostbyname('{NAMED.host}'))"
    assert (await python(other, program)).stdout == b"127.0.0.1\n"
    by_address = place.runtime(ProxyAddress("192.0.2.1", 443))
    with pytest.raises(RuntimeFailed, match="host name"):
        by_address.map_url("https://192.0.2.1/")


@closed
async def test_many_connections_reach_the_proxy_at_once(runtime: Runtime, proxy: ProxyAddress) -> None:
    program = (
        "import io, sys, threading\n"
        "argv = sys.argv; fetch = argv.pop(1); sys.stdout = told = io.StringIO()\n"
        "threads = [threading.Thread(target=exec, args=(fetch, {})) for _ in range(40)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]; sys.__stdout__.write(str(told.getvalue().count('y')))"
    )
    url = runtime.map_url(f"http://{proxy.host}:{proxy.port}/")
    done = await python(runtime, program, FETCH, urlsplit(url).netloc, "/great")
    assert done.stdout == b"%d" % (40 * len(GREAT))


WAY_OUT = """
import ctypes, json, os, socket, stat, sys
libc, CALLS = ctypes.CDLL(None), json.loads(sys.argv[1])
NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
MODES = (0o6755, 0o4755, 0o2755, 0o104711)
CREATE, TEMPORARY, HERE = os.O_CREAT | os.O_WRONLY, os.O_TMPFILE | os.O_WRONLY, -100
def call(name, *arguments):
    # A filter may look at the low half of an argument, the kernel ignores the other.
    arguments = [each if isinstance(each, bytes) else ctypes.c_long(each) for each in arguments]
    return name in CALLS and libc.syscall(CALLS[name], *arguments) >= 0
def fork(flags):
    pid = libc.syscall(CALLS["clone"], ctypes.c_long(flags | 17), *map(ctypes.c_long, (0, 0, 0, 0)))
    if pid == 0: os._exit(0)
    if pid > 0: os.waitpid(pid, 0)
    return pid > 0
def opens(family, kind, protocol):
    try: socket.socket(family, kind, protocol).close()
    except OSError: return False
    return True
found = [f"unshare {flag:x}" for flag in NAMESPACES if call("unshare", flag) or call("unshare", flag | 0x10000000)]
found += [f"clone {flag:x}" for flag in NAMESPACES if fork(flag) or fork(flag | 0x10000000)]
def fork3(flags):
    asked = (ctypes.c_uint64 * 11)(flags, 0, 0, 0, 17)
    pid = libc.syscall(CALLS["clone3"], asked, ctypes.c_long(88))
    if pid == 0: os._exit(0)
    if pid > 0: os.waitpid(pid, 0)
    return pid > 0
found += [f"clone3 {flag:x}" for flag in NAMESPACES if fork3(flag) or fork3(flag | 0x10000000)]
found += [name for name in ("mount", "fsopen", "open_tree", "setns", "chroot", "bpf", "keyctl", "io_uring_setup", "userfaultfd")
          if call(name, b"tmpfs", b"/tmp", b"tmpfs", 0, 0)]
found += [f"family {each}" for each in range(50) if each not in (1, 2, 10, 16) and any(opens(each, kind, 0) for kind in (1, 2, 3, 5))]
found += [f"netlink {each}" for each in range(1, 32) if opens(socket.AF_NETLINK, socket.SOCK_RAW, each)]
number = 0
for mode in MODES:
    for high in (0, 1 << 32):
        for name, words in (("creat", (mode,)), ("open", (CREATE, mode)), ("mknod", (stat.S_IFREG | mode, 0)), ("chmod", (mode,)),
                            ("openat", (CREATE, mode)), ("mknodat", (stat.S_IFREG | mode, 0)), ("fchmodat", (mode,)),
                            ("fchmodat2", (mode, 0)), ("openat", (TEMPORARY, mode)), ("fchmod", (mode,))):
            number += 1
            path = f"file-{number}".encode()
            if "chmod" in name: os.close(os.open(path, CREATE, 0o600))
            words = [each | high for each in words]
            if name == "fchmod":
                descriptor = os.open(path, os.O_WRONLY)
                call(name, descriptor, *words)
            elif words[0] & 0xffffffff == TEMPORARY:
                if name in CALLS and (descriptor := libc.syscall(CALLS[name], ctypes.c_long(HERE), b".", *map(ctypes.c_long, words))) >= 0:
                    os.link(f"/proc/self/fd/{descriptor}", path, follow_symlinks=True)
            else:
                call(name, *([HERE, path] if name.endswith(("at", "at2")) else [path]), *words)
    how = (ctypes.c_uint64 * 3)(CREATE, mode & 0o7777, 0)
    libc.syscall(CALLS["openat2"], ctypes.c_long(HERE), b"by-openat2-%o" % mode, how, ctypes.c_long(24))
    os.mkdir(f"folder-{mode:o}", mode)
found += [f"{each.name} {each.stat().st_mode:o}" for each in os.scandir(".") if each.stat().st_mode & 0o6000]
os.mkdir("sticky", 0o777), os.chmod("sticky", 0o1777)
assert stat.S_IMODE(os.stat("sticky").st_mode) == 0o1777
assert stat.S_IMODE(os.stat(os.open("plain", CREATE, 0o755)).st_mode) and socket.if_nameindex() and opens(16, 3, 0)
first = [line for line in open("/proc/1/status") if line.startswith("Seccomp:")]
print(found, first[0].split()[1])
"""


@pytest.mark.cell("L4", "D4", "A4", "K4")
@pytest.mark.parametrize("network", [None, "full"])
@pytest.mark.parametrize("kind", but("unconfined"))
async def test_an_agent_that_wants_out_finds_no_call_that_helps(
    kind: str, network: Any, started: Callable[[str], Awaitable[Started]]
) -> None:
    """Under podman it unshared a user namespace and was root in it: it mounted, and had packet sockets. And a file that a sandbox of root
    made set-user-id was one of the machine's root."""
    if network == "full" and kind in OF_ONE_NETWORK:
        network = None
    machine = seccomp.find_machine()
    runtime = (await started(kind)).runtime
    done = await python(await emptied(runtime), WAY_OUT, json.dumps(dict(machine.calls)), network=network)
    assert (done.exit_code, done.stdout) == (0, b"[] 2\n"), done


@pytest.mark.cell("N3")
async def test_stop_ends_everything_and_may_be_called_again(place: Place, word: str) -> None:
    place = apart(place)
    runtime = place.runtime(NOWHERE)
    await runtime.stop()
    await runtime.start()
    running = asyncio.ensure_future(python(runtime, DETACHED, word, "600"))
    await until(lambda: detached(word), "the command has started")
    await runtime.stop()
    await runtime.stop()
    assert not running_with(word)
    await asyncio.wait({running})
    assert await place.kind.sweep(place.names) == 0


async def test_what_a_killed_node_left_is_swept(place: Place, word: str) -> None:
    """Another process starts a runtime and a command in it, and is killed."""
    place = apart(place)
    owner = os.fork()
    if owner == 0:
        try:
            asyncio.run(_worked(place, word))
        finally:
            os._exit(1)
    await until(lambda: detached(word), "the command has started")
    os.kill(owner, 9)
    await asyncio.to_thread(os.waitpid, owner, 0)
    assert await place.kind.sweep("t-of-nobody") == 0
    assert await place.kind.sweep(place.names) == 1
    await until(lambda: not running_with(word), "the command has ended")
    assert await place.kind.sweep(place.names) == 0


async def _worked(place: Place, word: str) -> None:
    runtime = place.runtime(NOWHERE)
    await runtime.start()
    await python(runtime, DETACHED, word, "600", timeout_seconds=600)


@pytest.mark.case(67)
async def test_folders_nested_deeper_than_a_path_is_long_go_with_their_runtime(place: Place) -> None:
    """Their removal broke on Python's limit of recursion, at the end of the rollout and at every later start of the node. They are as
    many here as break on that, on the length of a path and on the number of open descriptors."""
    place = apart(place)
    runtime = place.runtime(NOWHERE)
    await runtime.start()
    done = await python(runtime, "import os\nfor _ in range(1100): os.mkdir('nested'), os.chdir('nested')")
    assert done.exit_code == 0, done
    assert await place.kind.sweep(place.names) == 1
    assert await place.kind.sweep(place.names) == 0
    await runtime.stop()


async def test_a_name_is_used_by_one_runtime(place: Place, runtime: Runtime) -> None:
    await runtime.upload("file", b"of the first")
    twin = place.kind.make(place.spec, _name(runtime), NOWHERE)
    with pytest.raises(RuntimeFailed):
        await twin.start()
    assert await out(runtime, "cat file") == "of the first"


def _name(runtime: Runtime) -> str:
    return str(runtime.name)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cpus": 0}, "cpus"),
        ({"cpus": float("nan")}, "cpus"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"disk_mb": 0}, "disk_mb"),
        ({"network": "half"}, "choose proxy or full"),
        ({"workdir": "relative"}, "absolute"),
        ({"workdir": "/a/../b"}, "absolute"),
        ({"workdir": "/"}, "absolute"),
        ({"options": {"colour": "red"}}, "'colour'"),
    ],
)
async def test_a_spec_that_cannot_be_is_refused(place: Place, changes: dict[str, object], told: str) -> None:
    with pytest.raises(BadRuntime, match=told):
        place.kind.check(replace(place.spec, **changes))  # type: ignore[arg-type]


async def test_this_machine_has_what_it_takes_and_the_spec_of_the_contract_is_taken(place: Place) -> None:
    """Where `place` could be had."""
    place.kind.check(place.spec)
    assert await place.kind.probe() is None


# The disk


MANY_FILES = """
import os, time
print("begun", flush=True)
for number in range(1500):
    os.mkdir("d")
    os.chdir("d")
for number in range(4):
    with open(str(number), "wb") as file:
        file.write(os.urandom(900_000))
time.sleep(600)
"""
"""More than 3 MB together, none of them more than 1 MiB, where no path is short enough to lead."""


@pytest.mark.cell("L6", "D6", "A6")
@pytest.mark.parametrize("kind", but("kubernetes"))
async def test_files_that_are_too_large_together_end_their_command(
    started: Callable[[str], Awaitable[Started]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is run afterwards, until the runtime is stopped. (The cluster limits pods.)"""
    monkeypatch.setattr("rollout.runtimes.disk.WATCH_SECONDS", 0.1)
    place = (await started(kind)).place
    async with place.started(disk_mb=2) as runtime:
        done = await python(runtime, MANY_FILES, workdir=runtime.home if kind == "unconfined" else "/tmp")
        assert (done.exit_code, done.timed_out) == (153, False), done
        assert done.stdout == b"begun\n" and b"more than the 2 MiB" in done.stderr
        assert (await shell(runtime, "sleep 600")).exit_code == 153
