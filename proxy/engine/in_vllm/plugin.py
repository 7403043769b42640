"""Verbatim's endpoint plugin for vLLM: the entry point, and the versions it was tested with.

`vllm serve` loads it if `VLLM_PLUGINS` names `verbatim` (entry points `vllm.endpoint_plugins`). vLLM logs a plugin that cannot be
imported and starts without it, so this module imports of vLLM only the version; what it does is in `proxy.engine.in_vllm.sampler`.
"""

from __future__ import annotations

import os
from typing import Any

TESTED = ("0.32",)
"""The first two numbers of the versions of vLLM that the plugin was tested with."""
UNTESTED_VARIABLE = "VERBATIM_PLUGIN_UNTESTED_VLLM"


class SamplePlugin:
    """See vllm/plugins/endpoint_plugins/interface.py."""

    name = "verbatim"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        from vllm import __version__

        check_version(__version__)
        from proxy.engine.in_vllm.sampler import add_routes

        add_routes(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if args.tokens_only:
            raise RuntimeError(
                "the plugin 'verbatim' parses replies, which --tokens-only rules out: take it out of VLLM_PLUGINS"
            )
        from proxy.engine.in_vllm.sampler import Sampler

        state.verbatim = Sampler(engine_client, state, args)


def check_version(version: str) -> None:
    """Raises RuntimeError for a vLLM that the plugin was not tested with, which ends vLLM's start."""
    if ".".join(version.split(".")[:2]) in TESTED or os.environ.get(UNTESTED_VARIABLE) == "1":
        return
    raise RuntimeError(
        f"the plugin 'verbatim' was tested with vLLM {', '.join(TESTED)} and not with {version}: take it out of VLLM_PLUGINS "
        f"(the service then uses the routes of --enable-scale-out), install a release of Verbatim that knows {version}, or set "
        f"{UNTESTED_VARIABLE}=1 to try it"
    )
