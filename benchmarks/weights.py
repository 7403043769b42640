"""What a push of new weights costs the harnesses: seconds without a token, by mode, over real replicas under load.

Two vLLMs with a tiny model behind the service; clients stream replies without a pause, and a trainer pushes checkpoints, one after the
other, in each mode. Per push: the time that the replicas stood paused, in which they sample nothing (`paused`, the mean over them); and
what the clients saw of it: the longest time in which none of them got any text (`silent`), and the text events that were missing
against the rate before, as seconds of that rate (`lost`). Text is told in pieces, so there is silence without a push, too: the same
over the seconds before it is the base line. A call counts as failed when it gets an error or breaks off; one that `abort` cuts ends
with what it has.

    python -m benchmarks.weights [--pushes 5] [--clients 8] [--replicas 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks.processes import machine, redis_server, request, serving
from examples.demo.tiny_model import make_tiny_model
from proxy.engine.vllm_launch import VllmServer, free_port, vllm_command

MODES = ("keep", "wait", "abort")
TOKENS = 160
"""Length of a reply that is not cut."""
STEADY_SECONDS = 8.0
"""Load before each push, over which its rate is taken."""


@dataclass(frozen=True, slots=True)
class Pushed:
    mode: str
    seconds: float
    silent_seconds: float
    base_silent_seconds: float
    lost_seconds: float
    paused_seconds: float
    ok: bool


class Load:
    """Clients that stream one reply after the other. `seen` are the moments at which text arrived, of all of them."""

    def __init__(self, url: str, clients: int) -> None:
        self.seen: list[float] = []
        self.calls = self.failed = 0
        self._url = url
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def between(self, start: float, end: float) -> list[float]:
        return sorted(moment for moment in list(self.seen) if start <= moment < end)

    def _run(self, number: int) -> None:
        session = request(self._url, "POST", "/sessions", {})
        turn = 0
        while not self._stopping.is_set():
            turn += 1
            question = f"client {number} asks question {turn}"
            self.calls += 1
            try:
                reason = self._ask(session, question)
            except (OSError, http.client.HTTPException, ValueError):
                reason = None
            self.failed += reason is None

    def _ask(self, session: dict[str, Any], question: str) -> str | None:
        """The reply's finish reason; None when it got an error or never ended."""
        where = urlsplit(session["base_urls"]["openai"])
        assert where.hostname is not None
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=300)
        body = {"model": "policy", "messages": [{"role": "user", "content": question}], "max_tokens": TOKENS, "stream": True}
        # A random model soon samples its end.
        body["ignore_eos"] = True
        headers = {"authorization": f"Bearer {session['api_key']}", "content-type": "application/json"}
        try:
            connection.request("POST", f"{where.path}/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            return self._read(response) if response.status == 200 else None
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> str | None:
        reason = None
        for line in response:
            if not line.startswith(b"data:"):
                continue
            if b"[DONE]" in line:
                return reason
            event = json.loads(line[5:])
            if "error" in event:
                return None
            for choice in event.get("choices", ()):
                reason = choice.get("finish_reason") or reason
                if choice.get("delta", {}).get("content"):
                    self.seen.append(time.monotonic())
        return None


def longest_silence(moments: Sequence[float], start: float, end: float) -> float:
    """Seconds of the longest time between `start` and `end` in which nothing came."""
    return max(after - before for before, after in pairwise([start, *moments, end]))


def measure(url: str, load: Load, version: int, checkpoint: Path, mode: str) -> Pushed:
    began = time.monotonic()
    time.sleep(STEADY_SECONDS)
    start = time.monotonic()
    answer = request(url, "POST", "/weights", {"version": version, "path": str(checkpoint), "mode": mode})
    end = time.monotonic()
    # Until tokens flow again, which is what a harness waits for.
    while not (after := load.between(end, time.monotonic())):
        time.sleep(0.01)
    resumed = after[0]
    before, during = load.between(began, start), load.between(start, resumed)
    rate = len(before) / (start - began)
    replicas = answer["replicas"].values()
    return Pushed(
        mode=mode,
        seconds=end - start,
        silent_seconds=longest_silence(during, start, resumed),
        base_silent_seconds=longest_silence(before, began, start),
        lost_seconds=max(0.0, (resumed - start) - len(during) / rate),
        paused_seconds=statistics.fmean(replica["paused_seconds"] for replica in replicas),
        ok=answer["applied"] and all(replica["ok"] for replica in replicas),
    )


@contextmanager
def replicas(model: Path, count: int, folder: Path) -> Iterator[list[str]]:
    """URLs of so many vLLMs, started together."""
    with ExitStack() as stack:
        servers = []
        for number in range(count):
            port = free_port()
            # Without parsers every token is text at once; the parser of reasoning would hold a random model's back.
            argv, env = vllm_command(model, port, tool_parser=None)
            server = VllmServer(argv, env, f"http://127.0.0.1:{port}", folder / f"vllm-{number}.log", deadline_seconds=900)
            server.start()
            stack.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.wait_until_ready()
        yield [server.url for server in servers]


def run(pushes: int, clients: int, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-") as name, ExitStack() as stack:
        folder = Path(name)
        checkpoints = [make_tiny_model(folder / f"seed{seed}", seed=seed) for seed in (0, 1)]
        urls = stack.enter_context(replicas(checkpoints[0], count, folder))
        port = stack.enter_context(redis_server())
        more = [flag for url in urls[1:] for flag in ("--engine", url)]
        _, url = stack.enter_context(serving(urls[0], port, *more))
        measured = []
        with Load(url, clients) as load:
            for number in range(pushes * len(MODES)):
                checkpoint = checkpoints[(number + 1) % 2]
                measured.append(measure(url, load, number + 1, checkpoint, MODES[number % len(MODES)]))
        calls = {"calls": load.calls, "failed": load.failed, "events_seen": len(load.seen)}
    setup = {"replicas": count, "clients": clients, "pushes_per_mode": pushes, "tokens_per_reply": TOKENS}
    return {"machine": machine(), **setup, **calls, "modes": summary(measured), "pushes": [asdict(item) for item in measured]}


def summary(measured: Sequence[Pushed]) -> dict[str, dict[str, float]]:
    """Per mode the median of each figure, and the largest silence."""
    found: dict[str, dict[str, float]] = {}
    for mode in MODES:
        items = [item for item in measured if item.mode == mode]
        names = ("seconds", "silent_seconds", "base_silent_seconds", "lost_seconds", "paused_seconds")
        found[mode] = {name: round(statistics.median(getattr(item, name) for item in items), 3) for name in names}
        found[mode]["silent_seconds_most"] = round(max(item.silent_seconds for item in items), 3)
        found[mode]["pushes_ok"] = sum(item.ok for item in items)
    return found


def table(result: dict[str, Any]) -> Table:
    title = f"{result['replicas']} replicas, {result['clients']} clients; seconds per push, medians; {result['failed']} calls failed"
    shown = Table("mode", "push", "silent", "silent at most", "silent without a push", "lost", "a replica paused", title=title)
    names = ("seconds", "silent_seconds", "silent_seconds_most", "base_silent_seconds", "lost_seconds", "paused_seconds")
    for mode, figures in result["modes"].items():
        shown.add_row(mode, *(f"{figures[name]:.3f}" for name in names))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=5, help="per mode")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    options = parser.parse_args()
    result = run(options.pushes, options.clients, options.replicas)
    Console().print(table(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
