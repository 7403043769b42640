"""What a push of new weights costs the harnesses: seconds without a token, by mode, over real replicas under load.

Two vLLMs with a tiny model behind the service; clients stream replies without a pause, and a trainer pushes checkpoints, one after the
other, in each mode. Per push: the time that the replicas stood paused, in which they sample nothing (`paused`, the mean over them); and
what the clients saw of it: the longest time in which none of them got any text (`silent`), and the text events that were missing
against the rate before, as seconds of that rate (`lost`). Steps take their time, so there is silence without a push, too: the same
over the seconds before it is the base line. A call counts as failed when it gets an error or breaks off; one that `abort` cuts ends
with what it has.

And what a gigabyte costs: one vLLM with a larger model, whose checkpoint is pushed with nobody calling, from the path to the moment
at which a call has been answered under the new version.

    python -m benchmarks.weights [--quick]
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from urllib.parse import urlsplit

from benchmarks.processes import redis_server, request, serving
from benchmarks.results import Grid, main, number, progress, spread
from examples.demo.tiny_model import make_tiny_model
from examples.vllm_server import VllmServer, free_port, vllm_command

MODES = ("keep", "wait", "abort")
TOKENS = 160
"""Length of a reply that is not cut."""
STEADY_SECONDS = 6.0
"""Load before each push, over which its rate is taken."""
WIDTH, LAYERS, QUICK_LAYERS = 1024, 10, 1
"""Of the larger model: about 50 MB a layer, in float32."""


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
    """Clients that stream one reply after the other, of letters, so that each token is text at once. `seen` are the moments at which text
    arrived, of all of them."""

    def __init__(self, url: str, clients: int, model: Path) -> None:
        self.seen: list[float] = []
        self.calls = self.failed = 0
        self._letters = find_letters(model)
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
        body |= {"ignore_eos": True, "allowed_token_ids": self._letters}
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


def find_letters(model: Path) -> list[int]:
    """The tokens that are one letter. Others may be a part of a character, of which a client sees nothing until it is whole."""
    from transformers import AutoTokenizer

    return [int(token) for token in AutoTokenizer.from_pretrained(model).convert_tokens_to_ids([*ascii_lowercase])]


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


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """First the modes, then the gigabyte as well."""
    pushes, clients, count = (1, 2, 1) if quick else (3, 8, 2)
    with progress() as bar:
        task = bar.add_task("weights", total=pushes * len(MODES) + pushes + 1)
        found = under_load(pushes, clients, count, lambda: bar.advance(task))
        yield found
        checkpoints = per_gigabyte(QUICK_LAYERS if quick else LAYERS, pushes + 1, lambda: bar.advance(task))
        yield found | {"checkpoints": [checkpoints]}


def under_load(pushes: int, clients: int, count: int, advance: Callable[[], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-") as name, ExitStack() as stack:
        folder = Path(name)
        checkpoints = [make_tiny_model(folder / f"seed{seed}", seed=seed) for seed in (0, 1)]
        urls = stack.enter_context(replicas(checkpoints[0], count, folder))
        port = stack.enter_context(redis_server())
        more = [flag for url in urls[1:] for flag in ("--engine", url)]
        _, url = stack.enter_context(serving(urls[0], port, *more))
        pushed = []
        with Load(url, clients, checkpoints[0]) as load:
            for place in range(pushes * len(MODES)):
                checkpoint = checkpoints[(place + 1) % 2]
                pushed.append(measure(url, load, place + 1, checkpoint, MODES[place % len(MODES)]))
                advance()
        calls = {"calls": load.calls, "failed": load.failed, "events_seen": len(load.seen)}
    setup = {"replicas": count, "clients": clients, "pushes_per_mode": pushes, "tokens_per_reply": TOKENS}
    return {**setup, **calls, "modes": summary(pushed), "pushes": [asdict(item) for item in pushed]}


def per_gigabyte(layers: int, pushes: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Pushes of one checkpoint to one replica, nobody calling. The first is not counted: the file is read from disk in it."""
    with tempfile.TemporaryDirectory(prefix="verbatim-benchmark-") as name, ExitStack() as stack:
        folder = Path(name)
        model = make_tiny_model(folder / "model", hidden_size=WIDTH, layers=layers)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        (engine,) = stack.enter_context(replicas(model, 1, folder))
        port = stack.enter_context(redis_server())
        _, url = stack.enter_context(serving(engine, port))
        seconds, serving_seconds, paused = [], [], []
        for version in range(1, pushes + 1):
            began = time.perf_counter()
            answer = request(url, "POST", "/weights", {"version": version, "path": str(model), "mode": "keep"})
            seconds.append(time.perf_counter() - began)
            _sampled_under(url, version)
            serving_seconds.append(time.perf_counter() - began)
            paused.append(statistics.fmean(replica["paused_seconds"] for replica in answer["replicas"].values()))
            advance()
    gigabytes = size / 1e9
    return {
        "bytes": size,
        "pushes": pushes - 1,
        "push_seconds": spread(seconds[1:]),
        "serving_seconds": spread(serving_seconds[1:]),
        "paused_seconds": spread(paused[1:]),
        "seconds_per_gb": spread(value / gigabytes for value in serving_seconds[1:]),
        "paused_seconds_per_gb": spread(value / gigabytes for value in paused[1:]),
    }


def _sampled_under(url: str, version: int) -> None:
    """Returns when a call has been answered; its token is of that version."""
    session = request(url, "POST", "/sessions", {})
    body = {"model": "policy", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 1}
    request(url, "POST", f"/s/{session['session_id']}/v1/chat/completions", body, token=session["api_key"])
    calls = request(url, "GET", f"/sessions/{session['session_id']}/calls")["calls"]
    versions = [span[0] for span in calls[0]["weight_versions"]]
    assert versions == [version], f"version {version} was pushed, {versions} sampled"


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


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    columns = ("mode", "push s", "silent s", "silent s, most", "silent s without a push", "lost s", "a replica paused s")
    names = ("seconds", "silent_seconds", "silent_seconds_most", "base_silent_seconds", "lost_seconds", "paused_seconds")
    rows = tuple((mode, *(number(figures[name]) for name in names)) for mode, figures in result["modes"].items())
    failed = f"{result['failed']} of {result['calls']} calls failed"
    title = f"{result['replicas']} replicas of a tiny model, {result['clients']} clients; {failed}"
    grids = [Grid(title, columns, rows)]
    checkpoints = result.get("checkpoints")
    return [*grids, _gigabyte(checkpoints)] if checkpoints else grids


def _gigabyte(checkpoints: Sequence[dict[str, Any]]) -> Grid:
    names = ("push_seconds", "serving_seconds", "paused_seconds", "seconds_per_gb", "paused_seconds_per_gb")
    rows = tuple((number(found["bytes"] / 1e6), *(number(found[name]["median"]) for name in names)) for found in checkpoints)
    columns = ("checkpoint MB", "push s", "path to serving s", "paused s", "path to serving, s per GB", "paused, s per GB")
    return Grid("One replica, nobody calling: from the path of a checkpoint to a call that it answers", columns, rows)


if __name__ == "__main__":
    main("weights", __doc__, run, tables, alone=False)
