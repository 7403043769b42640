"""A cluster for tests: `kube_server` as a process of its own, started once, and its kubeconfig."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from contract.tasks import RuntimeSpec
from rollout.runtimes.kubernetes.runtime import KubernetesKind
from rollout.runtimes.settings import RuntimeSettings
from tests import ROOT
from tests.support.machine import unavailable
from tests.support.runtimes.bwrap_container import LACKING
from tests.support.runtimes.runtime_places import GRACE_SECONDS, Place

_SERVER = Path(__file__).with_name("kube_server.py")


@dataclass(frozen=True, slots=True)
class TestCluster:
    url: str

    __test__ = False

    def sent(self) -> list[dict[str, Any]]:
        """Every object that was sent so far."""
        objects: list[dict[str, Any]] = httpx.get(f"{self.url}/test/sent", timeout=60).raise_for_status().json()
        return objects

    def do(self, what: str, told: Any = None) -> None:
        httpx.post(f"{self.url}/test/{what}", json=told, timeout=60).raise_for_status()


@functools.cache
def cluster() -> TestCluster:
    """It lives as long as this process; KUBECONFIG names it."""
    if importlib.util.find_spec("kubernetes") is None:
        unavailable("the package kubernetes is not installed")
    if os.geteuid() != 0 or LACKING:
        unavailable(f"a cluster needs root and {' '.join(LACKING)}")
    process = subprocess.Popen(
        [sys.executable, str(_SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin and process.stdout
    owner, stdin = os.getpid(), process.stdin

    def end() -> None:
        # A process that was forked off this one ends too.
        if os.getpid() == owner:
            stdin.close()
            process.wait(60)

    atexit.register(end)
    port = process.stdout.readline().strip()
    assert port, "the API server did not start"
    return TestCluster(f"http://127.0.0.1:{port}")


@functools.cache
def kubeconfig() -> Path:
    folder = tempfile.mkdtemp(prefix="kubeconfig")
    context = {"cluster": "test", "user": "test", "namespace": "rollouts"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": cluster().url}}],
        "users": [{"name": "test", "user": {"token": "of-the-test"}}],
        "contexts": [{"name": "test", "context": context}],
    }
    path = Path(folder, "config")
    path.write_text(json.dumps(config))
    return path


def in_pods(**settings: Any) -> Place:
    return Place(
        KubernetesKind(_settings(settings), grace_seconds=GRACE_SECONDS),
        RuntimeSpec(kind="kubernetes", image="python", memory_mb=256),
    )


def _settings(given: Mapping[str, Any]) -> RuntimeSettings:
    path = str(kubeconfig())
    from kubernetes.aio.config import kube_config

    # Read when the package was imported.
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = path
    return RuntimeSettings(**{"kubernetes_start_seconds": 120.0, **given})
