"""Two processes of the TRL example, without vLLM, as on a trainer's machine.

They have the variables that `torch.distributed.run` would set, and are forked after the import of TRL, which is most of their work.
"""

from __future__ import annotations

import os
import signal
import sys

sys.modules["vllm"] = None  # type: ignore[assignment]

PROCESSES = 2

if __name__ == "__main__":
    from pathlib import Path

    from examples.trainers.trl_grpo import train

    model, folder, port = sys.argv[1:]
    world = {"WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
    children = set()
    for rank in range(PROCESSES):
        if (pid := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            train(model, Path(folder, "weights"), Path(folder, "out"), steps=2, rows=2, accumulate=1)
            sys.exit()
        children.add(pid)
    while children:
        pid, status = os.wait()
        children.remove(pid)
        if status:
            # The others would wait for it forever.
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a process ended with {status}")
