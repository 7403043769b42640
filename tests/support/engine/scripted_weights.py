"""The scripted engine's weights: a label, a pause, and an update protocol that holds no tensors."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from contract.deltas import has_digests, is_delta, read_chain
from contract.tensor_files import BrokenWeights
from tests.support.engine.scripted_sampling import Fail, Sampler

if TYPE_CHECKING:
    from tests.support.engine.scripted_engine import Exchange, Route


Step = Literal["prepare", "check", "pause", "start", "update", "finish", "adapter", "resume"]


@dataclass
class Hold:
    """A step that waits: before it is done, or after it is done and before it is answered. `reached` when it waits."""

    step: Step
    done: bool
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class ScriptedWeights:
    """`loaded` is what the workers report. `refuse_check` and `refuse_update` make the next update fail with that sentence, `refuses`
    every one; `tears`: what the workers say of it when each update leaves their weights torn.
    `adapters`: the folder of each LoRA adapter. `extended`: its workers know the methods of `VerbatimWorker`, and
    `backend`: they have its backend.
    `hold` makes the next such step wait. As vLLM does, it breaks when weights change while it samples: `broken` says how."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.paused = False
        self.updating = False
        self.loaded: dict[str, Any] = {
            **{"whole": True, "path": None, "version": None, "updates": 0, "error": None},
            **{"group": None, "claimed_by": None, "logprob_mode": "raw_logprobs", "engine": uuid.uuid4().hex},
            **{"kind": "full", "root": None},
        }
        self.refuse_check: str | None = None
        self.refuse_update: str | None = None
        self.refuses = self.tears = ""
        self.broken: list[str] = []
        self.workers = 1
        self.extended = self.backend = True
        self.joined: list[dict[str, Any]] = []
        self.labels: list[str] = []
        self.adapters: dict[str, str] = {}
        self._received = False
        self._ticket = ""
        self._claims = ScriptedClaims()
        self._holds: list[Hold] = []
        self.routes: dict[tuple[str, str], Route] = {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/abort_requests"): self._abort,
            ("GET", "/weight_info"): self._info,
            ("POST", "/update_weight_version"): self._set_version,
            ("GET", "/get_world_size"): self._world_size,
            ("GET", "/server_info"): self._server_info,
            ("POST", "/init_weight_transfer_engine"): self._init,
            ("POST", "/start_weight_update"): self._start,
            ("POST", "/update_weights"): self._update,
            ("POST", "/finish_weight_update"): self._finish,
            ("POST", "/collective_rpc"): self._rpc,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
        }

    def hold(self, step: Step, *, done: bool) -> Hold:
        self._holds.append(Hold(step, done))
        return self._holds[-1]

    @property
    def label(self) -> str:
        return self._sampler.version

    async def _held(self, step: Step, *, done: bool) -> None:
        for hold in [hold for hold in self._holds if (hold.step, hold.done) == (step, done)]:
            self._holds.remove(hold)
            hold.reached.set()
            while not hold.released.is_set():
                await asyncio.sleep(0.005)

    def _relabel(self, label: str) -> None:
        self._sampler.version = label
        self.labels.append(label)

    async def _pause(self, exchange: Exchange, body: Any) -> None:
        mode = exchange.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            await exchange.fail(Fail(400, f"mode: {mode!r} is not one of 'abort', 'wait', 'keep'", "Bad Request", "query.mode"))
            return
        await self._held("pause", done=False)
        await self._sampler.pause(mode)
        self.paused = True
        await self._held("pause", done=True)
        await exchange.answer({"status": "paused"})

    async def _resume(self, exchange: Exchange, body: Any) -> None:
        await self._held("resume", done=False)
        self.paused = False
        self._sampler.resume()
        await self._held("resume", done=True)
        await exchange.answer({"status": "resumed"})

    async def _is_paused(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"is_paused": self.paused})

    async def _abort(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"status": "aborted", "aborted": self._sampler.abort(body.get("request_ids") or ())})

    async def _info(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"weight_version": self._sampler.version})

    async def _set_version(self, exchange: Exchange, body: Any) -> None:
        self._relabel(body["new_version"])
        await exchange.answer({"success": True, "new_version": body["new_version"]})

    async def _world_size(self, exchange: Exchange, body: Any) -> None:
        await exchange.answer({"world_size": self.workers})

    async def _server_info(self, exchange: Exchange, body: Any) -> None:
        extension = "proxy.engine.in_vllm.backend.VerbatimWorker" if self.extended else ""
        parallel = {"world_size": self.workers, "worker_extension_cls": extension}
        await exchange.answer({"vllm_config": {"parallel_config": parallel}, "vllm_env": {}, "system_env": {}})

    async def _init(self, exchange: Exchange, body: Any) -> None:
        info = body["init_info"]
        self.joined.append(info["nccl"])
        self.loaded = {**self.loaded, "group": info["group"]}
        await exchange.answer({"message": "Weight transfer initialized"})

    async def _start(self, exchange: Exchange, body: Any) -> None:
        await self._held("start", done=False)
        if self.updating:
            await exchange.fail(Fail(500, "start_weight_update called while a weight update is already active."))
            return
        if not self.paused:
            self.broken.append("start")
            await exchange.fail(Fail(500, "start_weight_update without a pause"))
            return
        self.updating, self._received = True, False
        await self._held("start", done=True)
        await exchange.answer({"message": "Weight update started"})

    async def _update(self, exchange: Exchange, body: Any) -> None:
        info = body["update_info"]
        await self._held("update", done=False)
        error = self._claims.refusal(info.get("owner", ""), info.get("fence", 0))
        refused, held = (None, {}) if "transfer" in info else _open(info["path"], None)
        error = error or self.refuse_update or refused
        if not error and not (self.paused and self.updating):
            self.broken.append("update")
        self.refuse_update = None
        if error:
            self.loaded = {**self.loaded, "error": error}
            self.updating = False
            await exchange.fail(Fail(500, error))
            return
        loaded: dict[str, Any] = {"whole": False, "error": self.tears}
        if not self.tears:
            updates = self.loaded["updates"] + 1
            loaded = {
                "whole": True,
                "path": info.get("path"),
                "version": info.get("version"),
                "updates": updates,
                "error": None,
                "kind": "full",
                "root": None,
                **held,
            }
        self.loaded, self._received = {**self.loaded, **loaded, "claimed_by": None}, True
        await self._held("update", done=True)
        await exchange.answer({"message": "Weights updated"})

    async def _finish(self, exchange: Exchange, body: Any) -> None:
        await self._held("finish", done=False)
        if not self._received:
            await exchange.fail(Fail(500, "no weights came since the update was started"))
            return
        self.updating = self._received = False
        if body.get("weight_version") is not None:
            self._relabel(body["weight_version"])
        await self._held("finish", done=True)
        await exchange.answer({"message": "Weight update finished"})

    async def _load_adapter(self, exchange: Exchange, body: Any) -> None:
        name, path = body["lora_name"], body["lora_path"]
        await self._held("adapter", done=False)
        if name in self.adapters and not body.get("load_inplace"):
            await exchange.fail(Fail(400, f"The lora adapter '{name}' has already been loaded."))
            return
        if error := _missing(path):
            await exchange.fail(Fail(404, error))
            return
        self.adapters[name] = path
        await self._held("adapter", done=True)
        await exchange.answer("Success: LoRA adapter added successfully.")

    async def _unload_adapter(self, exchange: Exchange, body: Any) -> None:
        if self.adapters.pop(body["lora_name"], None) is None:
            await exchange.fail(Fail(404, f"The lora adapter '{body['lora_name']}' cannot be found."))
            return
        await exchange.answer("Success: LoRA adapter removed successfully.")

    async def _rpc(self, exchange: Exchange, body: Any) -> None:
        holder = self._claims.holder
        if not self.extended:
            if self.workers > 1:
                # The first worker's answer is taken; the others' are for whoever asks next.
                self.broken.append("collective_rpc")
            error = f"Worker failed with error '{body.get('method')}', please check the stack trace above for the root cause"
            await exchange.fail(Fail(500, f"Call to collective_rpc method failed: {error}"))
            return
        if not self.backend:
            await exchange.answer({"results": [{"no_backend": "start vLLM with the backend"}] * self.workers})
            return
        if body.get("method") == "verbatim_weights":
            await exchange.answer({"results": [self.loaded | {"begun": self.updating, "claimed_by": holder}]})
        elif body.get("method") == "verbatim_claim":
            await exchange.answer({"results": [{"error": self._claims.take(*body["args"])}]})
        elif body.get("method") == "verbatim_check_transfer":
            outside = body["args"][0]["group"] != self.loaded.get("group")
            refused, self.refuse_check = self.refuse_check, None
            await exchange.answer({"results": [{"error": "the engine is not in the group" if outside else refused}]})
        elif body.get("method") == "verbatim_prepare":
            ticket, path, kind = body["args"]
            if ticket != self._ticket:
                self._ticket = ticket
                await self._held("prepare", done=True)
                await exchange.answer({"results": [{"done": False}]})
                return
            await self._held("check", done=False)
            refused, held = _open(path, kind)
            refused, self.refuse_check = self.refuse_check or self.refuses or refused, None
            told = {} if refused else {"root": held["root"]}
            await exchange.answer({"results": [{"done": True, "error": refused, **told}]})
        else:
            await exchange.fail(Fail(500, f"Call to collective_rpc method failed: {body.get('method')}"))


class ScriptedClaims:
    """The rules of `proxy.engine.in_vllm.backend.Claims`, which imports vLLM."""

    def __init__(self) -> None:
        self._fences: dict[str, int] = {}
        self._owner, self._until = "", 0.0

    def take(self, owner: str, fence: int, seconds: float) -> str | None:
        if refused := self.refusal(owner, fence):
            return refused
        self._fences[owner] = fence
        self._owner, self._until = owner, time.monotonic() + seconds
        return None

    def refusal(self, owner: str, fence: int) -> str | None:
        if owner and self.holder not in (None, owner):
            return "another service changes this engine's weights"
        if owner and fence < self._fences.get(owner, 0):
            return "another process has taken over since this push began"
        return None

    @property
    def holder(self) -> str | None:
        return self._owner if time.monotonic() < self._until else None


def _missing(path: str) -> str | None:
    return None if Path(path).exists() else f"{path} does not exist on the engine's machine"


def _open(path: str, kind: str | None) -> tuple[str | None, dict[str, Any]]:
    """Why the path is refused as that kind, or what it holds, by its headers alone: as `proxy.engine.in_vllm.sources.open_source`."""
    folder = Path(path)
    found = "delta" if is_delta(folder) else "full"
    if missing := _missing(path):
        return missing, {}
    if kind not in (None, found):
        return f"{path} holds {'a' if found == 'delta' else 'no'} delta: push it as kind {found}", {}
    try:
        root = read_chain(folder).root if found == "delta" or has_digests(folder) else None
    except BrokenWeights as error:
        return str(error), {}
    return None, {"kind": found, "root": root}
