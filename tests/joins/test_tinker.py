"""tinker and its cookbook, real: leased rows are the data that the cookbook makes of the same calls, array by array."""

from __future__ import annotations

import json
from pathlib import Path

from examples.demo.tiny_model import make_tiny_model
from tests import ROOT
from tests.joins.conftest import Framework
from tests.support.sessions.finished_groups import finish, service_of


def test_leased_rows_are_the_data_of_the_cookbook(client_wheel: Path, redis_url: str, tmp_path: Path) -> None:
    """Two groups of agents of two and of three turns."""
    with service_of(make_tiny_model(tmp_path / "model", layers=1, hidden_size=64), redis_url) as service:
        ids = [*finish(service, "a", [1.0, 0.0, 0.5]), *finish(service, "b", [0.0, 1.0], turns=3)]
        told = (service.request("GET", f"/sessions/{each}/trajectories").json()["accounting"] for each in ids)
        sampled = sum(accounting["sampled_tokens"] for accounting in told)
        said = (
            Framework("trainers", tmp_path, client_wheel, service.url).run("python", ROOT / "tests/joins/tinker_rows.py").stdout
        )
    assert json.loads(said.splitlines()[-1]) == {"data": 5, "trained": sampled}
