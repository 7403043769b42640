"""WeightApi: vLLM's endpoints for new weights (`VLLM_SERVER_DEV_MODE=1`), with its errors as one sentence.

Checkpoints need the backend of `proxy.engine.in_vllm` in the engine; LoRA adapters need `--enable-lora` and
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, and none of the rest. Checked against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from proxy.engine.apis.probe import lacks_extension
from proxy.engine.replica import Replica
from proxy.errors import EngineFailed

PROBE_SECONDS = 30.0
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.01, 0.5
"""Between two looks at a preparation under way; each is a moment in which the engine does not sample."""
TORN = "torn"
"""The label of weights that are not, or may not be, whole. It is not a version, so nothing sampled under it is trained."""
SETUP = (
    "start vLLM with VLLM_SERVER_DEV_MODE=1, --worker-extension-cls proxy.engine.in_vllm.backend.VerbatimWorker and "
    '--weight-transfer-config \'{"backend": "verbatim"}\''
)

LOAD_ADAPTER = "/v1/load_lora_adapter"

# vLLM's server drops the connection after an internal error; the next step must not be sent over it.
_CLOSE = {"Connection": "close"}
_WORKER_ERROR = re.compile(r"Worker failed with error '(.*)', please check the stack trace .*", re.DOTALL)


class StepRefused(EngineFailed):
    """The engine answered a step with an error. Any other EngineFailed leaves open whether it took the step."""

    http_status: int | None = None


class Claimed(EngineFailed):
    """Someone else may change the engine: a service on another store, or a process that has taken over."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who changes the engine's weights: the store's identity, the push lock's fence, and for how many seconds at most."""

    owner: str
    fence: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a trainer sends over the NCCL group `group`: its parameters in order, each with torch dtype and full shape."""

    group: str
    world_size: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a replica's workers hold.

    `whole`: all of them hold the same complete weights, from the update of `path` (None: what the engine was started with) as
    `version`. `updates` counts whole updates since the engine started, `error` is that of the last one, `claimed_by` the service that
    changes the weights now, `group` the NCCL group it joined. `begun`: an update was begun and not ended; None if only some workers say
    so. `kind` and `root` are the update's; without digests it has no root."""

    whole: bool
    path: str | None
    version: int | None
    updates: int
    error: str | None = field(default=None, compare=False)
    claimed_by: str | None = field(default=None, compare=False)
    group: str | None = field(default=None, compare=False)
    begun: bool | None = field(default=False, compare=False)
    kind: str = field(default="full", compare=False)
    root: str | None = field(default=None, compare=False)


class WeightApi:
    """One replica's weight endpoints. Every method raises EngineFailed with the engine's message.

    With a `claim` the workers refuse updates under an older one."""

    def __init__(self, http: aiohttp.ClientSession, replica: Replica, step_seconds: float, claim: Claim | None = None) -> None:
        self._http = http
        self._replica = replica
        self._step_seconds = step_seconds
        self._claim = claim
        self._extended = False

    async def read_label(self) -> str:
        answer = await self._ask("GET", "/weight_info", seconds=PROBE_SECONDS)
        return str(answer.get("weight_version"))

    async def set_label(self, version: int | str) -> None:
        await self._ask("POST", "/update_weight_version", {"new_version": str(version)}, seconds=PROBE_SECONDS)

    async def is_paused(self) -> bool | None:
        """None if the engine does not say."""
        answer = await self._ask("GET", "/is_paused", seconds=PROBE_SECONDS)
        return bool(answer.get("is_paused"))

    async def read_loaded(self) -> Loaded:
        try:
            return _combine(await self._call_workers("verbatim_weights", seconds=PROBE_SECONDS))
        except StepRefused as error:
            raise StepRefused(f"the engine has no backend for checkpoints ({error.message}); {SETUP}") from error

    async def claim(self) -> bool:
        """Whether the workers now hold the claim. Raises Claimed if someone else's is in force, StepRefused without the backend."""
        if self._claim is None:
            return False
        answers = await self._set_claim(self._claim, self._claim.seconds)
        if error := next((answer["error"] for answer in answers if answer.get("error")), None):
            raise Claimed(str(error))
        return True

    async def release(self) -> None:
        """Let others change the engine again. A claim that cannot be released expires."""
        if self._claim is not None:
            with contextlib.suppress(EngineFailed):
                await self._set_claim(self._claim, 0.0)

    async def prepare(self, path: str, kind: str) -> str | None:
        """The root of the weights at `path`, None if they have no digests, once every worker has read and verified them, while it samples.

        Raises StepRefused, naming the file, link or tensor, if they cannot be loaded. Changes nothing that serves."""
        ticket, pause, deadline = uuid.uuid4().hex, FIRST_LOOK_SECONDS, time.monotonic() + self._step_seconds
        while True:
            answers = await self._call_workers("verbatim_prepare", ticket, path, kind, seconds=PROBE_SECONDS)
            _raise_first_error(answers)
            if all(answer.get("done") for answer in answers):
                roots = {answer.get("root") for answer in answers}
                if len(roots) > 1:
                    raise StepRefused(f"the engine's workers read different weights at {path}")
                return roots.pop()
            if time.monotonic() > deadline:
                raise EngineFailed(f"{path} was not read within {self._step_seconds:g} seconds")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)

    async def check_transfer(self, transfer: Transfer) -> None:
        """Raises StepRefused if the engine is not in that group or the parameters do not fit. Changes nothing."""
        _raise_first_error(await self._call_workers("verbatim_check_transfer", asdict(transfer)))

    async def world_size(self) -> int:
        """The number of workers over all parallel ranks."""
        return int((await self._ask("GET", "/get_world_size", seconds=PROBE_SECONDS)).get("world_size", 0))

    async def join(self, group: str, nccl: dict[str, Any]) -> None:
        """Returns when every worker has joined the NCCL group; the trainer must be joining meanwhile."""
        await self._ask("POST", "/init_weight_transfer_engine", {"init_info": {"group": group, "nccl": nccl}})
        joined = await self.read_loaded()
        if joined.group != group:
            raise StepRefused(joined.error or "not every worker of the engine has joined the group")

    async def pause(self, mode: str) -> None:
        """Stop sampling. Every mode clears the cache: `keep` freezes the requests in flight and recomputes their context under the new
        weights, which the old cache would mix in."""
        await self._ask("POST", f"/pause?mode={mode}&clear_cache=true")

    async def resume(self) -> None:
        await self._ask("POST", "/resume")

    async def load_full(self, path: str, version: int) -> None:
        """Returns when every worker holds the whole checkpoint. Call while paused."""
        await self._update({"path": path, "version": version})

    async def load_transfer(self, transfer: Transfer, version: int) -> None:
        """Returns when every worker holds what the trainer sends. Call while paused, on all engines of the group at once."""
        await self._update({"transfer": asdict(transfer), "version": version})

    async def _update(self, update_info: dict[str, Any]) -> None:
        claim = {"owner": self._claim.owner, "fence": self._claim.fence} if self._claim else {}
        await self.claim()
        before = await self.read_loaded()
        if before.begun is None:
            raise StepRefused("some of the engine's workers are in the middle of an update; restart the engine")
        # A killed or refused push may have left an update begun, which this one continues. Beginning again would fail in every worker;
        # of several vLLM reads only the first answer, and takes the others for answers to later requests.
        if not before.begun:
            await self._ask("POST", "/start_weight_update")
        await self._ask("POST", "/update_weights", {"update_info": {**update_info, **claim}})
        after = await self.read_loaded()
        if not after.whole or after.updates != before.updates + 1:
            raise StepRefused(after.error or "the engine's workers hold different weights")

    async def finish_full(self, version: int) -> None:
        await self._ask("POST", "/finish_weight_update", {"weight_version": str(version)})

    async def list_adapters(self) -> dict[str, str]:
        """The folder of each adapter by its name in the engine."""
        cards = (await self._ask("GET", "/v1/models", seconds=PROBE_SECONDS)).get("data") or ()
        return {str(card["id"]): str(card.get("root") or "") for card in cards if card.get("parent")}

    async def load_adapter(self, name: str, path: str) -> None:
        await self._ask("POST", LOAD_ADAPTER, {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Calls that name it end as they began."""
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def abort_all(self) -> None:
        await self._ask("POST", "/abort_requests", {}, seconds=PROBE_SECONDS)

    async def _set_claim(self, claim: Claim, seconds: float) -> list[dict[str, Any]]:
        return await self._call_workers("verbatim_claim", claim.owner, claim.fence, seconds, seconds=PROBE_SECONDS)

    async def _call_workers(self, method: str, *args: Any, seconds: float | None = None) -> list[dict[str, Any]]:
        """One answer per worker. Raises StepRefused if they do not have the method."""
        await self._check_extended()
        answer = await self._ask("POST", "/collective_rpc", {"method": method, "args": args}, seconds=seconds)
        results = answer.get("results")
        if not isinstance(results, list) or not results or not all(isinstance(item, dict) for item in results):
            raise EngineFailed(f"the engine does not report its weights; {SETUP}")
        if missing := next((item["no_backend"] for item in results if item.get("no_backend")), None):
            raise StepRefused(str(missing))
        return results

    async def _check_extended(self) -> None:
        """Raises StepRefused if several workers are known to lack the extension; see `lacks_extension`."""
        if self._extended:
            return

        async def read(route: str) -> dict[str, Any]:
            return await self._ask("GET", route, seconds=PROBE_SECONDS)

        try:
            missing = await lacks_extension(read)
        except StepRefused:
            missing = False
        if missing:
            raise StepRefused("its workers were started without --worker-extension-cls")
        self._extended = True

    async def _ask(
        self, method: str, route: str, body: dict[str, Any] | None = None, *, seconds: float | None = None
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=seconds or self._step_seconds)
        try:
            async with self._http.request(
                method, self._replica.url + route, json=body, timeout=timeout, headers=_CLOSE
            ) as response:
                data = await response.read()
        except TimeoutError as error:
            raise EngineFailed(f"{_path(route)} did not answer within {timeout.total:g} seconds") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(f"{_path(route)} broke off: {error or type(error).__name__}") from error
        if response.status != 200:
            refused = StepRefused(_describe(route, response.status, data))
            refused.http_status = response.status
            raise refused
        return _parse_object(data)


def _raise_first_error(answers: list[dict[str, Any]]) -> None:
    if error := next((answer["error"] for answer in answers if answer.get("error")), None):
        raise StepRefused(str(error))


def _combine(workers: list[dict[str, Any]]) -> Loaded:
    first = workers[0]
    whole = all(worker.get("whole") is True and worker.get("updates") == first.get("updates") for worker in workers)
    error = next((str(worker["error"]) for worker in workers if worker.get("error")), None)
    claimed_by = next((str(worker["claimed_by"]) for worker in workers if worker.get("claimed_by")), None)
    group = first.get("group") if all(worker.get("group") == first.get("group") for worker in workers) else None
    begun = {worker.get("begun") is True for worker in workers}
    return Loaded(
        whole,
        first.get("path"),
        first.get("version"),
        int(first.get("updates", 0)),
        error,
        claimed_by,
        group,
        begun.pop() if len(begun) == 1 else None,
        str(first.get("kind") or "full"),
        first.get("root"),
    )


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _describe(route: str, status: int, data: bytes) -> str:
    error = _parse_object(data).get("error", _parse_object(data))
    message = str(error.get("message") or error.get("detail") or "") if isinstance(error, dict) else str(error)
    if status == 404 and message in ("", "Not Found"):
        return f"the engine has no {_path(route)}; {SETUP}"
    message = message.removeprefix("Call to collective_rpc method failed: ")
    if worker := _WORKER_ERROR.fullmatch(message):
        message = worker.group(1)
    return message or f"{_path(route)} answered HTTP {status}"


def _path(route: str) -> str:
    return route.partition("?")[0]
