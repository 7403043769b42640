"""The official `swebench` package at work, in a process of its own: `python -m rollout.evaluators.swebench_process`.

One JSON object comes on stdin and one goes to stdout:

    {"do": "script", "instance": …}                                  -> {"script": the text of eval.sh}
    {"do": "grade", "instance": …, "patch": …, "log": a path}        -> the package's report for the instance
    whatever is wrong                                                -> {"error": in words}

In a process of its own, because the package reads `.env` files into the environment when it is imported, brings libraries that a
node has no use for, and runs regular expressions over logs that an agent had a hand in.

Written for swebench 5: `swebench.harness.utils.make_test_spec`, `swebench.harness.grading.get_eval_report`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


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
