"""What a run of the demo leaves to look at."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from examples.demo.fleet import _keep_records
from examples.demo.plan import Plan
from tests.support.service import plain_http
from tests.support.service.verbatim_process import Serving, environment


def test_the_records_of_a_run_outlive_it_and_the_command_that_it_prints_shows_them(tmp_path: Path) -> None:
    """They were removed with the service, and there was nothing to open in a browser."""
    plan = Plan(out=tmp_path / "a folder", steps=1, seed=0, groups=1, rollouts=2, learning_rate=1e-3, gpu=False)
    plan.empty_out()
    with _keep_records(plan) as folder, Serving("--engine", "http://127.0.0.1:9", data_dir=folder / "service") as service:
        assert service.request("POST", "/sessions", json={"session_id": "kept"}).status_code == 201
        service.stop()
    assert not folder.exists()
    shown = subprocess.Popen(["bash", "-c", f"exec env {plan.viewer}"], env=environment(), stdout=subprocess.PIPE, text=True)
    with shown:
        try:
            pages = next(found[1] for line in shown.stdout if (found := re.match(r"pages: (\S+)", line)))
            page = plain_http.request("GET", f"{pages}/sessions/kept")
        finally:
            shown.terminate()
    assert page.status_code == 200 and "kept" in page.text
    plan.empty_out()
    assert not plan.data_dir.exists()
