"""The scripted engine's weights: a label, a pause, and an update protocol that holds no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripted_sampling import Fail, Sampler

if TYPE_CHECKING:
    from scripted_engine import Exchange, Route


class ScriptedWeights:
    """`loaded` is what the workers report. `refuse_check` and `refuse_update` make the next update fail with that sentence."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.paused = False
        self.updating = False
        self.loaded: dict[str, Any] = {"whole": True, "path": None, "version": None, "updates": 0, "error": None}
        self.refuse_check: str | None = None
        self.refuse_update: str | None = None
        self.routes: dict[tuple[str, str], Route] = {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/abort_requests"): self._abort,
            ("GET", "/weight_info"): self._info,
            ("POST", "/update_weight_version"): self._set_version,
            ("POST", "/init_weight_transfer_engine"): self._init,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
            ("POST", "/collective_rpc"): self._rpc,
        }

    async def _pause(self, exchange: Exchange, body: Any) -> None:
        mode = exchange.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            await exchange.fail(Fail(400, f"mode: {mode!r} is not one of 'abort', 'wait', 'keep'", "Bad Request", "query.mode"))
            return
        await self._sampler.pause(mode)
        self.paused = True
        await exchange.answer({"status": "paused"})

    async def _resume(self, exchange: Exchange, body: Any) -> None:
        self.paused = False
        self._sampler.resume()
        await exchange.answer({"status": "resumed"})

    async def _is_paused(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"is_paused": self.paused})

    async def _abort(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"status": "aborted", "aborted": self._sampler.abort(body.get("request_ids") or ())})

    async def _info(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"weight_version": self._sampler.version})

    async def _set_version(self, exchange: Exchange, body: Any) -> None:
        self._sampler.version = body["new_version"]
        await exchange.answer({"success": True, "new_version": body["new_version"]})

    async def _init(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"message": "Weight transfer initialized"})

    async def _start(self, exchange: Exchange, body: Any) -> None:
        if self.updating:
            await exchange.fail(Fail(500, "A weight update is already active."))
        elif not self.paused:
            await exchange.fail(Fail(500, "start_weight_update without a pause"))
        else:
            self.updating = True
            await exchange.answer({"message": "Weight update started"})

    async def _update(self, exchange: Exchange, body: Any) -> None:
        info = body["update_info"]
        error = self.refuse_update or _missing(info["path"])
        self.refuse_update = None
        if error:
            self.loaded = {**self.loaded, "error": error}
            await exchange.fail(Fail(500, error))
            return
        updates = self.loaded["updates"] + 1
        loaded = {"whole": True, "path": info["path"], "version": info.get("version"), "updates": updates, "error": None}
        self.loaded = loaded
        await exchange.answer({"message": "Weights updated"})

    async def _finish(self, exchange: Exchange, body: Any) -> None:
        self.updating = False
        if body.get("weight_version") is not None:
            self._sampler.version = body["weight_version"]
        await exchange.answer({"message": "Weight update finished"})

    async def _rpc(self, exchange: Exchange, body: Any) -> None:
        if body.get("method") == "verbatim_weights":
            await exchange.answer({"results": [self.loaded]})
        elif body.get("method") == "verbatim_check":
            error, self.refuse_check = self.refuse_check or _missing(body["args"][0]), None
            await exchange.answer({"results": [{"error": error}]})
        else:
            await exchange.fail(Fail(500, f"Call to collective_rpc method failed: {body.get('method')}"))


def _missing(path: str) -> str | None:
    return None if Path(path).exists() else f"{path} does not exist on the engine's machine"
