"""The body of a submitted task: what it may say, what it means, and what is said of one that cannot be."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from contract.tasks import Budgets, EvaluatorSpec, Exec, HarnessSpec, McpServer, RuntimeSpec, Task, TaskGroup, Upload
from proxy.store.keys import StoredValueError, pack_versioned
from proxy.store.tasks.values import TaskState, outline, unpack_checked
from proxy.tasks.views import dump_outline, render_task
from rollout.task_body import BadTask, read_task
from tests.support.service.rollout_service import BODY, KNOWN

WHOLE: dict[str, Any] = {
    "task_id": "bug-7",
    "instruction": "Fix the bug.",
    "harness": {
        "name": "mine",
        "definition": {
            "description": "one of my own",
            "dialect": "chat",
            "argv": ["mine", "{prompt}"],
            "mcp": {"file": "mine.json", "table": "servers", "command": {"run": "{words}"}, "url": {"at": "{url}"}},
            "skills": "skills",
        },
        "env": {"LEVEL": "high"},
        "mcp_servers": [{"name": "files", "command": ["serve", "."]}, {"name": "web", "url": "http://tools/mcp"}],
        "skills": [{"path": "review", "base64": "dGFy", "unpack": True}],
        "install": False,
    },
    "evaluator": {
        "kind": "command",
        "options": {"command": "make check"},
        "runtime": {"kind": "docker", "image": "judge"},
        "prepare": [{"upload": {"path": "hidden.py", "text": "assert True"}}],
        "collect": ["src", "/out"],
    },
    "num_samples": 8,
    "model": "policy",
    "sampling": {"temperature": 1, "max_tokens": 500},
    "runtime": {
        "kind": "docker",
        "image": "work",
        "cpus": 2,
        "memory_mb": 4096,
        "network": "full",
        "options": {"user": "1000"},
    },
    "prepare": [
        {"upload": {"path": "a.tar", "source": "http://files/a.tar", "mode": "0755"}},
        {"exec": "make deps"},
        {"exec": {"command": "make", "retries": 2, "timeout_seconds": 30, "network": "full"}},
    ],
    "environment": {"CI": "1"},
    "budgets": {"agent_seconds": 60, "total_seconds": 600, "max_calls": 30, "max_total_tokens": 200_000},
    "priority": 80,
    "labels": {"zone": "a"},
    "early_stop_usable_samples": 4,
    "max_attempts": 2,
    "on_lost_node": "fail",
    "on_agent_timeout": "reward",
    "agent_timeout_reward": -1,
    "group": {"policy": "allow_partial", "minimum": 4, "max_quarantined_share": 0.25},
    "callback_url": "https://train/done",
    "metadata": {"set": "small", "row": 7},
}

TASK = Task(
    task_id="bug-7",
    instruction="Fix the bug.",
    harness=HarnessSpec(
        "mine",
        WHOLE["harness"]["definition"],
        {"LEVEL": "high"},
        (McpServer("files", ("serve", ".")), McpServer("web", url="http://tools/mcp")),
        (Upload("review", b"tar", unpack=True),),
        False,
    ),
    evaluator=EvaluatorSpec(
        "command",
        {"command": "make check"},
        fresh_runtime=True,
        runtime=RuntimeSpec("docker", "judge"),
        prepare=(Upload("hidden.py", b"assert True"),),
        collect=("src", "/out"),
    ),
    num_samples=8,
    model="policy",
    sampling={"temperature": 1.0, "max_tokens": 500},
    runtime=RuntimeSpec("docker", "work", 2.0, 4096, network="full", options={"user": "1000"}),
    prepare=(Upload("a.tar", source="http://files/a.tar", mode=0o755), Exec("make deps"), Exec("make", 30.0, 2, "full")),
    environment={"CI": "1"},
    budgets=Budgets(agent=60.0, total=600.0, max_calls=30, max_total_tokens=200_000),
    priority=80,
    labels={"zone": "a"},
    usable_samples=4,
    max_attempts=2,
    on_lost_node="fail",
    on_agent_timeout="reward",
    agent_timeout_reward=-1.0,
    group=TaskGroup(group_policy="allow_partial", group_minimum=4, max_quarantined_share=0.25),
    callback_url="https://train/done",
    metadata={"set": "small", "row": 7},
)


def of(body: dict[str, Any]) -> Task:
    return read_task(json.dumps(body).encode(), KNOWN)[0]


def refused(**fields: Any) -> BadTask:
    with pytest.raises(BadTask) as caught:
        of({**BODY, **fields})
    return caught.value


def test_every_field_means_what_it_says() -> None:
    assert of(WHOLE) == TASK


def test_little_is_enough() -> None:
    task = of({**BODY, "task_id": "t"})
    assert task == Task("Fix the bug.", HarnessSpec("pi"), task_id="t")
    assert of(BODY).task_id != of(BODY).task_id


def test_a_name_alone_stands_for_what_is_only_named() -> None:
    task = of({**BODY, "runtime": "local", "evaluator": "pytest"})
    assert task.runtime == RuntimeSpec("local") and task.evaluator == EvaluatorSpec("pytest", fresh_runtime=True)


@pytest.mark.parametrize("task", [TASK, Task("i", HarnessSpec("pi"), task_id="t")])
def test_a_task_is_stored_and_read_back_whole(task: Task) -> None:
    assert unpack_checked(pack_versioned(task), Task) == task


def test_a_stored_field_that_this_build_does_not_know_is_left_out() -> None:
    schema, fields = msgspec.msgpack.decode(pack_versioned(TASK))
    fields["later"] = fields["budgets"]["later"] = fields["prepare"][1]["later"] = 1
    assert unpack_checked(msgspec.msgpack.encode((schema, fields)), Task) == TASK


def test_the_stored_names_of_fields_are_no_names_in_json() -> None:
    assert refused(usable_samples=1).message == "usable_samples: there is no such field"
    assert refused(prepare=[{"command": "make"}]).param == "prepare.0.command"
    assert refused(prepare=[{"upload": {"path": "x", "content": "y"}}]).param == "prepare.0.upload.content"


def test_an_outline_holds_everything_but_what_was_uploaded() -> None:
    short = outline(TASK)
    assert short.prepare == TASK.prepare and short.harness.skills[0].content == b""
    assert short.evaluator.prepare == (Upload("hidden.py", b""),)


def test_an_early_stop_makes_do_with_the_samples_it_wants() -> None:
    assert of({**BODY, "num_samples": 4, "early_stop_usable_samples": 3}).group == TaskGroup(
        group_policy="allow_partial", group_minimum=3
    )
    strict = {"num_samples": 4, "early_stop_usable_samples": 3, "group": {"policy": "require_all"}}
    assert of({**BODY, **strict}).group == TaskGroup(group_policy="require_all")


def test_what_another_schema_or_nobody_wrote_is_refused() -> None:
    with pytest.raises(StoredValueError, match="schema"):
        unpack_checked(b"\x92\x63" + pack_versioned(TASK)[2:], Task)
    with pytest.raises(StoredValueError, match="Task cannot be read"):
        unpack_checked(b"\x92\x01\x80", Task)
    with pytest.raises(StoredValueError):
        unpack_checked(b"nonsense", Task)


def test_a_task_is_shown_as_it_was_submitted_with_lengths_in_place_of_uploads() -> None:
    shown = render_task(TaskState(TASK, "queued", 1.0))["task"]
    assert shown == dump_outline(TASK)
    assert set(WHOLE) <= set(shown)
    for field in (
        "instruction",
        "budgets",
        "group",
        "metadata",
        "labels",
        "environment",
        "callback_url",
        "early_stop_usable_samples",
    ):
        given = WHOLE[field]
        assert shown[field] == ({**shown[field], **given} if isinstance(given, dict) else given)
    assert shown["prepare"][0] == {"upload": {"path": "a.tar", "source": "http://files/a.tar", "mode": "0755", "unpack": False}}
    assert shown["harness"]["skills"] == [{"path": "review", "bytes": 3, "mode": "0644", "unpack": True}]
    json.dumps(shown, allow_nan=False)


def test_bodies_that_mean_the_same_have_one_digest() -> None:
    def digest(**fields: Any) -> bytes:
        return read_task(json.dumps({**BODY, "task_id": "t", **fields}).encode(), KNOWN)[1]

    # As earlier builds made them: whoever submits a task again after an update is told that it is there.
    assert digest().hex() == "c6dddd7341d40bc8e4b3f770056704d5c528bfac53e4d2cc1ae839f9109fde16"
    binary = {**WHOLE["harness"], "skills": [{"path": "review", "base64": "gGFy", "unpack": True}]}
    assert digest(**{**WHOLE, "harness": binary}).hex() == "2880d6099a43d80eac9265f2789d0198dbe4135ab6c54e0e515cf489251be003"
    assert digest() == digest(priority=50, harness={"name": "pi"}, sampling={}) == digest(prepare=[])
    assert digest(metadata={"a": 1, "b": 2}) == digest(metadata={"b": 2, "a": 1})
    assert len({digest(), digest(priority=51), digest(harness="codex"), digest(metadata={"a": 1})}) == 4


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"harness": "nobodys"}, "harness", "there is no harness 'nobodys': choose one of aider, claude-code, cline, codex"),
        ({"harness": "/etc/x.toml"}, "harness", "there is no harness"),
        ({"harness": {}}, "harness", "a name or a definition"),
        ({"harness": {"definition": {"argv": ["agent"]}}}, "harness", "dialect is missing"),
        ({"harness": {"name": "pi", "mcp_servers": [{"name": "x", "url": "http://x"}]}}, "harness", "pi takes no MCP servers"),
        ({"harness": {"name": "aider", "skills": [{"path": "x", "text": ""}]}}, "harness", "aider takes no skills"),
        ({"harness": {"name": "pi", "mcp_servers": [{"name": "x"}]}}, "harness.mcp_servers.0", "by its command or by its url"),
        ({"runtime": "cloud"}, "runtime", "there is no runtime 'cloud': choose one of docker, local"),
        ({"runtime": "docker"}, "runtime", "docker needs an image"),
        ({"runtime": {"cpus": 0}}, "runtime.cpus", "greater than 0"),
        ({"evaluator": "oracle"}, "evaluator", "there is no evaluator 'oracle': choose one of command, pytest"),
        ({"evaluator": "command"}, "evaluator", "options.command is missing"),
        (
            {"evaluator": {"kind": "pytest", "runtime": "cloud"}},
            "evaluator.runtime",
            "there is no runtime 'cloud': choose one of docker, local",
        ),
        ({"prepare": [{}]}, "prepare.0", "a step is {upload} or {exec}"),
        ({"prepare": [{"exec": ""}]}, "prepare.0.exec.command", "at least 1"),
        ({"prepare": [{"upload": {"path": "x", "text": "", "source": "y"}}]}, "prepare.0.upload", "exactly one of"),
        ({"prepare": [{"upload": {"path": "x", "base64": "?"}}]}, "prepare.0.upload", "base64"),
        ({"prepare": [{"upload": {"path": "x", "text": "", "mode": "999"}}]}, "prepare.0.upload.mode", "pattern"),
        ({"num_samples": 0}, "num_samples", "greater than or equal to 1"),
        ({"num_samples": "4"}, "num_samples", "valid integer"),
        ({"early_stop_usable_samples": 2}, None, "early_stop_usable_samples: 2 of 1 samples"),
        ({"group": {"minimum": 2}}, None, "group.minimum: 2 of 1 samples"),
        ({"budgets": {"agent": 5}}, "budgets.agent", "there is no such field"),
        ({"budgets": {"agent_seconds": -5}}, "budgets.agent_seconds", "greater than 0"),
        ({"budgets": {"max_calls": 0}}, "budgets.max_calls", "greater than or equal to 1"),
        ({"budgets": {"max_total_tokens": 2**53}}, "budgets.max_total_tokens", "less than 9007199254740992"),
        ({"group": {"max_quarantined_share": 1.5}}, "group.max_quarantined_share", "less than or equal to 1"),
        ({"callback_url": "file:///etc/passwd"}, "callback_url", "no http or https URL"),
        ({"environment": {"A=B": "c"}}, "environment", "environment: 'A=B'"),
        ({"harness": {"name": "pi", "env": {"A=B": "c"}}}, "harness.env", "'A=B' cannot be a variable"),
        ({"harness": {"name": "pi", "env": {"A": "b\0"}}}, "harness.env", "'A' cannot be a variable"),
        ({"metadata": {"n": 2**70}}, None, "cannot be stored"),
        ({"agent_timeout_reward": float("nan")}, "agent_timeout_reward", "finite"),
        ({"metadata": {"n": [float("nan")]}}, "metadata", "finite"),
        ({"runtime": {"options": {"n": float("inf")}}}, "runtime.options", "finite"),
        ({"evaluator": {"kind": "pytest", "options": {"n": float("-inf")}}}, "evaluator.options", "finite"),
        ({"harness": {"definition": {"n": float("nan")}}}, "harness.definition", "finite"),
        ({"task_id": "a/b"}, "task_id", "letters, digits"),
        ({"task_id": "x" * 101}, "task_id", "1 to 100"),
        ({"instructions": "x"}, "instructions", "there is no such field"),
        ({"instruction": ""}, "instruction", "at least 1"),
        ({"instruction": "é" * 65536, "harness": "pi"}, "instruction", "131072 bytes, and pi takes it as an argument"),
        ({"instruction": "a\0b", "harness": "pi"}, "instruction", "null byte"),
        ({"environment": {"A": "x" * 131072}}, "environment.A", "upload it as a file"),
        ({"prepare": [{"exec": "x" * 131072}]}, "prepare.0.exec.command", "upload it as a file"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(fields: dict[str, Any], param: str | None, said: str) -> None:
    error = refused(**fields)
    assert said in error.message and error.param == param
    assert param is None or error.message.startswith(f"{param}: ")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"instruction": "\xff"}'])
def test_what_is_no_task_at_all_is_refused(raw: bytes) -> None:
    with pytest.raises(BadTask):
        read_task(raw, KNOWN)
