"""Routed experts from a vLLM that cannot tell them: on a CPU vLLM 0.32 returns none ("Model Runner V2 requires Triton")."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYERS = 2


class ScriptedExperts:
    """For vLLM's `--middleware`: from then on the API server reports the experts of `experts_of` as if its engine had."""

    def __init__(self, app: Any) -> None:
        from vllm.v1.engine.output_processor import RequestState

        begin, finish = RequestState.from_new_request.__func__, RequestState._new_completion_output

        def from_new_request(cls: Any, tokenizer: Any, request: Any, *more: Any, **named: Any) -> Any:
            state = begin(cls, tokenizer, request, *more, **named)
            state.experts_from = request.sampling_params.routed_experts_prompt_start
            return state

        def new_completion_output(self: Any, token_ids: Any, finish_reason: Any, *more: Any) -> Any:
            if finish_reason is not None:
                ids = [*self.prompt_token_ids, *self.detokenizer.output_token_ids]
                # The last token was not fed back.
                self.routed_experts_chunks = [experts_of(ids)[self.experts_from : -1].astype(np.uint8)]
            return finish(self, token_ids, finish_reason, *more)

        RequestState.from_new_request = classmethod(from_new_request)
        RequestState._new_completion_output = new_completion_output
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def experts_of(ids: Any) -> NDArray[np.int16]:
    """Of each id and its position, (len(ids), LAYERS, 2)."""
    return np.array([[[(token + layer) % 8, at % 8] for layer in range(LAYERS)] for at, token in enumerate(ids)], np.int16)
