"""EngineApis: the ways of speaking to engines, and which of them a call takes.

What a call needs depends on the API that its replica speaks and on whether its prompt is messages or a text of its own.
"""

from __future__ import annotations

from proxy.dialects.base import Request
from proxy.engine.apis.base import Engine, Renderer, Tokenizer
from proxy.engine.apis.chat import ChatApi
from proxy.engine.apis.completions import IdsApi
from proxy.engine.apis.id_text import IdText, IdTexts
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.apis.sglang import SglangApi
from proxy.engine.apis.vllm import TokenApi
from proxy.engine.apis.vllm_prompt import TextApi
from proxy.engine.pool.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp


class EngineApis:
    """`local` renders for engines that take ids only."""

    def __init__(self, pool: EnginePool, local: LocalRenderer) -> None:
        http = EngineHttp(pool)
        self._local = local
        self._id_texts = IdTexts()
        self._token_api = TokenApi(http)
        self._text_api = TextApi(http, self._token_api)
        self._engines: dict[str, Engine] = {"token": self._token_api, "chat": ChatApi(http)}
        self._engines |= {"completions": IdsApi(http, local), "sglang": SglangApi(http, local)}

    def engine(self, replica: Replica, request: Request) -> Engine:
        """What samples and counts."""
        if replica.api == "token" and request.prompt is not None:
            return self._text_api
        return self._engines[replica.api or "chat"]

    def renderer(self, replica: Replica) -> Renderer:
        """What makes ids of messages, for a replica that takes ids."""
        return self._token_api if replica.api == "token" else self._local

    def tokenizer(self, replica: Replica, request: Request, session_id: str) -> Tokenizer:
        """What makes ids of a prompt without messages, for a replica that takes ids."""
        tokenizes = self._text_api if replica.api == "token" else self._local
        return tokenizes.tokenizer(replica, request, self.id_text(session_id))

    def id_text(self, session_id: str) -> IdText:
        """How the session's ids are written as text."""
        return self._id_texts.of(session_id)
