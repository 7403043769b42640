"""OlderVllm: the scripted engine as a vLLM before 0.32 answers at its token routes.

Generate names tokens as text in chat-shaped logprobs, and says neither under which weights it sampled nor what ended a reply. It knows no
`output_mode`, and derender no steps of a stream before 0.31. Spelled ids have no special tokens up to 0.26.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.engine.apis.reply import read_named_id
from tests.support.engine.altered_engine import AlteredEngine
from tests.support.engine.scripted_engine import Exchange
from tests.support.engine.scripted_sampling import Fail

GENERATE, DERENDER, SPELL = "/inference/v1/generate", "/v1/chat/completions/derender", "/v1/completions/derender"
_NO_STEPS = Fail(
    501, "Streaming chat derender is not yet supported for models with a parser configured.", "NotImplementedError"
)


class OlderVllm(AlteredEngine):
    """`tells_version`: `/version` says which it is."""

    def __init__(self, version: str, *, tells_version: bool = True, **fields: Any) -> None:
        super().__init__("qwen3", alter=tell_less, **fields)
        self._numbers = tuple(map(int, version.split(".")))
        self._derender, self._spell = self._routes["POST", DERENDER], self._routes["POST", SPELL]
        self._routes |= {("POST", DERENDER): self._parse, ("POST", SPELL): self._spell_plainly}
        generate = self._routes["POST", GENERATE]

        async def sample(exchange: Exchange, body: Any) -> None:
            await generate(exchange, {**body, "output_mode": "tokens"})

        async def tell_version(exchange: Exchange, body: Any) -> None:
            await exchange.answer({"version": version})

        self._routes["POST", GENERATE] = sample
        if tells_version:
            self._routes["GET", "/version"] = tell_version

    def reset(self) -> OlderVllm:
        super().reset()
        self.alter = tell_less
        return self

    async def _parse(self, exchange: Exchange, body: Any) -> None:
        if body.get("stream") and self._numbers < (0, 31):
            await exchange.fail(_NO_STEPS)
            return
        for choice in body.get("generate_response", {}).get("choices", ()):
            if choice.get("logprobs"):
                choice["logprobs"] = {"content": list(map(_number, choice["logprobs"]["content"]))}
        await self._derender(exchange, body)

    async def _spell_plainly(self, exchange: Exchange, body: Any) -> None:
        if self._numbers < (0, 27) and body.get("completion_request"):
            body["completion_request"]["skip_special_tokens"] = True
        await self._spell(exchange, body)


def tell_less(answer: dict[str, Any]) -> dict[str, Any] | None:
    """An answer or an event of generate without what it did not have; None for those of other routes."""
    if "output_mode" not in answer:
        return None
    # Of a stream, an end without a token is not sent.
    choices = [_shorten(choice) for choice in answer["choices"] if "created" in answer or choice["token_ids"]]
    return {key: value for key, value in answer.items() if key not in ("output_mode", "metrics")} | {"choices": choices}


def _shorten(choice: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: choice[key] for key in ("index", "finish_reason", "token_ids", "routed_experts")}
    logprobs = choice["logprobs"]
    return kept | {"logprobs": logprobs and {"content": list(map(_name, logprobs["content"]))}}


def _name(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A generate-shaped entry as a chat-shaped one that names its tokens."""
    named = {"token": f"token_id:{entry['token_id']}", "logprob": entry["logprob"], "bytes": None}
    return named | ({"top_logprobs": list(map(_name, entry["top_logprobs"]))} if "top_logprobs" in entry else {})


def _number(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse, of what derender is given."""
    tops = [_number(top) for top in entry.get("top_logprobs") or ()]
    return {"token_id": read_named_id(entry["token"]), "logprob": entry["logprob"], "top_logprobs": tops}
