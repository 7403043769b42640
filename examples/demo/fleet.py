"""The processes of the loop: vLLM, once or several times, the service, the agent and the trainer. They meet over HTTP alone.

`serving` and `trainer` are also what the loop through tasks (examples/tasks_loop) starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from examples.demo.plan import Plan
from examples.demo.processes import Child
from examples.vllm_server import free_port, make_one_process_env, vllm_command

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """vLLM and the service, whose records are in `data_dir`."""

    engines: Sequence[Child]
    service: Child
    url: str
    admin_token: str
    trainer_token: str
    data_dir: Path

    @property
    def children(self) -> list[Child]:
        return [*self.engines, self.service]


@dataclass(frozen=True, slots=True)
class Fleet:
    served: Served
    agent: Child
    trainer: Child

    @property
    def children(self) -> list[Child]:
        return [*self.served.children, self.agent, self.trainer]


@contextlib.asynccontextmanager
async def running(plan: Plan) -> AsyncIterator[Fleet]:
    """All of them, started at once: whoever is up first waits for the others. All have ended when the block has."""
    async with serving(plan) as served:
        agent = Child("the agent", [sys.executable, "-m", plan.agent], plan.log("agent"), piped=True)
        push = "--push" if plan.push else "--no-push"
        async with agent, trainer(plan, served, "examples.demo.trainer", push) as learning:
            yield Fleet(served, agent, learning)


@contextlib.asynccontextmanager
async def serving(plan: Plan, data_dir: Path | None = None) -> AsyncIterator[Served]:
    """Started, and perhaps not ready yet; ended when the block has, in the opposite order, so that nobody is left talking to one who
    has gone. Without a `data_dir` the service's records are in the plan's once they have ended."""
    engine_ports, port = [free_port() for _ in plan.engines], free_port()
    async with contextlib.AsyncExitStack() as stack:
        data_dir = data_dir or stack.enter_context(_keep_records(plan))
        admin_token, trainer_token = secrets.token_hex(16), secrets.token_hex(16)
        children = [
            *(_vllm(plan, number, engine_port) for number, engine_port in enumerate(engine_ports)),
            _service(plan, engine_ports, port, data_dir / "service", admin_token, trainer_token),
        ]
        *engines, service = [await stack.enter_async_context(child) for child in children]
        yield Served(engines, service, f"http://127.0.0.1:{port}", admin_token, trainer_token, data_dir)


@contextlib.contextmanager
def _keep_records(plan: Plan) -> Iterator[Path]:
    """A folder with a short path, as the socket of a Redis needs it; at the end the records in it become the plan's."""
    with tempfile.TemporaryDirectory(prefix="verbatim-demo-") as folder:
        try:
            yield Path(folder)
        finally:
            if (records := Path(folder) / "service").exists():
                shutil.copytree(records, plan.data_dir, ignore=shutil.ignore_patterns("*.sock"), dirs_exist_ok=True)


def trainer(plan: Plan, served: Served, module: str, *more: str, env: Mapping[str, str] | None = None) -> Child:
    """A trainer of the demo's kind, with `more` for its command line and the trainer's token in its environment."""
    options = {
        "--url": served.url,
        "--model-dir": plan.model_dir,
        "--weights-dir": plan.weights_dir,
        "--log": plan.trainer_log,
        "--steps": plan.steps,
        "--groups": plan.groups,
        "--max-staleness": plan.max_staleness,
        "--learning-rate": plan.learning_rate,
        "--seed": plan.seed,
    }
    more = (*more, "--delta") if plan.delta else more
    argv = [sys.executable, "-m", module, *more, *(word for name, value in options.items() for word in (name, str(value)))]
    given = {"VERBATIM_TRAINER_TOKEN": served.trainer_token, **(env or {})}
    if not plan.gpu:
        # It shares two cores with vLLM: threads that wait for each other would spin on the core the other needs.
        given["OMP_NUM_THREADS"] = "1"
    return Child("the trainer", argv, plan.log("trainer"), env=given, may_finish=True)


def _vllm(plan: Plan, number: int, port: int) -> Child:
    # Half of a GPU is left to the trainer.
    policy, model_dir = plan.engines[number]
    on_gpu = ["--gpu-memory-utilization", f"{0.45 / len(plan.engines):.2f}", "--dtype", "bfloat16"]
    device, extra = ("gpu", [*on_gpu, *plan.engine_flags]) if plan.gpu else ("cpu", plan.engine_flags)
    argv, env = vllm_command(model_dir, port, served_name=policy or "policy", max_model_len=2048, device=device, extra=extra)
    if not plan.gpu:
        env |= make_one_process_env(max(1, (os.cpu_count() or 1) // (len(plan.engines) + 1)))
    if plan.delta:
        env |= {"VERBATIM_MIRROR": str(plan.mirror_dir)}
    name = policy or number + 1
    return Child(f"vLLM {name}", argv, plan.log(f"vllm-{name}"), env=env)


def _service(plan: Plan, engine_ports: Sequence[int], port: int, data_dir: Path, admin_token: str, trainer_token: str) -> Child:
    named = zip(plan.engines, engine_ports, strict=True)
    urls = [f"{policy and f'{policy}='}http://127.0.0.1:{engine_port}" for (policy, _), engine_port in named]
    engines = [word for url in urls for word in ("--engine", url)]
    argv = [sys.executable, "-m", "cli.main", "serve", *engines, "--data-dir", str(data_dir), "--port", str(port)]
    env = {"VERBATIM_ADMIN_TOKEN": admin_token, "VERBATIM_TRAINER_TOKEN": trainer_token, **plan.service_env}
    return Child("the service", argv, plan.log("service"), env=env)


async def unless_one_ends(work: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, or the error of the first of `others` to fail before; the rest is cancelled."""
    main = asyncio.ensure_future(work)
    guards = [asyncio.ensure_future(other) for other in others]
    try:
        waiting = {main, *guards}
        while main in waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for guard in done - {main}:
                guard.result()
        if main.exception() and waiting:
            # A child that died is the cause, whatever error it led to elsewhere a moment before it was noticed.
            done, _ = await asyncio.wait(waiting, timeout=1, return_when=asyncio.FIRST_EXCEPTION)
            for guard in done:
                guard.result()
        return main.result()
    finally:
        for task in (main, *guards):
            task.cancel()
        await asyncio.gather(main, *guards, return_exceptions=True)
