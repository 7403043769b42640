"""The alert rules and the dashboard as Prometheus reads them: their expressions, the names in these, and promtool."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import yaml

from tests import ROOT
from tests.support.machine import require

RULES = ROOT / "helm/verbatim/files/alerts.yaml"
DASHBOARD = ROOT / "helm/verbatim/files/dashboard.json"
OF_THE_SCRAPE = {"namespace", "job", "instance"}

_SELECTED = re.compile(r"(verbatim_\w+)\s*(?:\{([^}]*)\})?")
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """By where they stand; what Grafana puts into its own is put in."""
    found = {rule["alert"]: rule["expr"] for rule in alerts()}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m")
            found[f"{panel['title']} {target['refId']}"] = re.sub(r"\$\w+", ".*", expression)
    return found


def selected(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric family that is read, by the name that the documentation has, with the labels that are matched."""
    for name, matchers in _SELECTED.findall(expression):
        yield _HISTOGRAM.sub("", name), set(_MATCHED.findall(matchers))


def grouped(expression: str) -> set[str]:
    """The labels by which series are put together or matched."""
    return {label.strip() for labels in _GROUPED.findall(expression) for label in labels.split(",")} - {""}


def promtool(*args: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """`given` goes to its standard input. Where there is none the test is skipped; in CI it fails."""
    return subprocess.run([require("promtool"), *args], input=given, capture_output=True, text=True, timeout=120, check=False)
