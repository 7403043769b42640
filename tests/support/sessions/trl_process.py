"""One of several processes of the TRL example, as `torch.distributed.run` starts them: without vLLM, as on a trainer's machine."""

from __future__ import annotations

import sys

sys.modules["vllm"] = None  # type: ignore[assignment]

if __name__ == "__main__":
    from pathlib import Path

    from examples.trainers.trl_grpo import train

    model, folder = sys.argv[1:]
    train(model, Path(folder, "weights"), Path(folder, "out"), steps=2, rows=2, accumulate=1)
