"""`verbatim run` and `verbatim env` against a served proxy and a scripted engine, each as a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.sessions import count_roles
from proxy.errors import Backpressure
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import ADMIN, COMMAND, Serving, environment, runs, verbatim, wait_until

PYTHON = ("--harness", "shell", "--", sys.executable, "-c")
ASK = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hello"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
print("the model said:", answer["choices"][0]["message"]["content"])
"""
ASK_ANTHROPIC = """
import anthropic, os
asked = [{"role": "user", "content": "hello"}]
keys = {"api_key": os.environ.get("ANTHROPIC_API_KEY"), "auth_token": os.environ.get("ANTHROPIC_AUTH_TOKEN")}
client = anthropic.Anthropic(max_retries=0, **keys)
answer = client.messages.create(model=os.environ["ANTHROPIC_MODEL"], max_tokens=50, messages=asked)
print(answer.content[0].text)
"""
WAIT = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(60)"
NOTED = "import pathlib, signal; [signal.signal(n, lambda *_: pathlib.Path('told').touch()) for n in (2, 15)]; "
STUBBORN = NOTED + WAIT
PATIENT = """
from rollout.harnesses.process import HarnessProcess
HarnessProcess.__init__.__kwdefaults__["grace_seconds"] = 3600
from cli.main import main
main()
"""
"""The command with a grace time of an hour: only a second signal can kill a harness that ignores the first."""
WITH_A_CHILD = f"""
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
pathlib.Path("child").write_text(str(child.pid))
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def service(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving("--engine", engine.url, data_dir=tmp_path_factory.mktemp("data") / "redis") as serving:
        wait_until(lambda: serving.request("GET", "/readyz").status_code == 200, 120, "ready")
        yield serving


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own, and its temporary homes are made beside it."""
    work = tmp_path / "work"
    (tmp_path / "tmp").mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return work


def access(service: Serving | RunningService) -> dict[str, Any]:
    return {"VERBATIM_URL": service.url, "VERBATIM_ADMIN_TOKEN": ADMIN}


def run(service: Serving | RunningService, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    done = verbatim("run", *args, **{**access(service), **variables})
    assert "Traceback" not in done.stderr, done.stderr
    return done


def session_of(service: Serving | RunningService, stderr: str) -> dict[str, Any]:
    """The session that the command's output names."""
    found = re.search(r"session (\w+)", stderr)
    assert found, stderr
    answer: dict[str, Any] = service.request("GET", f"/sessions/{found[1]}").json()
    return answer


def homes_left(scratch: Path) -> list[Path]:
    return list((scratch.parent / "tmp").iterdir())


class Running:
    """`verbatim run` in the background, to be told things while its harness works; ends what is left of it."""

    def __init__(self, service: Serving, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PATIENT, "run", *args],
            env=environment(**access(service)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        try:
            wait_until(lambda: Path("started").exists() or self.process.poll() is not None, 60, "the harness has started")
            assert self.process.poll() is None, self.process.communicate()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.terminate()
            self.process.communicate(timeout=60)

    def told(self, *numbers: int) -> tuple[int, str]:
        """(exit code, stderr) after these signals, each sent when the harness has noted the one before."""
        for place, number in enumerate(numbers):
            if place:
                wait_until(Path("told").exists, 60, "the harness has noted the signal")
            self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=60)
        assert "Traceback" not in stderr
        return self.process.returncode, stderr


def test_a_harness_that_does_its_task_completes_the_session(service: Serving, engine: ScriptedEngine, scratch: Path) -> None:
    engine.reset().say("good morning")
    done = run(service, *PYTHON, ASK)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the model said: good morning\n"
    session = session_of(service, done.stderr)
    assert (session["status"], session["calls"], session["error"]) == ("completed", 1, None)
    assert session["metadata"] == {"harness": "shell"}
    sampled = len(engine.last.sampled[0])
    assert f"1 calls, {sampled} tokens sampled = {sampled} exported in 1 trajectories + 0 quarantined" in done.stderr
    assert f"verbatim audit {session['session_id']}" in done.stderr
    assert f"{service.url}/sessions/{session['session_id']}/trajectories" in done.stderr
    assert homes_left(scratch) == []


def test_what_is_said_after_a_harness_that_ends_in_mid_line_begins_a_line(service: Serving) -> None:
    """The last thing an agent prints, such as what curl got, often has no line end."""
    command = (*COMMAND, "run", "--harness", "shell", "--", sys.executable, "-c", f"{ASK}print('the end', end='')")
    variables = environment(VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN)
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert "the end\nverbatim: session " in done.stdout


def test_the_session_gets_the_names_and_the_reward_that_were_given(service: Serving) -> None:
    names = ("--session-id", "named", "--task-id", "t1", "--group-id", "g1", "--group-size", "2", "--reward", "0.5")
    done = run(service, *names, *PYTHON, ASK)
    assert done.returncode == 0, done.stderr
    session = service.request("GET", "/sessions/named").json()
    shown = [session[key] for key in ("status", "task_id", "group_id", "group_size", "reward")]
    assert shown == ["completed", "t1", "g1", 2, 0.5]
    assert "no trainer gets it" not in done.stderr


def test_a_harness_that_never_called_the_model_has_not_completed_anything(service: Serving) -> None:
    """Anthropic's SDK refused its two keys, the script passed over that, and a reward for nothing went to the trainer."""
    done = run(service, "--reward", "1", *PYTHON, "print('done')")
    assert (done.returncode, done.stdout) == (0, "done\n")
    session = session_of(service, done.stderr)
    assert (session["status"], session["calls"], session["reward"]) == ("failed", 0, None)
    assert session["error"].startswith("no_calls: shell ended with exit code 0 and never called the model")
    assert "verbatim: warning: no_calls: shell ended" in done.stderr
    assert f"verbatim: session {session['session_id']} no_calls: 0 calls" in done.stderr


def test_anthropics_sdk_works_with_the_variables_that_any_command_gets(service: Serving, engine: ScriptedEngine) -> None:
    """It takes one key, and refuses two that a program hands it."""
    engine.reset().say("good morning")
    done = run(service, *PYTHON, ASK_ANTHROPIC)
    assert (done.returncode, done.stdout) == (0, "good morning\n"), done.stderr
    assert session_of(service, done.stderr)["calls"] == 1


def test_an_exit_code_of_the_harness_is_the_commands_and_fails_the_session(service: Serving) -> None:
    done = run(service, "--reward", "1", *PYTHON, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert "err\n" in done.stderr and "verbatim: shell ended with exit code 3" in done.stderr
    session = session_of(service, done.stderr)
    assert (session["status"], session["error"], session["reward"]) == ("failed", "shell ended with exit code 3", None)


def child_has_ended() -> None:
    """A process that was killed is gone when it next has a CPU."""
    child = int(Path("child").read_text())
    wait_until(lambda: not runs(child), 120, "the child has ended")


def test_a_harness_that_takes_too_long_is_stopped_with_all_it_started(service: Serving, scratch: Path) -> None:
    for seconds in ("0.5", "2", "10", "50"):
        done = run(service, "--timeout", seconds, *PYTHON, WITH_A_CHILD + "child.wait()")
        # On a slow machine it had not begun by then.
        if Path("child").exists():
            break
    assert done.returncode == 124
    session = session_of(service, done.stderr)
    assert (session["status"], session["error"]) == ("timeout", f"shell was stopped after {seconds} seconds")
    child_has_ended()
    assert homes_left(scratch) == []


def test_a_helper_that_a_harness_detached_is_ended_with_it(service: Serving) -> None:
    """The old bug: it had a session of its own, and only the harness's process group was killed."""
    done = run(service, *PYTHON, WITH_A_CHILD.replace("])\n", "], start_new_session=True)\n"))
    assert done.returncode == 0
    child_has_ended()


@pytest.fixture
def minding_signals() -> Iterator[None]:
    """The children of a test inherit signals that it ignores: hang-ups under nohup, Ctrl-C in a background job of a shell."""
    handlers: dict[int, Any] = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("minding_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stop_signal_is_passed_on_and_cancels_the_session(service: Serving, scratch: Path, number: int, code: int) -> None:
    minds = f"""
import pathlib, signal, sys, time
def told(number, frame):
    pathlib.Path("told").write_text(str(number))
    sys.exit(0)
signal.signal({int(number)}, told)
{WAIT}
"""
    with Running(service, *PYTHON, minds) as running:
        exit_code, stderr = running.told(number)
    assert exit_code == code
    assert Path("told").read_text() == str(int(number))
    session = session_of(service, stderr)
    assert (session["status"], session["error"]) == ("cancelled", f"shell was stopped by {signal.Signals(number).name}")
    assert homes_left(scratch) == []


@pytest.mark.usefixtures("minding_signals")
def test_a_second_ctrl_c_kills_a_harness_that_does_not_mind_the_first(service: Serving) -> None:
    with Running(service, *PYTHON, STUBBORN) as running:
        exit_code, stderr = running.told(signal.SIGINT, signal.SIGINT)
    assert exit_code == 130
    assert session_of(service, stderr)["status"] == "cancelled"


def write_definition(name: str, text: str) -> str:
    path = Path(f"{name}.toml").absolute()
    path.write_text(f'description = "a test\'s"\ndialect = "chat"\n{text}')
    return str(path)


def count_of_sessions(service: Serving) -> int:
    return len(service.request("GET", "/sessions?limit=1000").json()["sessions"])


def test_a_missing_executable_is_told_with_the_lines_that_install_it(service: Serving) -> None:
    before = count_of_sessions(service)
    path = write_definition("absent", 'argv = ["no-such-agent", "{prompt}"]\ninstall = ["npm install -g no-such-agent@1"]')
    done = run(service, "--harness", path, "--", "task")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == (
        "verbatim: absent is not installed: there is no executable 'no-such-agent' on PATH. Install it with\n"
        "  npm install -g no-such-agent@1\n"
    )
    assert run(service, "--harness", "shell", "--", "no-such-command").returncode == 127
    assert count_of_sessions(service) == before


def test_an_executable_that_only_a_running_session_could_name_fails_the_session(service: Serving) -> None:
    path = write_definition("late", 'argv = ["{home}/agent", "{prompt}"]\n[files]\n"agent" = "#!/bin/sh"')
    done = run(service, "--harness", path, "--", "task")
    assert done.returncode == 127
    session = session_of(service, done.stderr)
    assert session["status"] == "failed" and "there is no executable" in session["error"]


def test_an_executable_that_the_system_cannot_run_fails_the_session(service: Serving, scratch: Path) -> None:
    broken = scratch / "broken"
    broken.write_bytes(b"\x00\x01\x02")
    broken.chmod(0o755)
    done = run(service, "--harness", "shell", "--", "./broken")
    assert done.returncode == 126
    session = session_of(service, done.stderr)
    assert session["status"] == "failed" and "./broken could not be started" in session["error"]
    assert homes_left(scratch) == []


def test_an_engine_that_names_no_model_fails_the_session_unless_one_is_given(redis_url: str) -> None:
    with RunningService("http://127.0.0.1:9", redis_url) as service:
        done = run(service, *PYTHON, "pass")
        assert done.returncode == 1
        session = session_of(service, done.stderr)
        assert session["status"] == "failed" and "--model" in session["error"]
        given = run(service, "--model", "m7", *PYTHON, "import os; print(os.environ['OPENAI_MODEL'])")
        assert (given.returncode, given.stdout) == (0, "m7\n")


@pytest.mark.parametrize(
    ("reply", "code", "status"),
    [("All done.", 1, "completed"), ("All done.", 2, "failed"), (None, 1, "failed")],
    ids=["finished", "another code", "in the middle"],
)
def test_a_harness_that_ends_with_its_code_for_finished_work_has_completed_it(
    engine: ScriptedEngine, service: Serving, scratch: Path, reply: str | None, code: int, status: str
) -> None:
    """The reply that calls a tool does not end the work, whatever the exit code says."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    ask = {"model": "policy", "messages": [{"role": "user", "content": "q"}], "tools": [tool]}
    program = (
        "import os, sys, urllib.request as web; "
        "head = {'Authorization': 'Bearer ' + os.environ['KEY'], 'Content-Type': 'application/json'}; "
        f"web.urlopen(web.Request(os.environ['URL'] + '/chat/completions', {json.dumps(ask)!r}.encode(), head)).read(); "
        f"sys.exit({code})"
    )
    text = f"argv = {json.dumps([sys.executable, '-c', program])}\nfinished_exit_codes = [1]\n"
    write_definition("ends", text + '[env]\nURL = "{openai}"\nKEY = "{api_key}"')
    engine.say(engine.family.speak(reply) if reply else engine.family.speak(calls=[("look", {})]))
    done = run(service, "--harness", "ends", "--reward", "1", VERBATIM_HARNESSES=str(scratch))
    session = session_of(service, done.stderr)
    assert (done.returncode, session["status"]) == (code, status), done.stderr
    assert session["reward"] == (1.0 if status == "completed" else None)
    assert ("had finished its work" in done.stderr) == (status == "completed")


TELLS_LIMITS = """argv = ["sh", "-c", "echo $WINDOW $MAX_INPUT $MAX_OUTPUT"]
[env]
WINDOW = "{window}"
MAX_INPUT = "{max_input}"
MAX_OUTPUT = "{max_output}"
KEY = "{api_key}"
"""


@pytest.mark.parametrize("model", [(), ("--model", "policy"), ("--model", "org/any-name")], ids=["listed", "named", "other"])
def test_a_harness_is_told_the_engines_window(service: Serving, scratch: Path, model: tuple[str, ...]) -> None:
    write_definition("tells", TELLS_LIMITS)
    done = run(service, "--harness", "tells", *model, VERBATIM_HARNESSES=str(scratch))
    assert (done.returncode, done.stdout) == (0, "8192 6144 2048\n"), done.stderr
    assert "context window" not in done.stderr
    given = json.loads(verbatim("env", "--harness", "./tells.toml", "--json", *model, **access(service)).stdout)
    assert given["env"]["WINDOW"] == "8192"


@pytest.mark.parametrize("model", [(), ("--model", "policy")], ids=["listed", "named"])
def test_a_window_nobody_knows_is_left_out_and_reported_once(redis_url: str, scratch: Path, model: tuple[str, ...]) -> None:
    write_definition("tells", TELLS_LIMITS)
    with ScriptedEngine(names_window=False) as engine, RunningService(engine.url, redis_url, engine_api="token") as service:
        done = run(service, "--harness", "tells", *model, VERBATIM_HARNESSES=str(scratch))
        assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
        assert done.stderr.count("reports the context window") == 1 and "tells is not told it" in done.stderr
        assert "context window" not in run(service, *PYTHON, "pass").stderr, "it would not be told anyway"


def test_a_service_that_is_gone_at_the_end_is_told(tmp_path: Path, engine: ScriptedEngine) -> None:
    with Serving("--engine", engine.url, data_dir=tmp_path / "data") as service:
        done = run(service, "--model", "m", "--session-id", "lost", *PYTHON, f"import os; os.kill({service.pid}, 9)")
        assert done.returncode == 1
        assert "session lost could not be closed as completed: no service at" in done.stderr
        service.exit_code(within_seconds=60)


def refused(*args: str, code: int, **variables: Any) -> str:
    done = verbatim(*args, **variables)
    assert (done.returncode, done.stdout) == (code, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("verbatim: ")
    return line


@pytest.mark.parametrize("command", [("run", *PYTHON, "pass"), ("env", "--harness", "shell")])
def test_a_service_that_cannot_be_used_is_told_in_one_sentence(service: Serving, command: tuple[str, ...]) -> None:
    nowhere: dict[str, Any] = {"VERBATIM_URL": "http://127.0.0.1:9", "VERBATIM_ADMIN_TOKEN": "x"}
    assert "no service at http://127.0.0.1:9" in refused(*command, code=1, **nowhere)
    assert "token" in refused(*command, code=1, **{**access(service), "VERBATIM_ADMIN_TOKEN": "wrong"})
    assert "VERBATIM_ADMIN_TOKEN" in refused(*command, code=2, VERBATIM_URL=service.url)
    wrong = {**access(service), "VERBATIM_URL": "http://127.0.0.1:9"}
    assert verbatim(command[0], "--url", service.url, *command[1:], **wrong).returncode == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--harness", "codecs", "--", "x"), "there is no harness 'codecs'"),
        (("--harness", "codex"), "codex needs a prompt: put it after --"),
        (("--harness", "shell"), "shell needs a command"),
        (("--reward", "nan", "--harness", "shell", "--", "true"), "--reward"),
        (("--env", "NOT_SET_ANYWHERE", "--harness", "shell", "--", "true"), "'NOT_SET_ANYWHERE'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_session_is_opened(args: tuple[str, ...], says: str) -> None:
    assert says in refused("run", *args, code=2, VERBATIM_URL="http://127.0.0.1:9", VERBATIM_ADMIN_TOKEN="x")


def test_a_taken_session_id_starts_nothing(service: Serving) -> None:
    assert service.request("POST", "/sessions", json={"session_id": "taken"}).status_code == 201
    done = run(service, "--session-id", "taken", *PYTHON, "print('ran')")
    assert (done.returncode, done.stdout) == (1, "") and "taken" in done.stderr
    assert service.request("GET", "/sessions/taken").json()["status"] == "open"


SHOW = "import json, os, sys; print(json.dumps({'env': dict(os.environ), 'in': sys.stdin.read(), 'at': os.getcwd()}))"


@pytest.fixture(scope="module")
def narrow(engine: ScriptedEngine, redis_server: RedisServer) -> Iterator[RunningService]:
    """A service that takes no second group."""
    with RunningService(engine.url, redis_server.url, admission={"undelivered_groups": 1}) as service:
        yield service


@pytest.fixture
def full(narrow: RunningService, redis_url: str) -> RunningService:
    """With an empty store."""
    return narrow


@contextmanager
def held_back(service: RunningService) -> Iterator[subprocess.Popen[str]]:
    """`verbatim run` that has said that it waits, for as long as there is a session `first`."""
    assert service.request("POST", "/sessions", json={"session_id": "first"}).status_code == 201
    with ForkedVerbatim(
        ("run", "--session-id", "second", "--model", "m", *PYTHON, "print('did its task'); " + ASK.partition("print")[0]),
        env=environment(**access(service)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said = process.stderr.readline()
            assert said.startswith("verbatim: waiting until the service accepts a new session: 1 groups wait"), said
            yield process
        finally:
            process.kill()


def test_a_run_waits_while_the_service_takes_no_new_session(full: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backpressure, "retry_after_seconds", 1.0)
    with held_back(full) as process:
        assert full.request("DELETE", "/sessions/first").status_code == 204
        stdout, stderr = process.communicate(timeout=60)
        assert (process.returncode, stdout) == (0, "did its task\n"), stderr
        assert "waiting" not in stderr, "it is said once"
        assert full.request("GET", "/sessions/second").json()["status"] == "completed"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_waits_can_be_stopped(full: RunningService, number: int, code: int) -> None:
    with held_back(full) as process:
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
        assert (process.returncode, stdout) == (code, "")
        assert stderr == "verbatim: stopped while waiting: no session was opened\n"
        assert full.request("GET", "/sessions/second").status_code == 404


def test_a_harness_sees_the_session_and_a_new_home_and_no_key_of_the_caller(service: Serving, scratch: Path) -> None:
    theirs = {"OPENAI_ORG_ID": "o", "GOOGLE_CLOUD_PROJECT": "p", "HTTPS_PROXY": "http://127.0.0.1:9", "HF_TOKEN": "t"}
    done = run(service, "--env", "HF_TOKEN", "--env", "EXTRA=a=b", *PYTHON, SHOW, **theirs, ANTHROPIC_API_KEY="k", KEPT="yes")
    seen = json.loads(done.stdout)
    env, session = seen["env"], session_of(service, done.stderr)["session_id"]
    root = f"{service.url}/s/{session}"
    assert [env[name] for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL")] == [
        f"{root}/v1",
        root,
        root,
    ]
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == env["GEMINI_API_KEY"] != "k"
    assert env["OPENAI_MODEL"] == env["ANTHROPIC_MODEL"] == env["GEMINI_MODEL"] == "policy"
    assert not {"OPENAI_ORG_ID", "GOOGLE_CLOUD_PROJECT", "HTTPS_PROXY"} & set(env)
    assert [name for name in env if name.startswith("VERBATIM_")] == []
    assert (env["KEPT"], env["EXTRA"], env["HF_TOKEN"], env["PATH"]) == ("yes", "a=b", "t", os.environ["PATH"])
    assert env["HOME"].startswith(str(scratch.parent / "tmp")) and env["TMPDIR"] == env["HOME"] + "/tmp"
    assert seen["at"] == str(scratch)


def test_standard_input_reaches_a_command_and_no_agent(service: Serving) -> None:
    program = "import sys; print(repr(sys.stdin.read()))  # {prompt}"
    path = write_definition("agent", f"argv = {json.dumps([sys.executable, '-c', program])}")
    for harness, words, seen in (("shell", [sys.executable, "-c", program], "'typed'\n"), (path, ["x"], "''\n")):
        with ForkedVerbatim(
            ("run", "--harness", harness, "--", *words),
            env=environment(**access(service)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as done:
            stdout, stderr = done.communicate("typed", timeout=60)
        assert stdout == seen, stderr


def test_a_definition_of_the_user_is_run_with_its_files_and_the_prompt_word_for_word(service: Serving, scratch: Path) -> None:
    program = "import sys, pathlib; print(sys.argv[1]); print(pathlib.Path.home().joinpath('.agent/config.json').read_text())"
    text = f"argv = {json.dumps([sys.executable, '-c', program, '{prompt}'])}\n"
    write_definition("mine", text + '[files]\n".agent/config.json" = \'{"url": "{openai}", "task": "{prompt}"}\'')
    done = run(service, "--harness", "mine", "--keep-home", "--", '--say "hi"', "{model}", VERBATIM_HARNESSES=str(scratch))
    assert done.returncode == 0, done.stderr
    said, config = done.stdout.splitlines()
    assert said == '--say "hi" {model}'
    session = session_of(service, done.stderr)["session_id"]
    assert json.loads(config) == {"url": f"{service.url}/s/{session}/v1", "task": said}
    (home,) = homes_left(scratch)
    assert f"the harness's home is {home}" in done.stderr and (home / ".agent/config.json").is_file()


def test_the_roles_of_a_definition_go_with_its_session(service: Serving, scratch: Path) -> None:
    program = (
        "import json, os, urllib.request as web; "
        "body = json.dumps({'model': 'policy', 'messages': [{'role': 'user', 'content': 'q'}]}).encode(); "
        "head = {'Authorization': 'Bearer ' + os.environ['KEY'], 'Content-Type': 'application/json'}; "
        "web.urlopen(web.Request(os.environ['URL'] + '/chat/completions', body, head)).read()"
    )
    text = f"argv = {json.dumps([sys.executable, '-c', program])}\nroles = [{{role = 'side', tools = false}}]\n"
    write_definition("aside", text + '[env]\nURL = "{openai}"\nKEY = "{api_key}"')
    done = run(service, "--harness", "aside", VERBATIM_HARNESSES=str(scratch))
    assert done.returncode == 0, done.stderr
    session = session_of(service, done.stderr)["session_id"]
    (made,) = service.request("GET", f"/sessions/{session}/calls").json()["calls"]
    assert (made["role"], made["role_source"]) == ("side", "declared")
    assert "rows: 1 side (not trained)" in done.stderr


@pytest.mark.parametrize(
    ("prints", "warns"),
    [("mine 2.0.30 (a build)", True), ("mine 1.2.3", False), ("no number", False)],
    ids=["another", "the tested one", "none told"],
)
def test_a_harness_of_another_version_than_tested_is_told(service: Serving, scratch: Path, prints: str, warns: bool) -> None:
    lines = (f"argv = {json.dumps([sys.executable, '-c', ''])}", 'version = "1.2.3"')
    write_definition("mine", "\n".join([*lines, f"version_argv = {json.dumps(['echo', prints])}"]))
    done = run(service, "--harness", "mine", VERBATIM_HARNESSES=str(scratch))
    assert done.returncode == 0, done.stderr
    assert ("mine is version 2.0.30, but its definition was tested with 1.2.3" in done.stderr) == warns
    assert ("tested with" in done.stderr) == warns


def test_rows_are_told_by_role_and_by_who_says_so() -> None:
    made = [
        ("main", "inferred", 1),
        ("main", "inferred", 1),
        ("side", "inferred", 1),
        ("subagent", "declared", 1),
        ("side", "rule", 0),
    ]
    rows = [{"role": role, "role_source": source, "loss_mask": [0, mask]} for role, source, mask in made]
    assert count_roles(rows) == "2 main, 1 side (inferred), 1 subagent, 1 side (not trained)"


def in_a_shell(script: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", script, *args], env=environment(**variables), capture_output=True, text=True, input="")


def test_env_prints_lines_that_a_shell_can_take_quoted_or_not(service: Serving) -> None:
    done = verbatim("env", "--harness", "shell", "--model", "it's; $(touch oops) #1", **access(service))
    for taking in ('eval "$(printf %s "$PRINTED")"', 'eval $(printf %s "$PRINTED")'):
        shown = in_a_shell(f"{taking}; {shlex.quote(sys.executable)} -c {shlex.quote(SHOW)}", PRINTED=done.stdout)
        seen = json.loads(shown.stdout)["env"]
        session = seen["OPENAI_BASE_URL"].split("/")[-2]
        assert seen["OPENAI_MODEL"] == "it's; $(touch oops) #1" and not Path("oops").exists()
        assert service.request("GET", f"/sessions/{session}").json()["status"] == "open"


def test_a_call_with_what_env_printed_is_recorded(service: Serving) -> None:
    script = f'eval "$({shlex.join([*COMMAND, "env", "--harness", "shell", "--session-id", "by-env"])})"; "$0" -c "$1"'
    done = in_a_shell(script, sys.executable, ASK, **access(service))
    assert done.stdout.startswith("the model said: "), done.stderr
    assert service.request("GET", "/sessions/by-env").json()["calls"] == 1


def test_env_writes_the_files_into_the_home_that_it_prints(service: Serving, scratch: Path) -> None:
    done = verbatim("env", "--harness", "codex", "--home", "h1", **access(service))
    assert done.returncode == 0, done.stderr
    assert f"export HOME={scratch}/h1;" in done.stdout and f"export TMPDIR={scratch}/h1/tmp;" in done.stdout
    assert f'base_url = "{service.url}/s/' in (scratch / "h1/.codex/config.toml").read_text()
    assert "# start it with: codex exec" in done.stdout


def test_env_without_a_home_prints_the_files(service: Serving) -> None:
    done = verbatim("env", "--harness", "codex", **access(service))
    assert "# ~/.codex/config.toml" in done.stdout and "HOME=" not in done.stdout
    assert [line for line in done.stdout.splitlines() if not line.startswith(("#", "export ", "unset "))] == []


def test_env_as_json_has_everything(service: Serving) -> None:
    done = verbatim("env", "--harness", "claude-code", "--json", "--session-id", "as-json", **access(service))
    given = json.loads(done.stdout)
    assert (given["session_id"], given["model"], given["home"]) == ("as-json", "policy", None)
    assert given["base_urls"]["anthropic"] == given["env"]["ANTHROPIC_BASE_URL"] == f"{service.url}/s/as-json"
    assert given["api_key"] == given["env"]["ANTHROPIC_AUTH_TOKEN"]
    assert given["argv"][0] == "claude" and given["argv"][-1] == "{prompt}"
    assert "ANTHROPIC_API_KEY" in given["unset"] and given["files"] == {}


def test_env_does_not_write_into_the_users_own_home(service: Serving, scratch: Path) -> None:
    sentence = refused("env", "--harness", "codex", "--home", ".", code=2, **access(service), HOME=str(scratch))
    assert "your own home" in sentence and list(scratch.iterdir()) == []


def test_env_that_cannot_write_closes_its_session(service: Serving, scratch: Path) -> None:
    (scratch / "file").write_text("")
    args = ("env", "--harness", "codex", "--home", "file", "--session-id", "unwritten")
    assert "--home file" in refused(*args, code=1, **access(service))
    assert service.request("GET", "/sessions/unwritten").json()["status"] == "failed"
