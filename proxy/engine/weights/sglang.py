"""SGLang's routes for new weights, one function each: what `WeightApi` is for vLLM.

A checkpoint is loaded from disk and labelled in one step. SGLang does not say what its workers hold; it says which checkpoint it
loaded last, and rolls back one that fails in the middle, each worker for itself and from the path it was just told: after such a failure
its weights count as not whole, which its label says, for it is all that the next who looks has to go by.
An adapter cannot be exchanged in place.

Written from SGLang's source, versions 0.5.5 and 0.5.23 (`/ready`, which tells of a pause, is of the latter), and tested against
answers in the shapes of the two.
"""

from __future__ import annotations

from typing import Any

import aiohttp

from proxy.engine.apis.sglang import LABEL_ROUTES
from proxy.engine.replica import Replica
from proxy.engine.weights.vllm import PROBE_SECONDS, TORN, Claim, Loaded, StepRefused, Transfer, WeightApi
from proxy.errors import EngineFailed

_PAUSES = {"keep": "retract", "abort": "abort"}
"""`retract` puts the calls in flight back into the queue and computes their context again under the new weights; `in_place` would
mix a cache of the old ones in. 0.5.5 knows no modes: every pause is an `abort`."""

_NO_TRANSFER = "weights go to SGLang by path, not over NCCL"

_ROLLED_BACK = "Rolling back"


class SglangWeightApi(WeightApi):
    """One replica's weight routes. Every method raises EngineFailed, with a sentence that names what the engine said."""

    def __init__(self, http: aiohttp.ClientSession, replica: Replica, step_seconds: float, claim: Claim | None = None) -> None:
        super().__init__(http, replica, step_seconds, claim)
        self._whole = True

    async def claim(self) -> bool:
        """False: SGLang keeps no word of who changes it, so two services on different stores must not share one."""
        return False

    async def release(self) -> None:
        """Nothing, as there is no claim."""

    async def label(self) -> str:
        return str((await self._model_info()).get("weight_version"))

    async def set_label(self, version: int | str) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._ask("POST", "/update_weight_version", body, seconds=PROBE_SECONDS)

    async def paused(self) -> bool | None:
        """None where SGLang does not tell: 0.5.5 has no such route."""
        try:
            await self._ask("GET", "/ready", seconds=PROBE_SECONDS)
        except StepRefused as error:
            return None if error.http_status == 404 else error.http_status == 503
        return False

    async def loaded(self) -> Loaded:
        info = await self._model_info()
        label = str(info.get("weight_version"))
        return Loaded(
            self._whole and not label.startswith(TORN), info.get("model_path"), int(label) if label.isdecimal() else None, 0
        )

    async def check(self, path: str) -> None:
        """Nothing: SGLang looks at a checkpoint when it loads it."""

    async def check_transfer(self, transfer: Transfer) -> None:
        raise StepRefused(_NO_TRANSFER)

    async def world_size(self) -> int:
        raise StepRefused(_NO_TRANSFER)

    async def join(self, group: str, nccl: dict[str, Any]) -> None:
        raise StepRefused(_NO_TRANSFER)

    async def pause(self, mode: str) -> None:
        """`wait` pauses nothing: loading waits for the calls in flight, and holds those that come."""
        if mode in _PAUSES:
            await self._ask("POST", "/pause_generation", {"mode": _PAUSES[mode]})

    async def resume(self) -> None:
        await self._ask("POST", "/continue_generation", {})

    async def load_full(self, path: str, version: int) -> None:
        """Return when SGLang says that it holds the checkpoint, as `version`, with an empty cache."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True, "abort_all_requests": False}
        try:
            await self._ask("POST", "/update_weights_from_disk", body)
        except EngineFailed as error:
            if not isinstance(error, StepRefused) or _ROLLED_BACK in error.message:
                self._whole = False
                await self.set_label(TORN)
            raise

    async def finish_full(self, version: int) -> None:
        if (label := await self.label()) != str(version):
            raise StepRefused(f"the engine calls its weights {label!r} after loading version {version}")

    async def load_adapter(self, path: str) -> None:
        raise StepRefused("SGLang cannot exchange an adapter in place; push full weights")

    async def abort_all(self) -> None:
        await self._ask("POST", "/abort_request", {"rid": "", "abort_all": True}, seconds=PROBE_SECONDS)

    async def flush_cache(self) -> None:
        """Forget the prefixes of earlier calls; SGLang refuses while calls run."""
        await self._ask("POST", "/flush_cache", seconds=PROBE_SECONDS)

    async def _ask(
        self, method: str, route: str, body: dict[str, Any] | None = None, *, seconds: float | None = None
    ) -> dict[str, Any]:
        try:
            return await super()._ask(method, route, body, seconds=seconds)
        except StepRefused as error:
            if error.http_status == 404:
                error.message = f"the engine has no {route}"
            raise

    async def _model_info(self) -> dict[str, Any]:
        newer, older = LABEL_ROUTES
        try:
            return await self._ask("GET", newer, seconds=PROBE_SECONDS)
        except StepRefused as error:
            if error.http_status != 404:
                raise
        return await self._ask("GET", older, seconds=PROBE_SECONDS)
