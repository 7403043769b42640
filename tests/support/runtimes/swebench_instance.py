"""A tiny instance of SWE-bench: a repository with a bug, its row of the data set, and what agents might leave behind.

The row has the form of the published ones since swebench 5: image and eval script are columns of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUGGY = """def slug(title):
    return "-".join(title.split(" "))


def shout(title):
    return title.upper()
"""
FIXED = BUGGY.replace('title.split(" ")', "title.lower().split()")
HALF_FIXED = BUGGY.replace('title.split(" ")', "title.split()")
FIXED_AND_BROKEN = FIXED.replace("title.upper()", "title")

FILES = {
    "slugs.py": BUGGY,
    "old.py": "",
    "checks/check_slugs.py": "from slugs import shout\n\n\ndef test_shout():\n    assert shout('a') == 'A'\n",
    ".gitignore": "*.cache\n__pycache__/\n",
}
TEST_PATCH = """diff --git a/checks/check_slugs.py b/checks/check_slugs.py
--- a/checks/check_slugs.py
+++ b/checks/check_slugs.py
@@ -1,5 +1,13 @@
-from slugs import shout
+from slugs import shout, slug
\x20
\x20
 def test_shout():
     assert shout('a') == 'A'
+
+
+def test_spaces():
+    assert slug('a  b') == 'a-b'.upper().lower()
+
+
+def test_case():
+    assert slug('A b') == 'a-b'
"""
EVAL_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
git config --global --add safe.directory /testbed
git status
git checkout {commit} checks/check_slugs.py
git apply -v - <<'EOF_114329324912'
{test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
{python} -m pytest -rA -p no:cacheprovider checks/check_slugs.py
: '>>>>> End Test Output'
git checkout {commit} checks/check_slugs.py
"""
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


@dataclass(frozen=True, slots=True)
class Instance:
    """`row` is of the data set; `repository` is what the image has in /testbed."""

    row: dict[str, Any]
    repository: Path


def make_instance(folder: Path) -> Instance:
    """With its repository at `folder`."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "The base")):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    told = subprocess.run([*GIT, "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    commit = told.stdout.strip()
    tests = {
        "FAIL_TO_PASS": ["checks/check_slugs.py::test_spaces", "checks/check_slugs.py::test_case"],
        "PASS_TO_PASS": ["checks/check_slugs.py::test_shout"],
    }
    row = {
        "instance_id": "example__slugs-1",
        "repo": "example/slugs",
        "version": "1.0",
        "base_commit": commit,
        "problem_statement": "slug() keeps upper case, and gives empty parts for runs of spaces.",
        "patch": "the reference solution, which no agent may see",
        "test_patch": TEST_PATCH,
        "image": "registry.example/sweb.eval.x86_64.example_1776_slugs-1:latest",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": EVAL_SCRIPT.format(commit=commit, test_patch=TEST_PATCH, python=sys.executable),
        **{name: json.dumps(names) for name, names in tests.items()},
    }
    return Instance(row, folder)
