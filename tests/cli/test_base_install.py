"""Every command where only the base install is there: it works, or says in one sentence which extra it needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from cli.main import app
from tests.deploy.test_release import PROJECT, program_alone
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import environment

WORKS = (
    ("sessions", "open", "--session-id", "s"),
    ("run", "--harness", "shell", "--session-id", "r", "--", "true"),
    ("env", "--harness", "shell", "--session-id", "e"),
    ("sessions", "list"),
    ("sessions", "show", "s"),
    ("sessions", "reward", "s", "-0.5", "--feedback", "1 failed"),
    ("sessions", "close", "s", "--status", "failed"),
    ("audit", "s"),
    ("view", "s"),
    ("tasks", "submit", "tasks.jsonl"),
    ("tasks", "list"),
    ("tasks", "show", "t"),
    ("tasks", "cancel", "t"),
    ("tasks", "watch", "t"),
    ("sessions", "flag", "s", "good"),
    ("groups", "list"),
    ("runs", "list"),
    ("dead-letters", "list"),
    ("dead-letters", "retry", "--reason", ""),
    ("dead-letters", "drop", "--reason", ""),
    ("engines", "add", "http://127.0.0.1:9"),
    ("engines", "list"),
    ("engines", "remove", "127.0.0.1:9"),
    ("weights", "status"),
    ("weights", "prune", ".", "--keep-last", "1"),
)
REFUSED = (
    (("serve", "--engine", "http://127.0.0.1:9"), "pip install '.[proxy]'"),
    (("node",), "pip install '.[rollout]'"),
    (("generate", "tasks.jsonl", "--engine", "http://127.0.0.1:9", "--out", "o"), "[proxy,rollout,archive]"),
    (("generate", "tasks.jsonl", "--url", "http://127.0.0.1:9", "--out", "o"), "[rollout,archive]"),
    (("export", "--out", "e"), "pip install '.[archive]'"),
    (("import", "exported"), "pip install '.[archive]'"),
    (("audit", "s", "--model", "m"), "pip install '.[trainer]' transformers"),
    (("tasks", "import", "harbor", ".", "--harness", "pi"), "pip install '.[rollout]'"),
    (("doctor", "--engine", "http://127.0.0.1:9"), "to fix: engine http://127.0.0.1:9"),
    (("fork", "s", "--at", "1"), "task"),
    (("score", "s", "--scorer", "teacher"), "there is no scorer 'teacher'"),
    (("groups", "show", "none"), "no group"),
    (("runs", "show", "none"), "no run"),
    (("runs", "export", "none", "--wandb", "p"), "pip install '.[wandb]'"),
    (("runs", "export", "none", "--tensorboard", "logs"), "pip install '.[tensorboard]'"),
    (("runs", "mark", "none", "ended"), "no run"),
    (("weights", "push", "/none"), "no replica serves version 1"),
    (("weights", "rollback"), "the history has no"),
    (("weights", "chain", "."), "is neither a delta nor an anchor"),
    (("weights", "verify", "."), "is neither a delta nor an anchor"),
    (("weights", "fold", ".", "--out", "folded"), "is neither a delta nor an anchor"),
)
PROGRAM = """
import contextlib, io, json, sys, traceback
results = []
for args in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["verbatim", *args]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            from cli.main import main
            main()
        except SystemExit as left:
            code = left.code or 0
        except BaseException:
            traceback.print_exc()
            code = "traceback"
    results.append([args, code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def base_install(folder: Path, commands: list[tuple[str, ...]], **variables: str) -> list[tuple[list[str], Any, str, str]]:
    """Each command with its exit code, output and errors, run where nothing but the base install can be imported."""
    program = program_alone(PROJECT["dependencies"], PROGRAM)
    words = [sys.executable, "-c", program, json.dumps(commands)]
    env = environment(**variables, PATH="/usr/bin:/bin")
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_every_command_works_on_the_base_install_or_names_the_extra_it_needs(service: RunningService, tmp_path: Path) -> None:
    """`verbatim node` ended in a traceback for msgspec."""
    task = {"task_id": "t", "instruction": "x", "harness": "pi", "evaluator": "pytest"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    commands: list[tuple[str, ...]] = [*WORKS, *(args for args, _ in REFUSED)]
    found = base_install(tmp_path, commands, VERBATIM_URL=service.url, VERBATIM_ADMIN_TOKEN=ADMIN)
    failed = [(args, code, err) for args, code, _, err in found[: len(WORKS)] if code and args[0] != "run"]
    assert failed == []
    for (args, says), (_, code, _, err) in zip(REFUSED, found[len(WORKS) :], strict=True):
        assert code == 1 and says in err and "Traceback" not in err, (args, code, err)
        assert err.strip().splitlines()[-1].startswith("verbatim: "), (args, err)


def leaves(words: tuple[str, ...], command: Any) -> Iterator[tuple[str, ...]]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from leaves((*words, name), inner)
    else:
        yield words


def test_no_command_is_left_out() -> None:
    tried = {args[: len(words)] for args in (*WORKS, *(args for args, _ in REFUSED)) for words in COMMANDS}
    assert [words for words in COMMANDS if words not in tried] == []


COMMANDS = list(leaves((), typer.main.get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example(words: tuple[str, ...]) -> None:
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    example = rf"^ *verbatim {re.escape(' '.join(words))}( |$)|verbatim {re.escape(' '.join(words))} "
    assert re.search(example, command.help, re.MULTILINE), command.help
    assert all(parameter.help for parameter in command.params if parameter.name != "help"), words
