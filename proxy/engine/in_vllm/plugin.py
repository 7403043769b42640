"""Verbatim's endpoint plugin for vLLM: the entry point.

`vllm serve` loads it if `VLLM_PLUGINS` names `verbatim` (entry points `vllm.endpoint_plugins`). What it does is in
`proxy.engine.in_vllm.sampler`. It never decides whether vLLM starts: where it cannot run it logs one sentence and adds no routes, and the
service uses vLLM's own.
"""

from __future__ import annotations

import logging
from typing import Any

from proxy.engine.in_vllm.internals import find_problem

log = logging.getLogger("vllm.verbatim")


class SamplePlugin:
    """See vllm/plugins/endpoint_plugins/interface.py."""

    name = "verbatim"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        # Whether there is something to route to is known once the server's state is made.
        self._app = app

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        try:
            problem = self._add_routes(engine_client, state, args)
        except Exception as error:
            problem = f"it cannot start: {type(error).__name__}: {error}"
        if problem is not None:
            log.warning(
                "the plugin 'verbatim' adds no routes, because %s; calls take the routes of --enable-scale-out instead", problem
            )

    def _add_routes(self, engine_client: Any, state: Any, args: Any) -> str | None:
        """Why it did not, None if it did."""
        from vllm import __version__

        if args.tokens_only:
            return "it parses replies, which --tokens-only rules out"
        if problem := find_problem(__version__):
            return problem
        from proxy.engine.in_vllm.sampler import Sampler, add_routes

        state.verbatim = Sampler(engine_client, state, args)
        add_routes(self._app)
        return None
