"""What /metrics shows is what the documentation says, and what alerts and dashboard read is there."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cli.rollout_service import add_rollouts
from proxy.app import Addition
from proxy.services import Services
from tests.support.documents.prometheus_rules import (
    DASHBOARD,
    OF_THE_SCRAPE,
    ROOT,
    RULES,
    alerts,
    expressions,
    grouped,
    panels,
    promtool,
    selected,
)
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import KNOWN
from tests.support.service.running_service import RunningService

PAGE = (ROOT / "docs/observability.md").read_text()
OF_THE_PROCESS = "process_"
"""What prometheus-client tells of any process on Linux, documented by a sentence."""

IDS = ("the-session", "the-group", "the-task")


def rows(heading: str, page: str = PAGE) -> list[list[str]]:
    """The cells of the tables under `## heading`."""
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [
        line
        for line in section.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| name |", "| label | values"))
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def labels_in(cell: str) -> frozenset[str]:
    return frozenset(filter(None, re.split(r",\s*", cell)))


DOCUMENTED = {
    name.strip("`"): (kind, labels_in(labels))
    for name, kind, labels, _ in rows(
        "Metrics", runpy.run_path(str(ROOT / "docs/site/metrics_page.py"))["render"]().replace("# M", "## M", 1)
    )
}
VALUES = {label for names, _ in rows("Labels") for label in labels_in(names)}


def families_of(registry: CollectorRegistry) -> dict[str, tuple[str, frozenset[str]]]:
    """(type, labels) of everything that is registered, by the name of its series, also of what has no series yet."""
    found = {}
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            labelled: Any = collector if hasattr(collector, "_labelnames") else family
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if name.startswith(OF_THE_PROCESS):
                continue
            found[name] = (family.type, frozenset(labelled._labelnames))
    return found


@pytest.fixture(scope="module")
def shown(redis_server: RedisServer) -> Iterator[tuple[str, dict[str, tuple[str, frozenset[str]]]]]:
    """The page of a service with tasks after a call of a named session, and what its registry holds."""
    redis_server.flushall()
    kept: list[Services] = []

    def keep(services: Services) -> Addition:
        kept.append(services)
        return Addition(APIRouter(), contextlib.nullcontext)

    adding: list[Any] = [partial(add_rollouts, KNOWN), keep]
    settings: dict[str, Any] = {"engine_api": "token", "admission": {"groups_per_version": 8, "staleness": 8}}
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, adding=adding, **settings) as service:
        session = service.session(session_id=IDS[0], group_id=IDS[1], task_id=IDS[2])
        session.ask("hello")
        session.close(reward=1.0)
        yield service.request("GET", "/metrics").text, families_of(kept[0].metrics.registry)


def test_every_family_is_documented_with_its_type_and_labels(shown: Any) -> None:
    assert shown[1] == DOCUMENTED
    on_the_page = {family.name: family for family in text_string_to_metric_families(shown[0])}
    names = {f"{name}_total" if family.type == "counter" else name for name, family in on_the_page.items()}
    assert {name for name in names if not name.startswith(OF_THE_PROCESS)} == DOCUMENTED.keys()


def test_names_keep_the_conventions(shown: Any) -> None:
    for name, (kind, _) in DOCUMENTED.items():
        assert re.fullmatch(r"verbatim_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter"), name
        assert kind != "histogram" or name.endswith("_seconds"), name


def test_labels_are_bounded_and_name_nobody(shown: Any) -> None:
    used = {label for _, labels in DOCUMENTED.values() for label in labels}
    assert used == VALUES, "the table of labels says what bounds each"
    assert [each for each in IDS if each in shown[0]] == []


def test_the_page_passes_promtool(shown: Any, tmp_path: Path) -> None:
    """Its expressions too: each as a recording rule, which promtool parses as Prometheus does."""
    recorded = [{"record": f"x:{number}", "expr": each} for number, each in enumerate(expressions().values())]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]}))
    done = promtool("check", "rules", str(RULES), str(tmp_path / "all.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    checked = promtool("check", "metrics", given=shown[0])
    assert checked.returncode == 0, checked.stderr


def test_alerts_and_dashboard_read_only_what_is_there() -> None:
    for where, expression in expressions().items():
        read = list(selected(expression))
        assert read, where
        of_all = set().union(*(DOCUMENTED[name][1] for name, _ in read))
        for name, matched in read:
            assert matched <= DOCUMENTED[name][1] | OF_THE_SCRAPE, where
        assert grouped(expression) <= of_all | OF_THE_SCRAPE | {"le"}, where


def test_every_family_is_on_the_dashboard() -> None:
    shown_there = {name for panel in panels() for target in panel["targets"] for name, _ in selected(target["expr"])}
    assert shown_there == DOCUMENTED.keys()


def test_the_dashboard_is_whole() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    known = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) <= known
    spans = [(panel["gridPos"]["x"], panel["gridPos"]["w"]) for panel in board["panels"]]
    assert all(x + width <= 24 for x, width in spans)


def test_every_alert_says_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description", "action"} and all(rule["annotations"].values()), rule[
            "alert"
        ]


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    cases = yaml.safe_load((ROOT / "tests/support/documents/alert_cases.yaml").read_text())
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"rule_files": [str(RULES)], **cases}))
    done = promtool("test", "rules", str(tmp_path / "cases.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
