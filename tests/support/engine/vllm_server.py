"""A real vLLM with a tiny random model for the tests: started once per run, stopped with all its processes.

Without vLLM the tests that need it are skipped with the reason; in CI (`CI=true`) they fail instead.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.vllm_server import VllmServer, vllm_command
from tests.support.engine.forked_vllm import ForkedVllmServer
from tests.support.machine import unavailable
from tests.support.service.redis_server import free_port

if TYPE_CHECKING:
    from examples.screen.tiny_vision_model import Family


def require_vllm() -> None:
    missing = [name for name in ("vllm", "torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        unavailable(f"{', '.join(missing)} is not installed")


_SERVE = """
from prometheus_client import values
from vllm.entrypoints.cli.serve import run_multi_api_server
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # since 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args

args = make_arg_parser(FlexibleArgumentParser()).parse_args()
validate_parsed_serve_args(args)
# Imported before the processes shared their metrics, it would keep its own.
values.ValueClass = values.MultiProcessValue()
run_multi_api_server(args)
"""
"""What `vllm serve` does of `--api-server-count`, which the module of one server ignores; the script itself needs a GPU's package."""


@contextmanager
def running_vllm(
    model: Path,
    directory: Path,
    *extra: str,
    env: dict[str, str] | None = None,
    api_servers: int = 1,
    tool_parser: str = "hermes",
    reasoning_parser: str | None = "qwen3",
) -> Iterator[VllmServer]:
    """vLLM serving `model` as "policy" on a free port, its log in `directory`."""
    require_vllm()
    port = free_port()
    argv, added = vllm_command(
        model, port, tool_parser=tool_parser, reasoning_parser=reasoning_parser, extra=["--max-logprobs", "5", *extra]
    )
    if api_servers > 1:
        argv = [argv[0], "-c", _SERVE, *argv[3:], "--api-server-count", str(api_servers)]
    added |= {"HF_HUB_OFFLINE": "1", **(env or {})}
    with ForkedVllmServer(argv, added, f"http://127.0.0.1:{port}", directory / f"vllm-{port}.log") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that `vllm_server` starts with: untied, seed 0."""
    require_vllm()
    from examples.demo.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "seed0", seed=0)


@pytest.fixture(scope="session")
def vllm_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Shared by all tests, so none may push weights to it: they stay with an engine for as long as it runs."""
    with running_vllm(tiny_model, tmp_path_factory.mktemp("vllm"), "--trust-request-chat-template") as server:
        yield server


IMAGES = ("--limit-mm-per-prompt", json.dumps({"image": 16, "video": 0}), "--max-num-seqs", "8")
"""vLLM's flags for a model that sees images. More sequences at once would only make it start more slowly."""


@dataclass(frozen=True, slots=True)
class VisionEngine:
    """An engine that serves a model with eyes, and the checkpoint that it started with."""

    family: Family
    model: Path
    server: VllmServer

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="session")
def vision_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Family], VisionEngine]]:
    """`vision_engine("idefics3")`, `vision_engine("qwen2.5-vl")`: started when a test first wants it, shared by all. As with `vllm_server`,
    none may push weights to it."""
    require_vllm()
    from examples.screen.tiny_vision_model import make_tiny_vision_model

    with ExitStack() as servers:

        @cache
        def start(family: Family) -> VisionEngine:
            directory = tmp_path_factory.mktemp(f"vision-{family}")
            model = make_tiny_vision_model(directory / "model", family=family)
            return VisionEngine(family, model, servers.enter_context(running_vllm(model, directory, *IMAGES)))

        yield start


@pytest.fixture
def vllm_url(vllm_server: VllmServer) -> str:
    return vllm_server.url
