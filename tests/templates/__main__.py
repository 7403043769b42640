"""Chat templates of real model families through the service: rows per conversation, and why more than one. `make templates`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests import ROOT
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService
from tests.templates.conversations import Played, play_all
from tests.templates.native_families import find_families

RESULTS = ROOT / "docs/results/templates.json"
"""Made into a page by docs/site/templates_page.py."""

Results = Mapping[str, Mapping[str, Played | str]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make templates", description=__doc__)
    parser.add_argument("names", nargs="*", help="only templates whose names contain one of these")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    names = [name for name in find_families() if not options.names or any(each in name for each in options.names)]
    results: dict[str, Mapping[str, Played | str]] = {}
    with running_redis() as redis:

        def serve(engine: ScriptedEngine) -> RunningService:
            return RunningService(engine.url, redis.url, engine_api="token")

        for name in names:
            results[name] = play_all(name, serve)
            print(f"{name}: {', '.join(map(_cell, results[name].values()))}", flush=True)  # noqa: T201
    if options.write:
        RESULTS.write_text(
            json.dumps(dict(sorted(as_json(results).items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    differing = [
        name for name, played in results.items() for each in played.values() if isinstance(each, Played) and each.differing
    ]
    return 1 if differing else 0


def as_json(results: Results) -> dict[str, Any]:
    """By template: by shape the rows and why they are more than one, None where it has no such conversation; a text where it has none."""
    return {
        name: {shape: _describe(each) for shape, each in shapes.items()}
        if any(isinstance(each, Played) for each in shapes.values())
        else str(next(iter(shapes.values())))
        for name, shapes in results.items()
    }


def _describe(played: Played | str) -> dict[str, Any] | None:
    if isinstance(played, str):
        return None
    return {"rows": played.rows, "reasons": played.reasons} if played.rows > 1 else {"rows": played.rows}


def _cell(played: Played | str) -> str:
    return str(played.rows) if isinstance(played, Played) else "–"


if __name__ == "__main__":
    sys.exit(main())
