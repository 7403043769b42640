"""The four processes of the loop: vLLM, the service, the agent and the trainer. They meet over HTTP alone."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from examples.demo.plan import Plan
from examples.demo.processes import Child
from proxy.engine.vllm_launch import free_port, vllm_command

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fleet:
    vllm: Child
    service: Child
    agent: Child
    trainer: Child
    url: str
    admin_token: str

    @property
    def children(self) -> list[Child]:
        return [self.vllm, self.service, self.agent, self.trainer]


@contextlib.asynccontextmanager
async def running(plan: Plan) -> AsyncIterator[Fleet]:
    """All four, started at once: whoever is up first waits for the others. All have ended when the block has."""
    engine_port, port = free_port(), free_port()
    url, admin_token, trainer_token = f"http://127.0.0.1:{port}", secrets.token_hex(16), secrets.token_hex(16)
    async with contextlib.AsyncExitStack() as stack:
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verbatim-demo-")))
        children = [
            _vllm(plan, engine_port),
            _service(plan, engine_port, port, data_dir, admin_token, trainer_token),
            Child("the agent", [sys.executable, "-m", "examples.demo.agent"], plan.log("agent"), piped=True),
            _trainer(plan, url, trainer_token),
        ]
        # Ended in the opposite order, so that nobody is left talking to one who has gone.
        vllm, service, agent, trainer = [await stack.enter_async_context(child) for child in children]
        yield Fleet(vllm, service, agent, trainer, url, admin_token)


def _vllm(plan: Plan, port: int) -> Child:
    # Half of a GPU is left to the trainer.
    on_gpu = ["--gpu-memory-utilization", "0.45", "--dtype", "bfloat16"]
    device, extra = ("gpu", on_gpu) if plan.gpu else ("cpu", [])
    argv, env = vllm_command(plan.model_dir, port, max_model_len=2048, device=device, extra=extra)
    return Child("vLLM", argv, plan.log("vllm"), env=env)


def _service(plan: Plan, engine_port: int, port: int, data_dir: Path, admin_token: str, trainer_token: str) -> Child:
    argv = [sys.executable, "-m", "cli.main", "serve", "--engine", f"http://127.0.0.1:{engine_port}"]
    argv += ["--data-dir", str(data_dir), "--port", str(port)]
    env = {"VERBATIM_ADMIN_TOKEN": admin_token, "VERBATIM_TRAINER_TOKEN": trainer_token}
    return Child("the service", argv, plan.log("service"), env=env)


def _trainer(plan: Plan, url: str, token: str) -> Child:
    options = {
        "--url": url,
        "--model-dir": plan.model_dir,
        "--weights-dir": plan.weights_dir,
        "--log": plan.trainer_log,
        "--steps": plan.steps,
        "--groups": plan.groups,
        "--learning-rate": plan.learning_rate,
        "--seed": plan.seed,
    }
    argv = [sys.executable, "-m", "examples.demo.trainer", "--push" if plan.push else "--no-push"]
    argv += [word for name, value in options.items() for word in (name, str(value))]
    env = {"VERBATIM_TRAINER_TOKEN": token}
    if not plan.gpu:
        # It shares two cores with vLLM: threads that wait for each other would spin on the core the other needs.
        env["OMP_NUM_THREADS"] = "1"
    return Child("the trainer", argv, plan.log("trainer"), env=env, may_finish=True)


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
