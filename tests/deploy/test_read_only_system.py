"""The service as the chart and the compose file run it: as nobody in particular, on a system that it cannot write to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.support.documents.helm_chart import container, environment, pod_of, the
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.machine import require
from tests.support.service import plain_http
from tests.support.service.verbatim_process import Serving, wait_until

HERE = {
    "VERBATIM_HOST",
    "VERBATIM_PORT",
    "VERBATIM_CONTROL_PORT",
    "VERBATIM_ENGINE",
    "VERBATIM_REDIS",
    "VERBATIM_ADMIN_TOKEN_FILE",
    "VERBATIM_TRAINER_TOKEN_FILE",
    "VERBATIM_NODE_TOKEN_FILE",
}
"""What is another here than in the cluster."""
CODE = dict.fromkeys((str(ROOT), sys.prefix, sys.base_prefix))
"""Bound again: they may lie in /tmp, which the sandbox replaces."""
READ_ONLY = [
    *("--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp"),
    *(word for folder in CODE for word in ("--ro-bind", folder, folder)),
    *("--chdir", "/"),
]
NOBODY = ["--unshare-user", "--uid", "10001", "--gid", "10001", "--cap-drop", "ALL", "--die-with-parent"]


def test_the_service_serves_where_it_may_write_nothing_but_tmp(redis_url: str) -> None:
    bwrap = require("bwrap")
    told = environment(container(pod_of(the({}, "Deployment", "-proxy")) or {}))
    asked: dict[str, Any] = {name: value for name, value in told.items() if value and name not in HERE}
    # Images make no byte code; their data directory is there and cannot be written to.
    asked |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/", "VERBATIM_CONTROL_PORT": "0"}
    with (
        ScriptedEngine() as engine,
        Serving(
            "--redis", redis_url, "--engine", engine.url, data_dir=Path("/"), inside=[bwrap, *READ_ONLY, *NOBODY], **asked
        ) as service,
    ):
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 120, f"ready; {service.stderr}")
        opened = service.request("POST", "/sessions", json={}).json()
        body = {"model": "policy", "messages": [{"role": "user", "content": "Say hello."}]}
        chat, key = opened["base_urls"]["openai"] + "/chat/completions", {"Authorization": f"Bearer {opened['api_key']}"}
        assert plain_http.post(chat, headers=key, json=body).status_code == 200
        assert service.request("GET", "/ui").status_code == 200
        assert "Traceback" not in service.stderr
