"""What the service adds before a stream begins and before its first text: a real vLLM asked directly and through each path and
dialect, in turn.

Every round asks all of them once, in an order of its own, the same new question each; what is compared is the median over the
rounds. "first byte" is that of the stream's body, "first text" the first event that carries sampled text, whatever the dialect calls
it. vLLM is asked as a harness would ask it, and as the service asks it: with ids and logprobs, which cost it something of its own;
the latter is what the service's figures are compared with.

    python -m benchmarks.first_byte [--rounds 60] [--prompt-words 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks.processes import machine, redis_server, request, serving
from examples.demo.tiny_model import make_tiny_model
from proxy.engine.vllm_launch import VllmServer, free_port, vllm_command

TOKENS = 16
WARM_UP_ROUNDS = 5
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the model: where to post, under which key, and how its dialect spells a question."""

    name: str
    url: str
    path: str
    key: str
    more: Mapping[str, Any] = field(default_factory=dict)

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
        if any(choice["delta"].get(name) for name in ("content", "reasoning_content", "reasoning")):
            return True
    return any(part.get("text") for candidate in event.get("candidates") or () for part in candidate["content"]["parts"])


@contextmanager
def ways() -> Iterator[list[Way]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-benchmark-")))
        port = free_port()
        argv, env = vllm_command(make_tiny_model(folder / "model", seed=0), port, reasoning_parser="qwen3")
        engine = VllmServer(argv, env | {"HF_HUB_OFFLINE": "1"}, f"http://127.0.0.1:{port}", folder / "vllm.log")
        stack.enter_context(engine)
        redis_port = stack.enter_context(redis_server())
        asked = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        made = [
            Way("vLLM itself", engine.url, "/v1/chat/completions", ""),
            Way("vLLM, ids and logprobs", engine.url, "/v1/chat/completions", "", asked),
        ]
        for api in ("chat", "token"):
            _, url = stack.enter_context(serving(engine.url, redis_port, "--engine-api", api))
            made.append(_way(url, f"{api} path, chat", "/v1/chat/completions"))
        made.append(_way(url, "token path, responses", "/v1/responses"))
        made.append(_way(url, "token path, messages", "/v1/messages"))
        made.append(_way(url, "token path, gemini", "/v1beta/models/policy:streamGenerateContent?alt=sse"))
        yield made


def _way(url: str, name: str, path: str) -> Way:
    session = request(url, "POST", "/sessions", {})
    return Way(name, f"{url}/s/{session['session_id']}", path, session["api_key"])


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds: median and ninth decile, and the median over that of the engine asked for the same, directly."""

    name: str
    byte_median_ms: float
    byte_p90_ms: float
    byte_added_ms: float
    text_median_ms: float
    text_p90_ms: float
    text_added_ms: float


def measure(made: list[Way], rounds: int, words: int) -> list[Measured]:
    dice = random.Random(1)
    bytes_ms: dict[str, list[float]] = {way.name: [] for way in made}
    texts_ms: dict[str, list[float]] = {way.name: [] for way in made}
    for number in range(WARM_UP_ROUNDS + rounds):
        question = f"{number}: " + " ".join(f"{dice.randrange(1000)}" for _ in range(words))
        for way in dice.sample(made, len(made)):
            begun, told = way.seconds_to_first(f"{way.name} {question}")
            if number >= WARM_UP_ROUNDS and told is not None:
                bytes_ms[way.name].append(begun * 1000)
                texts_ms[way.name].append(told * 1000)
    return [Measured(way.name, *_against(made[1], way, bytes_ms), *_against(made[1], way, texts_ms)) for way in made]


def _against(base: Way, way: Way, times: Mapping[str, list[float]]) -> tuple[float, float, float]:
    taken = times[way.name]
    median = statistics.median(taken)
    return median, sorted(taken)[len(taken) * 9 // 10], median - statistics.median(times[base.name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prompt-words", type=int, default=200, help="numbers in the question, about four tokens each")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    asked = parser.parse_args()
    with ways() as made:
        measured = measure(made, asked.rounds, asked.prompt_words)
    table = Table("way", "first byte, median ms", "90 %", "added", "first text, median ms", "90 %", "added")
    for item in measured:
        byte = (f"{item.byte_median_ms:.1f}", f"{item.byte_p90_ms:.1f}", f"{item.byte_added_ms:+.1f}")
        text = (f"{item.text_median_ms:.1f}", f"{item.text_p90_ms:.1f}", f"{item.text_added_ms:+.1f}")
        table.add_row(item.name, *byte, *text)
    Console().print(table)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "ways": [asdict(item) for item in measured]}, indent=1))


if __name__ == "__main__":
    main()
