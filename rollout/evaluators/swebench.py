"""Kind `swebench`: an instance of SWE-bench, graded by the rules of the official package in whatever runtime the task names.

Options:

    instance    the row of the data set, as swebench 5 has it: instance_id, image, repo, version, FAIL_TO_PASS, PASS_TO_PASS,
                log_parser, eval_type and eval_script
    mode        resolved (default): 1.0 when the instance is resolved, otherwise 0.0. fraction: the part of FAIL_TO_PASS that passes,
                0.0 when one of PASS_TO_PASS is broken
    repository  where the image has the repository; default /testbed
    result      where the agent's repository lies; default: the workdir. Its files are carried into `repository` as a patch, as
                the benchmark does it: what git ignores stays behind. Where both are one folder nothing is carried

The package is asked in a process of its own (`swebench_process`). A log in which no test ran counts as not resolved, as in the
benchmark, unless the package says that the surroundings broke, or the script never came to its tests: then there is no reward.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from posixpath import join, normpath
from types import ModuleType
from typing import Any

from rollout.evaluators.base import Case, EvaluationFailed, EvaluationTimedOut, Options, Score, of_case, shorten
from rollout.evaluators.command import describe_end, require_runtime
from rollout.runtimes.base import Executed, Logs
from rollout.task import EvaluatorSpec, Task

FIELDS = ("instance_id", "image", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type", "eval_script")
MODES = ("resolved", "fraction")
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""`swebench.harness.constants`: what eval scripts print around the tests' output."""

CARRY = """
set -e
export GIT_DIR="$1/.git" GIT_INDEX_FILE="$3.index" GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
tree() { git --work-tree="$1" read-tree HEAD; (cd "$1" && git --work-tree="$1" add --all .); git write-tree; }
given=$(tree "$1")
made=$(tree "$2")
git diff --binary --full-index --no-color --no-ext-diff --no-renames "$given" "$made" > "$3"
if [ -s "$3" ]; then unset GIT_INDEX_FILE GIT_DIR; cd "$1"; git apply --whitespace=nowarn "$3"; fi
"""
"""sh -c CARRY sh <repository> <result> <patch>. Git's own folder is the image's: the agent's may say what it likes. Both trees are
written by the same rules, so the patch between them always applies."""


@dataclass(frozen=True, slots=True)
class Wanted:
    instance: Mapping[str, Any]
    mode: str
    repository: str
    result: str


class SwebenchEvaluator:
    name = "swebench"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        _read(Options(self.name, spec.options))

    async def evaluate(self, case: Case) -> Score:
        wanted = of_case(self.name, case, _read)
        script = str((await _asked({"do": "script", "instance": wanted.instance}))["script"])
        patch = await _carried(case, wanted)
        if patch is not None and not patch.strip():
            return Score(0.0, feedback="nothing was changed", metadata={"resolved": False, "empty_patch": True})
        log, done = await _tested(case, wanted, script)
        if START not in log or END not in log:
            raise EvaluationFailed(f"{_id(wanted)}: the eval script did not come to its tests: {describe_end(done)}")
        report = await _graded(wanted, patch or "", log)
        return _score(wanted, report, log)


def _read(options: Options) -> Wanted:
    wanted = Wanted(
        instance=options.table("instance"),
        mode=options.choice("mode", MODES),
        repository=options.text("repository", "/testbed"),
        result=options.text("result", "."),
    )
    options.done()
    if missing := [name for name in FIELDS if name not in wanted.instance]:
        raise options.refused("instance", f"lacks {', '.join(missing)}: rows of swebench 5 have them")
    if wanted.instance.get("image_assets") not in (None, "", "{}", {}):
        raise options.refused("instance", "has image_assets, binary files that are not put in place here")
    for name in ("eval_script", "log_parser", "instance_id"):
        if not isinstance(wanted.instance[name], str) or not wanted.instance[name].strip():
            raise options.refused("instance", f"has no text as its {name}")
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        if not _is_list_of_texts(wanted.instance[name]):
            raise options.refused("instance", f"must have a list of tests as {name}, or that list as JSON")
    return wanted


def _is_list_of_texts(value: object) -> bool:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return False
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


async def _carried(case: Case, wanted: Wanted) -> str | None:
    """The patch by which the agent's files came into the repository; None where they are there already."""
    runtime = require_runtime(case)
    repository, result = (normpath(join(runtime.workdir, path)) for path in (wanted.repository, wanted.result))
    if repository == result:
        return None
    patch = join(runtime.home, "agent.patch")
    done = await runtime.exec(
        ["sh", "-c", CARRY, "sh", repository, result, patch], timeout_seconds=case.seconds, logs=case.logs
    )
    if done.exit_code != 0 or done.timed_out:
        raise EvaluationFailed(f"{_id(wanted)}: {result} could not be carried into {repository}: {describe_end(done)}")
    shown = await runtime.exec(["cat", patch], timeout_seconds=case.seconds)
    if shown.exit_code != 0 or shown.timed_out:
        raise EvaluationFailed(f"{_id(wanted)}: the agent's patch cannot be read: {describe_end(shown)}")
    return shown.stdout.decode("utf-8", "replace")


async def _tested(case: Case, wanted: Wanted, script: str) -> tuple[str, Executed]:
    """The log of the eval script, stdout and stderr in one as the package's parsers expect it, and how it ended."""
    runtime = require_runtime(case)
    path = join(runtime.home, "eval.sh")
    await runtime.upload(path, script.encode(), mode=0o755)
    logs = replace(case.logs, stdout=case.logs.stdout.with_name(f"{case.logs.stdout.name}.tests"))
    logs.stdout.unlink(missing_ok=True)
    done = await runtime.exec(
        ["bash", "-c", 'exec bash "$0" 2>&1', path],
        workdir=wanted.repository,
        timeout_seconds=case.seconds,
        logs=logs,
    )
    if done.timed_out:
        raise EvaluationTimedOut(
            f"{_id(wanted)}: the tests were still at work after {case.seconds:g} seconds; {describe_end(done)}"
        )
    return await asyncio.to_thread(_whole, logs, done), done


def _whole(logs: Logs, done: Executed) -> str:
    """What was written to the log file: `done` has only the end of it."""
    content = logs.stdout.read_bytes() if logs.stdout.exists() else done.stdout
    return content.decode("utf-8", "replace")


async def _graded(wanted: Wanted, patch: str, log: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="verbatim-swebench-") as folder:
        path = Path(folder) / "test_output.txt"
        await asyncio.to_thread(path.write_text, log, encoding="utf-8")
        return await _asked({"do": "grade", "instance": wanted.instance, "patch": patch, "log": str(path)})


async def _asked(question: Mapping[str, Any]) -> dict[str, Any]:
    """What the package says. Raises `EvaluationFailed`."""
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


def _score(wanted: Wanted, report: Mapping[str, Any], log: str) -> Score:
    if report.get("infra_failure"):
        raise EvaluationFailed(f"{_id(wanted)}: the surroundings broke: {report.get('infra_failure_reason')}")
    resolved = bool(report["resolved"])
    tests = report.get("tests_status") or {}
    if not tests:
        tail = shorten(log[-4000:])
        return Score(
            0.0, feedback=f"no test ran; the log ended with:\n{tail}", metadata={"resolved": False, "tests_ran": False}
        )
    fixed, unfixed = (tests["FAIL_TO_PASS"][outcome] for outcome in ("success", "failure"))
    kept, broken = (tests["PASS_TO_PASS"][outcome] for outcome in ("success", "failure"))
    if wanted.mode == "resolved":
        reward = float(resolved)
    else:
        reward = 0.0 if broken else len(fixed) / (len(fixed) + len(unfixed)) if fixed or unfixed else 1.0
    lines = [f"resolved: {'yes' if resolved else 'no'}"]
    lines += [f"does not pass: {test}" for test in unfixed] + [f"passed before, does not pass: {test}" for test in broken]
    counts = {"fixed": len(fixed), "unfixed": len(unfixed), "kept": len(kept), "broken": len(broken)}
    return Score(reward, feedback=shorten("\n".join(lines)), metadata={"resolved": resolved, **counts})


def _id(wanted: Wanted) -> str:
    return str(wanted.instance["instance_id"])


# The official `swebench` package at work, in a process of its own: `python -m rollout.evaluators.swebench`.
#
# One JSON object comes on stdin and one goes to stdout:
#
#     {"do": "script", "instance": …}                                  -> {"script": the text of eval.sh}
#     {"do": "grade", "instance": …, "patch": …, "log": a path}        -> the package's report for the instance
#     whatever is wrong                                                -> {"error": in words}
#
# In a process of its own, because the package reads `.env` files into the environment when it is imported, brings libraries that a
# node has no use for, and runs regular expressions over logs that an agent had a hand in.
#
# Written for swebench 5: `swebench.harness.utils.make_test_spec`, `swebench.harness.grading.get_eval_report`.


def main() -> None:
    try:
        answer = _done(json.load(sys.stdin))
    except ModuleNotFoundError as error:
        answer = {"error": f"{error}; install the extra 'swebench' on this node"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)


def _done(asked: dict[str, Any]) -> dict[str, Any]:
    _skip_drivers()
    spec = import_module("swebench.harness.utils").make_test_spec(asked["instance"])
    if asked["do"] == "script":
        return {"script": spec.eval_script}
    prediction = {"instance_id": spec.instance_id, "model_patch": asked["patch"], "model_name_or_path": "agent"}
    report = import_module("swebench.harness.grading").get_eval_report(spec, prediction, asked["log"], True)
    return dict(report[spec.instance_id])


def _skip_drivers() -> None:
    """Makes `swebench.harness` a package without its `__init__`, which imports its drivers for Docker and Modal, and puts a blank in the
    place of `datasets`, which only loads data sets: a second and 100 MB for nothing at every evaluation."""
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
