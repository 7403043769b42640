"""Returns when vLLM has nothing to do any more, or after so many seconds: `drain_engine.py METRICS_URL SECONDS`.

Before an engine's pod ends. The proxies learn from the name service that it goes; until they all have, calls may still come, so it
has to be idle for a while. Needs nothing but Python.
"""

import sys
import time
import urllib.request

BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
POLL_SECONDS = 1.0
IDLE_SECONDS = 40.0
"""Longer than a name service's answers are kept for (30), and the proxies' own look (3)."""


def requests_under_way(page: str) -> float:
    """By vLLM's metrics."""
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith(BUSY)]
    return sum(float(value) for name, _, value in lines if name.partition("{")[0] in BUSY)


def is_idle(url: str) -> bool:
    """An engine that does not answer is not asked to go on."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return requests_under_way(response.read().decode()) == 0
    except OSError:
        return True


def drain(url: str, seconds: float, idle_seconds: float = IDLE_SECONDS, poll_seconds: float = POLL_SECONDS) -> None:
    end = time.monotonic() + seconds
    idle_since = time.monotonic()
    while (now := time.monotonic()) < end:
        if not is_idle(url):
            idle_since = time.monotonic()
        elif now - idle_since >= idle_seconds:
            return
        time.sleep(poll_seconds)


if __name__ == "__main__":
    drain(sys.argv[1], float(sys.argv[2]))
