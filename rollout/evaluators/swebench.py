"""Kind `swebench`: an instance of SWE-bench, graded by the official package in any runtime.

A log in which no test ran counts as not resolved, as in the benchmark. If the package reports a broken environment, or the script never
reached its tests, there is no reward.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from posixpath import join, normpath
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from contract.tasks import EvaluatorSpec, Task
from rollout.evaluators.base import Case, EvaluationFailed, EvaluationTimedOut, Options, Score, Text, shorten
from rollout.evaluators.command import describe_end, require_runtime
from rollout.runtimes.base import Executed, Logs

FIELDS = ("instance_id", "image", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type", "eval_script")
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""`swebench.harness.constants`: what eval scripts print around the tests' output."""

CARRY = """
set -e
export GIT_DIR="$1/.git" GIT_INDEX_FILE="$3.index" GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
tree() { git --work-tree="$1" read-tree HEAD; (cd "$1" && git --work-tree="$1" add --all .); git write-tree; }
find "$2" -mindepth 2 -name .git -prune -exec sh -c '
    for git; do git --git-dir="$git" rev-parse -q --verify HEAD > /dev/null 2>&1 || rm -rf "$git"; done' sh {} + 2> /dev/null || true
given=$(tree "$1")
made=$(tree "$2")
git diff --binary --full-index --no-color --no-ext-diff --no-renames "$given" "$made" > "$3"
if [ -s "$3" ]; then unset GIT_INDEX_FILE GIT_DIR; cd "$1"; git apply --whitespace=nowarn "$3"; fi
"""
"""sh -c CARRY sh <repository> <result> <patch>. Uses the image's .git, since the agent may have changed its own. Both trees are written
by the same rules, so the patch between them always applies. A repository without a commit that the agent left inside becomes a folder: git
refuses to add it."""


def _check_instance(instance: dict[str, Any]) -> dict[str, Any]:
    if missing := [name for name in FIELDS if name not in instance]:
        raise ValueError(f"lacks {', '.join(missing)}: rows of swebench 5 have them")
    if instance.get("image_assets") not in (None, "", "{}", {}):
        raise ValueError("has image_assets, binary files that are not put in place here")
    for name in ("eval_script", "log_parser", "instance_id"):
        if not isinstance(instance[name], str) or not instance[name].strip():
            raise ValueError(f"has no text as its {name}")
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        if not _is_list_of_texts(instance[name]):
            raise ValueError(f"must have a list of tests as {name}, or that list as JSON")
    return instance


def _is_list_of_texts(value: object) -> bool:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return False
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


class SwebenchOptions(Options):
    kind = "swebench"

    instance: Annotated[dict[str, Any], AfterValidator(_check_instance)] = Field(default_factory=dict, validate_default=True)
    """The row of the data set, with the columns FIELDS as in swebench 5."""
    mode: Literal["resolved", "fraction"] = "resolved"
    """resolved: 1.0 if the instance is resolved, otherwise 0.0. fraction: the share of FAIL_TO_PASS that passes, 0.0 if a test of
    PASS_TO_PASS is broken."""
    repository: Text = "/testbed"
    """Where the image has the repository."""
    result: Text = "."
    """Where the agent's repository is. Its files are carried into `repository` as a patch, as in the benchmark: what git ignores stays
    behind. If both are one folder, nothing is carried."""

    @property
    def id(self) -> str:
        return str(self.instance["instance_id"])


class SwebenchEvaluator:
    name = "swebench"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        SwebenchOptions.read(spec.options)

    async def evaluate(self, case: Case) -> Score:
        options = SwebenchOptions.read_case(case)
        script = str((await _ask({"do": "script", "instance": options.instance}))["script"])
        patch = await _carry(case, options)
        if patch is not None and not patch.strip():
            return Score(0.0, feedback="nothing was changed", metadata={"resolved": False, "empty_patch": True})
        log, done = await _test(case, options, script)
        if START not in log or END not in log:
            raise EvaluationFailed(f"{options.id}: the eval script did not come to its tests: {describe_end(done)}")
        report = await _grade(options, patch or "", log)
        return _score(options, report, log)


async def _carry(case: Case, options: SwebenchOptions) -> str | None:
    """The patch that brought the agent's files into the repository; None if they are there already."""
    runtime = require_runtime(case)
    repository, result = (normpath(join(runtime.workdir, path)) for path in (options.repository, options.result))
    if repository == result:
        return None
    patch = join(runtime.home, "agent.patch")
    done = await runtime.exec(
        ["sh", "-c", CARRY, "sh", repository, result, patch], timeout_seconds=case.seconds, logs=case.logs
    )
    if done.exit_code != 0 or done.timed_out:
        raise EvaluationFailed(f"{options.id}: {result} could not be carried into {repository}: {describe_end(done)}")
    shown = await runtime.exec(["cat", patch], timeout_seconds=case.seconds)
    if shown.exit_code != 0 or shown.timed_out:
        raise EvaluationFailed(f"{options.id}: the agent's patch cannot be read: {describe_end(shown)}")
    return shown.stdout.decode("utf-8", "replace")


async def _test(case: Case, options: SwebenchOptions, script: str) -> tuple[str, Executed]:
    """The log of the eval script, with stdout and stderr combined as the package's parsers expect, and its end."""
    runtime = require_runtime(case)
    path = join(runtime.home, "eval.sh")
    await runtime.upload(path, script.encode(), mode=0o755)
    logs = replace(case.logs, stdout=case.logs.stdout.with_name(f"{case.logs.stdout.name}.tests"))
    logs.stdout.unlink(missing_ok=True)
    done = await runtime.exec(
        ["bash", "-c", 'exec bash "$0" 2>&1', path],
        workdir=options.repository,
        timeout_seconds=case.seconds,
        logs=logs,
    )
    if done.timed_out:
        raise EvaluationTimedOut(
            f"{options.id}: the tests were still at work after {case.seconds:g} seconds; {describe_end(done)}"
        )
    return await asyncio.to_thread(_read_log, logs, done), done


def _read_log(logs: Logs, done: Executed) -> str:
    """The whole log file: `done` has only its end."""
    content = logs.stdout.read_bytes() if logs.stdout.exists() else done.stdout
    return content.decode("utf-8", "replace")


async def _grade(options: SwebenchOptions, patch: str, log: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="verbatim-swebench-") as folder:
        path = Path(folder) / "test_output.txt"
        await asyncio.to_thread(path.write_text, log, encoding="utf-8")
        return await _ask({"do": "grade", "instance": options.instance, "patch": patch, "log": str(path)})


async def _ask(question: Mapping[str, Any]) -> dict[str, Any]:
    """The package's answer. Raises `EvaluationFailed`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-X", "utf8", "-m", "rollout.evaluators.swebench"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        stdout, stderr = await process.communicate(json.dumps(question).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer = json.loads(stdout)
    except ValueError:
        answer = {"error": f"exit code {process.returncode}: {stderr.decode('utf-8', 'replace')[-2000:]}"}
    if "error" in answer:
        raise EvaluationFailed(f"the swebench package did not {question['do']}: {answer['error']}")
    return dict(answer)


def _score(options: SwebenchOptions, report: Mapping[str, Any], log: str) -> Score:
    if report.get("infra_failure"):
        raise EvaluationFailed(f"{options.id}: the surroundings broke: {report.get('infra_failure_reason')}")
    resolved = bool(report["resolved"])
    tests = report.get("tests_status") or {}
    if not tests:
        tail = shorten(log[-4000:])
        return Score(
            0.0, feedback=f"no test ran; the log ended with:\n{tail}", metadata={"resolved": False, "tests_ran": False}
        )
    fixed, unfixed = (tests["FAIL_TO_PASS"][outcome] for outcome in ("success", "failure"))
    kept, broken = (tests["PASS_TO_PASS"][outcome] for outcome in ("success", "failure"))
    if options.mode == "resolved":
        reward = float(resolved)
    else:
        reward = 0.0 if broken else len(fixed) / (len(fixed) + len(unfixed)) if fixed or unfixed else 1.0
    lines = [f"resolved: {'yes' if resolved else 'no'}"]
    lines += [f"does not pass: {test}" for test in unfixed] + [f"passed before, does not pass: {test}" for test in broken]
    counts = {"fixed": len(fixed), "unfixed": len(unfixed), "kept": len(kept), "broken": len(broken)}
    return Score(reward, feedback=shorten("\n".join(lines)), metadata={"resolved": resolved, **counts})


# The `swebench` package runs in a separate process, `python -m rollout.evaluators.swebench`: imported, it reads `.env` files into the
# environment and brings libraries that a node does not need, and it runs regular expressions over logs that an agent may influence.
#
# One JSON object on stdin, one on stdout:
#
#     {"do": "script", "instance": …}                                  -> {"script": the text of eval.sh}
#     {"do": "grade", "instance": …, "patch": …, "log": a path}        -> the package's report for the instance
#     a failure                                                        -> {"error": a message}
#
# Written for swebench 5: `swebench.harness.utils.make_test_spec`, `swebench.harness.grading.get_eval_report`.


def main() -> None:
    try:
        answer = _answer(json.load(sys.stdin))
    except ModuleNotFoundError as error:
        answer = {"error": f"{error}; install the extra 'swebench' on this node"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    _skip_drivers()
    spec = import_module("swebench.harness.utils").make_test_spec(question["instance"])
    if question["do"] == "script":
        return {"script": spec.eval_script}
    prediction = {"instance_id": spec.instance_id, "model_patch": question["patch"], "model_name_or_path": "agent"}
    report = import_module("swebench.harness.grading").get_eval_report(spec, prediction, question["log"], True)
    return dict(report[spec.instance_id])


def _skip_drivers() -> None:
    """Import `swebench.harness` without its `__init__`, which loads drivers for Docker and Modal, and with a blank `datasets`: this saves a
    second and 100 MB per evaluation."""
    found = find_spec("swebench")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'swebench'")
    package = ModuleType("swebench.harness")
    package.__path__ = [str(Path(found.submodule_search_locations[0]) / "harness")]
    blank = ModuleType("datasets")
    vars(blank)["__getattr__"] = lambda name: None
    sys.modules |= {"swebench.harness": package, "datasets": blank}


if __name__ == "__main__":
    main()
