"""Evidence: what only one engine can say, so that two different answers come from two engines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.engine.apis.probe import SGLANG_INFO
from proxy.engine.in_vllm.frames import ROUTE


@dataclass(frozen=True, slots=True)
class Source:
    """What tells engines apart: the first of the `routes` that has it is read. `body`: what is posted there, which costs the engine
    a step, so only where nothing else tells. `steady`: only an engine that starts again says something else."""

    name: str
    routes: tuple[str, ...]
    read: Callable[[bytes], str]
    body: dict[str, Any] | None = None
    steady: bool = True


def _read_fields(*names: str) -> Callable[[bytes], str]:
    def read(content: bytes) -> str:
        answer = parse_object(content)
        values = [str(answer[name]) for name in names if answer.get(name) is not None]
        return " ".join(values) if len(values) == len(names) else ""

    return read


def _read_worker(content: bytes) -> str:
    workers = parse_object(content).get("results")
    first = workers[0] if isinstance(workers, list) and workers else None
    return str(first.get("engine") or "") if isinstance(first, dict) else ""


_START = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)


def _read_start(content: bytes) -> str:
    found = _START.search(content)
    return found[1].decode("latin-1") if found else ""


PLUGIN = Source("plugin", (ROUTE,), _read_fields("engine"))
START = Source("start", ("/metrics/?name%5B%5D=process_start_time_seconds", "/metrics"), _read_start)
"""Only a server of one process says when it started. The first route is spared all other metrics."""
WORKERS = Source("workers", ("/collective_rpc",), _read_worker, {"method": "verbatim_weights"})
SEED = Source("seed", SGLANG_INFO, _read_fields("random_seed", "port"))
LABEL = Source("label", ("/weight_info", "/model_info", "/get_model_info"), _read_fields("weight_version"), steady=False)


def parse_object(content: bytes) -> dict[str, Any]:
    """Empty for what is no JSON object."""
    try:
        answer = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return answer if isinstance(answer, dict) else {}
