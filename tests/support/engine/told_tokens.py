"""A real vLLM that samples what a test tells it, by `--logits-processors tests.support.engine.told_tokens:ToldTokens`.

`told.json` in the model's folder holds the replies, a list of ids each. A request gets the first that none has had; one that comes when
none is left samples freely, and so does one for a single token, as first contact asks for. Logprobs are the model's own, since vLLM
takes raw ones before any processor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ToldTokens(AdapterLogitsProcessor):
    def __init__(self, vllm_config: Any, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self._replies: list[list[int]] = json.loads((Path(vllm_config.model_config.model) / "told.json").read_text())

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        if not self._replies or params.max_tokens == 1:
            return None
        reply = self._replies.pop(0)

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) >= len(reply):
                return logits
            token = reply[len(output_ids)]
            forced = torch.full_like(logits, -torch.inf)
            forced[token] = logits[token]
            return forced

        return force
