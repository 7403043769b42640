"""The names of vLLM that the plugin uses, each with how it is called; every one was checked on each version in `CHECKED`.

vLLM promises none of them. So the plugin holds the vLLM that it runs in to this list before it adds anything to the server.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CHECKED = ("0.32", "0.33")
"""The first two numbers of the versions of vLLM that the plugin was checked with."""


@dataclass(frozen=True, slots=True)
class Internal:
    """A name in a module of vLLM, and for a callable its arguments, as words.

    `given` are its first parameters in their order, None for what is not called; `named` are given by name, `optional` by name where it
    has them: see `choose`. `overridden`: vLLM calls it in a class of the plugin's, which takes whatever else it is given."""

    module: str
    name: str
    given: str | None = None
    named: str = ""
    optional: str = ""
    overridden: bool = False

    def find_problem(self) -> str | None:
        """What keeps the plugin from using it, with the vLLM as subject; None if nothing does."""
        try:
            found = _look_up(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError):
            return f"has no {self.module}.{self.name}"
        misfit = None if self.given is None else self._find_misfit(found)
        return None if misfit is None else f"has another {self.module}.{self.name}: {misfit}"

    def _find_misfit(self, function: Callable[..., Any]) -> str | None:
        parameters = inspect.signature(function).parameters
        given = (self.given or "").split()
        if list(parameters)[: len(given)] != given:
            return f"it takes ({', '.join(parameters)})"
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        if missing := [name for name in self.named.split() if name not in parameters and not takes_any]:
            return f"it takes no {missing[0]}"
        known = {*given, *self.named.split(), *self.optional.split()}
        required = [each.name for each in parameters.values() if each.default is each.empty and each.kind not in _REST]
        if not self.overridden and (unknown := [name for name in required if name not in known]):
            return f"it wants {unknown[0]}"
        return None


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _look_up(found: Any, name: str) -> Any:
    """Raises AttributeError. Also finds the fields of a class that it has only in its objects."""
    for part in name.split("."):
        fields = {**getattr(found, "__private_attributes__", {}), **getattr(found, "__dataclass_fields__", {})}
        found = fields[part] if part in fields else getattr(found, part)
    return found


_CHAT = "vllm.entrypoints.openai.chat_completion.protocol"
_GENERATE = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.serving"
_RENDER = "vllm.entrypoints.scale_out.render.serving"
_DERENDERER = "vllm.renderers.online_derenderer"
_UTILS = "vllm.entrypoints.serve.utils.api_utils"
# 0.33 took this parameter away, and returns all alternatives that the engine has.
_LIMIT = "num_output_top_logprobs"

INTERNALS = (
    Internal("vllm.engine.protocol", "EngineClient.abort", "self request_id"),
    Internal("vllm.config", "ParallelConfig._api_process_rank"),
    Internal("vllm.config", "ParallelConfig._api_process_count"),
    Internal(_CHAT, "ChatCompletionRequest"),
    Internal(_CHAT, "ChatCompletionNamedToolChoiceParam"),
    Internal("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
    Internal(_GENERATE, "GenerateRequest"),
    Internal(_GENERATE, "GenerateRequest._response_mm_placeholders"),
    Internal(_RENDER, "ServingRender.render_chat_request", "self request raw_request", optional="engine_chat_template_kwargs"),
    Internal(_RENDER, "ServingRender.render_completion_request", "self request raw_request"),
    # online_derenderer: since 0.33.
    Internal(
        _TOKENS,
        "ServingTokens.__init__",
        "self engine_client models online_renderer",
        "request_logger return_tokens_as_token_ids",
        "online_derenderer",
    ),
    Internal(_TOKENS, "ServingTokens.serve_tokens", "self request raw_request"),
    Internal(
        _TOKENS,
        "ServingTokens.serve_tokens_stream_generator",
        "self request result_generator request_id",
        overridden=True,
    ),
    # derender_request: since 0.33.
    Internal(
        _TOKENS,
        "ServingTokens.serve_tokens_full_generator",
        "self request result_generator request_id",
        overridden=True,
    ),
    Internal(_TOKENS, "ServingTokens._raise_if_error", "self finish_reason request_id"),
    Internal(_TOKENS, "ServingTokens._logprobs_tokenizer", "self text_mode"),
    Internal(_TOKENS, "ServingTokens._create_text_logprobs", "self token_ids top_logprobs", "tokenizer", _LIMIT),
    Internal(_TOKENS, "ServingTokens._create_tokens_logprobs", "self token_ids top_logprobs", "", _LIMIT),
    Internal(_TOKENS, "_clamp_logprob", "logprob"),
    Internal("vllm.entrypoints.generate.base.serving", "clamp_prompt_logprobs", "prompt_logprobs"),
    Internal(_DERENDERER, "OnlineDerenderer._resolve_chat_template_kwargs", "self chat_request"),
    Internal(_DERENDERER, "_resolve_logprobs", "logprobs tokenizer"),
    Internal("vllm.parser", "Parser.__init__", "self tokenizer tools", "chat_template_kwargs model_config"),
    Internal("vllm.parser", "Parser.set_prompt_token_ids", "self prompt_token_ids"),
    Internal("vllm.parser", "Parser.parse", "self model_output request", "enable_auto_tools model_output_token_ids"),
    Internal("vllm.parser", "Parser.parse_delta", "self delta_text delta_token_ids request prompt_token_ids", "finished"),
    Internal("vllm.outputs", "RequestOutput"),
    Internal("vllm.outputs", "CompletionOutput.weight_versions"),
    Internal("vllm.outputs", "CompletionOutput.routed_experts"),
    Internal("vllm.entrypoints.serve.engine.protocol", "ErrorResponse"),
    Internal("vllm.entrypoints.serve.exception_handling.error_response", "create_error_response", "message", "param"),
    Internal("vllm.exceptions", "VLLMValidationError.__init__", "self message", "parameter"),
    Internal(_UTILS, "load_aware_call", "func"),
    Internal(_UTILS, "with_cancellation", "handler_func"),
)


def find_problem(version: str, internals: Sequence[Internal] = INTERNALS) -> str | None:
    """Why the plugin cannot run in the vLLM of that version, None if it can. The sentence goes on after "because"."""
    if not is_checked(version):
        return f"it was checked with vLLM {' and '.join(CHECKED)}, and this is {version}"
    problem = next(filter(None, (each.find_problem() for each in internals)), None)
    return None if problem is None else f"this vLLM {version} {problem}"


def is_checked(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in CHECKED


def choose(function: Callable[..., Any], **optional: Any) -> dict[str, Any]:
    """Those of the arguments that this vLLM's function takes."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in optional.items() if name in parameters}
