"""Serving processes and the one that supervises them."""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT

INTERRUPTED = """
import signal
from multiprocessing import popen_spawn_posix
from cli.serving.workers import Workers
from proxy.settings import Settings

launch = popen_spawn_posix.Popen._launch

def launch_interrupted(popen, process):
    signal.raise_signal(signal.SIGINT)
    launch(popen, process)
    signal.raise_signal(signal.SIGINT)

popen_spawn_posix.Popen._launch = launch_interrupted
Workers(Settings(), [], 1, "info").run(lambda: None, lambda: print("forced", flush=True))
"""


def test_ctrl_c_while_a_worker_is_started_stops_the_service() -> None:
    """It is one Ctrl-C, as often as it comes before it can be handled."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
