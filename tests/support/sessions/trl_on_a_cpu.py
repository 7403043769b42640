"""TRL's asynchronous trainer without a GPU: two things stand in for what only a GPU has. Its attention kernel (FlashAttention 3) is here
plain torch, and of the device's peak FLOPs there are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

SETTINGS = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "optim": "sgd",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "epsilon": 1e9,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def attend(
    query: Any, key: Any, value: Any, starts: Any, key_starts: Any, *_: int, softmax_scale: float, **options: Any
) -> Any:
    """What `flash_attn_varlen_func` computes: segment after segment, causal from the end of its keys."""
    assert options == {"causal": True, "window_size": (-1, -1)}
    results = []
    for at in range(len(starts) - 1):
        q = query[starts[at] : starts[at + 1]].transpose(0, 1)
        k, v = (part[key_starts[at] : key_starts[at + 1]].transpose(0, 1) for part in (key, value))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        results.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        )
    return torch.cat(results, dim=1).transpose(0, 1)


@contextmanager
def without_a_gpu() -> Iterator[None]:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel = SimpleNamespace(flash_attn_varlen_func=attend)
    with (
        mock.patch.object(packing, "_flash_attn", lambda: kernel),
        mock.patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None),
    ):
        yield
