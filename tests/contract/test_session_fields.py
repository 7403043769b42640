"""A session's field is declared once, and nothing else has to be told of it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from pydantic import TypeAdapter

from contract.sessions import NewSession, OpeningFields, SessionView, SettledFields
from proxy.api.openapi import Schemas
from proxy.store.states import SessionInfo

ROOT = Path(__file__).parents[2]
SETTLED = {"sampling", "echo_policy", "replay"}
"""One form in a request, another once the session is open."""
SHARED_NAMES = {"task_id", "group_id", "group_size", "metadata", "sampling", "replay", "lookahead", "max_calls", "run"}
SHARED_NAMES |= {"scores", "trained"}
"""Rows, calls, engines, groups, leases and closes have fields of these names, too."""
SETTINGS = ("proxy/settings.py", "proxy/store/groups.py")
"""What the service's settings say where a session says nothing."""


def declarations(names: set[str]) -> Iterator[tuple[str, str, str]]:
    """File, class and name of each field of the product with one of the names."""
    looks_so = re.compile(rf"^    (?:{'|'.join(names)}): ", re.MULTILINE)
    for package in ("contract", "proxy", "rollout", "cli", "trainer_client"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            classes = (
                [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)] if looks_so.search(text) else []
            )
            for each in classes:
                for line in each.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id in names:
                        yield path.relative_to(ROOT).as_posix(), each.name, line.target.id


def test_each_field_of_a_session_is_declared_in_one_place() -> None:
    own = {each.name for each in fields(OpeningFields)} | SETTLED
    declared = list(declarations(own))
    here = Counter(name for path, _, name in declared if path == "contract/sessions.py")
    assert here == {name: 2 if name in SETTLED else 1 for name in own}
    elsewhere = [found for found in declared if found[0] not in ("contract/sessions.py", *SETTINGS)]
    assert [found for found in elsewhere if found[2] not in SHARED_NAMES] == []


def test_a_field_that_is_asked_for_is_stored_and_shown() -> None:
    asked, stored, shown = ({each.name for each in fields(kind)} for kind in (NewSession, SessionInfo, SessionView))
    assert asked == {each.name for each in fields(OpeningFields)} | {"session_id", "replay"}
    assert asked <= stored
    assert {each.name for each in fields(SettledFields)} <= asked & shown


def test_each_field_that_a_session_is_opened_with_is_described_with_its_limits_in_the_document() -> None:
    """Most are inherited, and pydantic reads the docstrings of a class's own fields only."""
    shown = TypeAdapter(NewSession).json_schema(schema_generator=Schemas)["properties"]
    assert [name for name, field in shown.items() if "description" not in field] == []
    assert (shown["group_size"]["minimum"], shown["group_size"]["maximum"]) == (1, 65536)
