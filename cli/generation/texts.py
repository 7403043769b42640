"""The text of a row's tokens, from the engines that sampled them (`POST /detokenize`): vLLM and servers like it have the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from cli.engine_access import open_engine_client

SECONDS = 60.0


class Detokenizer:
    """Use in a `with` block. `replicas` are in the API's shape. An engine that gave no text once is not asked again."""

    def __init__(self, replicas: Iterable[Mapping[str, Any]]) -> None:
        self._replicas: dict[str, list[Mapping[str, Any]]] = {}
        for replica in replicas:
            self._replicas.setdefault(replica["policy"], []).append(replica)
        self._http = open_engine_client(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def decode(self, policy: str, token_ids: Sequence[int]) -> str | None:
        """The text, special tokens included; None if no engine of the policy tells from here."""
        replicas = self._replicas.get(policy, [])
        while replicas:
            replica = replicas[0]
            body = {"tokens": list(token_ids)} | ({"model": replica["models"][0]} if replica["models"] else {})
            try:
                answer = self._http.post(f"{replica['url']}/detokenize", json=body).raise_for_status().json()
                return str(answer["prompt"])
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
                replicas.pop(0)
        return None
