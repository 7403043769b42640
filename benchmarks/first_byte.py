"""What the service adds before a stream begins and before its first text: a real vLLM asked directly and through each path and
dialect, in turn.

Every round asks all of them once, in an order of its own, the same new question each behind a number of its own: no prompt is longer
than another, and the engine's cache knows none. What is compared is the median over the rounds. "first byte" is that of the stream's
body, "first text" the first event that carries sampled text, whatever the dialect calls it; ids, where the engine is asked for those
alone. vLLM is asked as a harness would ask it, and as each path of the service asks it: for chat completions with ids and logprobs, and
for a rendering and then for what follows its ids. The service's figures are compared with what vLLM takes for the same by itself
("added": of the medians; "by round": the median of what each round says, and between what that lies with a confidence of 95 %), and with
its chat completions ("to chat"). The service has its embedded store, and once a Redis over TCP; what nginx adds that hands on and reads
nothing is what any hop costs on this machine.

The service with its store, and nginx, have one core, and vLLM and who asks the others, where there are two: an engine that samples on
the CPU would else stand in the way.

    python -m benchmarks.first_byte [--rounds 60] [--prompt-words 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from benchmarks.cores import cores, pinned
from benchmarks.nginx import passing
from benchmarks.processes import machine, redis_server, request, serving
from benchmarks.results import Grid
from examples.demo.tiny_model import make_tiny_model
from examples.vllm_server import VllmServer, free_port, make_one_process_env, vllm_command
from proxy.engine.apis.vllm_reply import GENERATE

TOKENS = 16
WARM_UP_ROUNDS = 15
PAUSE_SECONDS = 0.03
"""After each call, for what it leaves to be done behind it."""
Body = dict[str, Any]


CHAT, IDS = "vLLM, chat with ids and logprobs", "vLLM, render and generate"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the model: where to post, under which key, and how its dialect spells a question. `base` names the way that it is
    compared with; `renders`: the engine is asked for a rendering first, and then for what follows its ids."""

    name: str
    url: str
    path: str
    key: str
    more: Mapping[str, Any] = field(default_factory=dict)
    base: str = CHAT
    renders: bool = False

    def body(self, question: str) -> Body:
        if self.path.endswith("/responses"):
            return {"model": "policy", "input": question, "max_output_tokens": TOKENS, "stream": True}
        if ":stream" in self.path:
            limits = {"maxOutputTokens": TOKENS, "thinkingConfig": {"includeThoughts": True}}
            return {"contents": [{"role": "user", "parts": [{"text": question}]}], "generationConfig": limits}
        body: Body = {
            "model": "policy",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": TOKENS,
            "stream": True,
        }
        if self.path.endswith("/messages"):
            body["thinking"] = {"type": "adaptive"}
        return body | dict(self.more)

    def seconds_to_first(self, question: str) -> tuple[float, float | None]:
        """Until the first byte of the answer's body, and until its first text: None when the random model said nothing."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        connection.connect()
        content = json.dumps(self.body(question))
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        started = time.perf_counter()
        if self.renders:
            connection.request("POST", parts.path + "/v1/chat/completions/render", content, headers)
            rendered = json.loads(connection.getresponse().read())
            sampling = {**rendered["sampling_params"], "max_tokens": TOKENS, "logprobs": 0}
            content = json.dumps({**rendered, "sampling_params": sampling, "stream": True, "return_token_ids": False})
        connection.request("POST", parts.path + self.path, content, headers)
        answer = connection.getresponse()
        answer.peek(1)
        begun = time.perf_counter() - started
        told = next((time.perf_counter() - started for event in _events(answer) if _text(event)), None)
        if answer.status != 200:
            raise SystemExit(f"{self.name}: status {answer.status}: {answer.read()[:300]!r}")
        answer.read()
        connection.close()
        return begun, told


def _events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    while line := answer.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _text(event: Any) -> bool:
    """Whether the event carries sampled text: any of the places where a dialect puts it."""
    if event.get("type", "").endswith("delta"):
        delta = event["delta"]
        return bool(delta if isinstance(delta, str) else delta.get("text") or delta.get("thinking"))
    for choice in event.get("choices") or ():
        # The engine's ids are as near to text as it comes with them.
        if any(choice.get("delta", choice).get(name) for name in ("content", "reasoning_content", "reasoning", "token_ids")):
            return True
    return any(part.get("text") for candidate in event.get("candidates") or () for part in candidate["content"]["parts"])


@contextmanager
def ways() -> Iterator[list[Way]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-benchmark-")))
        port = free_port()
        argv, env = vllm_command(make_tiny_model(folder / "model", seed=0), port, reasoning_parser="qwen3")
        env |= {"HF_HUB_OFFLINE": "1", **make_one_process_env(len(cores("load")) or 1)}
        engine = VllmServer(pinned(argv, "load"), env, f"http://127.0.0.1:{port}", folder / "vllm.log")
        stack.enter_context(engine)
        asked = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        made = [
            Way("vLLM, chat", engine.url, "/v1/chat/completions", ""),
            Way(CHAT, engine.url, "/v1/chat/completions", "", asked),
            Way(IDS, engine.url, GENERATE, "", base=IDS, renders=True),
        ]
        _, url = stack.enter_context(passing(engine.url, folder / "nginx", at_once=True))
        made.append(Way("nginx, chat", url, "/v1/chat/completions", "", asked))
        for name, redis_port in (("", None), (", Redis over TCP", stack.enter_context(redis_server("tested")))):
            _, url = stack.enter_context(serving(engine.url, redis_port, "--engine-api", "chat", side="tested"))
            made.append(_way(url, f"chat path, chat{name}", "/v1/chat/completions", CHAT))
        _, url = stack.enter_context(serving(engine.url, None, "--engine-api", "token", side="tested"))
        made.append(_way(url, "token path, chat", "/v1/chat/completions"))
        made.append(_way(url, "token path, responses", "/v1/responses"))
        made.append(_way(url, "token path, messages", "/v1/messages"))
        made.append(_way(url, "token path, gemini", "/v1beta/models/policy:streamGenerateContent?alt=sse"))
        if theirs := cores("load"):
            # Beside the engine; last, since what is started gets no more cores than who starts it.
            os.sched_setaffinity(0, theirs)
        yield made


def _way(url: str, name: str, path: str, base: str = IDS) -> Way:
    session = request(url, "POST", "/sessions", {})
    return Way(name, f"{url}/s/{session['session_id']}", path, session["api_key"], base=base)


@dataclass(frozen=True, slots=True)
class Figures:
    median_ms: float
    p90_ms: float
    added_ms: float
    to_chat_ms: float
    added_by_round_ms: float
    by_round_within_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds: median and ninth decile, the median over that of the engine asked for the same directly, and over that of its
    chat completions; and the median over the rounds of what each took longer than the engine in the same round, with the interval in which
    that lies with a confidence of 95 %."""

    name: str
    byte: Figures
    text: Figures


def measure(made: list[Way], rounds: int, words: int) -> list[Measured]:
    dice = random.Random(1)
    bytes_ms: dict[str, dict[int, float]] = {way.name: {} for way in made}
    texts_ms: dict[str, dict[int, float]] = {way.name: {} for way in made}
    for number in range(WARM_UP_ROUNDS + rounds):
        question = " ".join(f"{dice.randrange(1000)}" for _ in range(words))
        for way in dice.sample(made, len(made)):
            begun, told = way.seconds_to_first(f"{dice.randrange(10**8):08} {question}")
            time.sleep(PAUSE_SECONDS)
            if number >= WARM_UP_ROUNDS and told is not None:
                bytes_ms[way.name][number] = begun * 1000
                texts_ms[way.name][number] = told * 1000
    return [Measured(way.name, compared(way, bytes_ms), compared(way, texts_ms)) for way in made]


def compared(way: Way, times: Mapping[str, Mapping[int, float]]) -> Figures:
    """`times` are by way and round; a round in which a way's model said nothing is missing there."""
    medians = {name: statistics.median(taken.values()) for name, taken in times.items()}
    taken, base, median = times[way.name], times[way.base], medians[way.name]
    longer = sorted(taken[place] - base[place] for place in taken.keys() & base.keys())
    return Figures(
        median_ms=median,
        p90_ms=sorted(taken.values())[len(taken) * 9 // 10],
        added_ms=median - medians[way.base],
        to_chat_ms=median - medians[CHAT],
        added_by_round_ms=statistics.median(longer),
        by_round_within_ms=median_within(longer),
    )


def median_within(ordered: Sequence[float]) -> tuple[float, float]:
    """The interval of 95 % confidence around the median of what the values were drawn from, whatever their distribution: how many of
    them lie below it is binomial, here taken for normal."""
    outside = max(int((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2), 0)
    return ordered[outside], ordered[-1 - outside]


def tables(result: dict[str, Any]) -> Sequence[Grid]:
    """First bytes, then first texts."""
    columns = ("way", "median ms", "90 % ms", "added ms", "added ms, by round", "to chat ms")
    grids = []
    for what in ("byte", "text"):
        rows = [(item["name"], *_row(item[what])) for item in result["ways"]]
        grids.append(Grid(f"First {what} of a stream, one call at a time", columns, tuple(rows)))
    return grids


def _row(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{figures[name]:.1f}" for name in ("median_ms", "p90_ms"))
    yield f"{figures['added_ms']:+.1f}"
    least, most = figures["by_round_within_ms"]
    yield f"{figures['added_by_round_ms']:+.1f} ({least:+.1f} to {most:+.1f})"
    yield f"{figures['to_chat_ms']:+.1f}"


def _apart() -> str:
    """Who is on which core."""
    ours, theirs = cores("tested"), cores("load")
    if ours == theirs:
        return "nothing pinned"
    return f"the service with its store, and nginx, on core {ours[0]}; vLLM and who asks on {', '.join(map(str, theirs))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prompt-words", type=int, default=200, help="numbers in the question, about four tokens each")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    asked = parser.parse_args()
    described = machine() | {"pinned": _apart()}
    with ways() as made:
        measured = measure(made, asked.rounds, asked.prompt_words)
    result = {"machine": described, "ways": [asdict(item) for item in measured]}
    for grid in tables(result):
        Console().print(grid.rich())
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
