"""Whether an engine's workers lack the methods of `vllm_backend.VerbatimWorker`, found out without asking them.

A method that is not there fails in every worker. Of several vLLM takes the first one's answer and leaves the others' in their queues,
where they are taken for the answers to what is asked next, on `/update_weights` or `/pause` for example, until the engine restarts
(vLLM 0.32, `v1/executor/multiproc_executor.py`). So the server is asked instead, which knows how its workers were started.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

EXTENSION = "VerbatimWorker"

Ask = Callable[[str], Awaitable[dict[str, Any]]]
"""GET a route of the engine, {} or an error of its own where there is none."""


async def is_missing(ask: Ask) -> bool:
    """Whether it is known that they are not there; False for an engine of one worker, whose error is just that, and where the
    server does not say. Raises what `ask` raises."""
    if int((await ask("/get_world_size")).get("world_size", 1)) <= 1:
        return False
    config = (await ask("/server_info?config_format=json")).get("vllm_config")
    parallel = config.get("parallel_config") if isinstance(config, dict) else None
    if not isinstance(parallel, dict) or "worker_extension_cls" not in parallel:
        return False
    return not str(parallel["worker_extension_cls"]).endswith(EXTENSION)
