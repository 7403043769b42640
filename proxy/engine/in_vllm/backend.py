"""The backend inside vLLM: loads a safetensors checkpoint from a path into the running model, all of it or none.

vLLM imports this module in every worker through `--worker-extension-cls proxy.engine.in_vllm.backend.VerbatimWorker`; the import
registers the weight-transfer backend "verbatim" (`--weight-transfer-config '{"backend": "verbatim"}'`). Of this project it imports only
this folder and `contract`, so that it runs in an environment made for vLLM. Checked against vLLM 0.32 and 0.33.

One update is one checkpoint, or one chain of deltas: start, update {"path", "version"}, finish. Before the model is touched, the headers
are read and *rehearsed*: names and shapes go through the model's own weight loaders on the meta device, which counts what lands
where. They must fill exactly what the engine's original checkpoint fills. So bad weights cost nothing: the old ones still serve
and the update can be repeated. `verbatim_prepare` does the same beforehand: it reads, folds and verifies in a thread (`sources.py`), for
an engine samples nothing while a worker's method runs, and rehearses in the method, for that replaces the model's tensors for a moment.
Only a read error halfway can tear the weights; `verbatim_weights` reports that until the next whole update.

Weights may also come from a trainer's GPUs: after `init_weight_transfer_engine {"group", "nccl"}` has joined the trainer's NCCL
group, update {"transfer": {"group", "names", "dtype_names", "shapes"}, "version"} receives the parameters with vLLM's own engine.

`verbatim_claim` lets only one service change the weights at a time: see `Claims`.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import CopyCounter, to_meta_tensor

from contract.tensor_files import BrokenWeights
from proxy.engine.in_vllm.mirror import Mirror
from proxy.engine.in_vllm.sources import Headers, Preparation, TensorHeader, WeightSource, open_checkpoint, open_source

logger = init_logger("vllm.verbatim")

BACKEND = "verbatim"
NCCL_CHECKED = ("0.32", "0.33")
"""The first two numbers of the versions of vLLM whose NCCL engine is used."""
_NO_BACKEND = f'start vLLM with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''


class BadCheckpoint(BrokenWeights):
    """The checkpoint was refused; the model was not touched."""


class TornWeights(RuntimeError):
    """The update failed halfway: the model holds parts of two checkpoints."""


class Claims:
    """Who may change the weights: one owner at a time, and only under the owner's greatest fence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fences: dict[str, int] = {}
        self._owner, self._until = "", 0.0

    def take(self, owner: str, fence: int, seconds: float) -> str | None:
        """Why the claim is refused, or None. 0 seconds release it."""
        if refused := self.refusal(owner, fence):
            return refused
        self._fences[owner] = fence
        self._owner, self._until = owner, self._clock() + seconds
        return None

    def refusal(self, owner: str, fence: int) -> str | None:
        """Why to refuse an update by this owner, or None. An update without an owner is never refused."""
        if owner and self.holder not in (None, owner):
            return f"another service changes this engine's weights, for {self._until - self._clock():.0f} seconds at most"
        if owner and fence < self._fences.get(owner, 0):
            return "another process has taken over since this push began"
        return None

    @property
    def holder(self) -> str | None:
        return self._owner if self._clock() < self._until else None


@dataclass
class VerbatimInit(WeightTransferInitInfo):
    """`nccl` are the fields of vLLM's NCCLWeightTransferInitInfo; `group` is the trainer's name of the group."""

    group: str
    nccl: dict[str, Any]


@dataclass
class VerbatimUpdate(WeightTransferUpdateInfo):
    """A checkpoint's `path`, or the `transfer` of one; `owner` and `fence` as claimed."""

    path: str | None = None
    transfer: dict[str, Any] | None = None
    version: int | None = None
    owner: str = ""
    fence: int = 0


class VerbatimEngine(WeightTransferEngine[VerbatimInit, VerbatimUpdate]):
    init_info_cls = VerbatimInit
    update_info_cls = VerbatimUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tied = _tied_names(self.model)
        self._original = _original_headers(self.vllm_config)
        self._expected: dict[str, int] | None = None
        self._accepted: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
        # Without it deltas are folded while they are loaded.
        mirror = os.environ.get("VERBATIM_MIRROR")
        self._mirror = Mirror(Path(mirror)) if mirror else None
        self._preparation: Preparation | None = None
        self.claims = Claims()
        self.identity = secrets.token_hex(8)
        self._nccl: Any = None
        self._received = False
        self.state: dict[str, Any] = {
            "whole": True,
            "path": None,
            "version": None,
            "updates": 0,
            "error": None,
            "group": None,
            "kind": "full",
            "root": None,
        }

    def init_transfer_engine(self, init_info: VerbatimInit) -> None:
        """Join the trainer's NCCL group in place of an earlier one. Raises BadCheckpoint on an engine without a GPU."""
        try:
            self._join(init_info)
        except Exception as error:
            self.state = {**self.state, "group": None, "error": str(error)}
            if self.parallel_config.world_size == 1:
                raise
            logger.error("%s", error)

    def _join(self, init_info: VerbatimInit) -> None:
        if self.device.type != "cuda":
            raise BadCheckpoint(f"nccl needs engines on GPUs, this one runs on {self.device.type}")
        if ".".join(vllm.__version__.split(".")[:2]) not in NCCL_CHECKED:
            raise BadCheckpoint(
                f"nccl was checked with vLLM {' and '.join(NCCL_CHECKED)}, and this engine is {vllm.__version__}"
            )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo

        self.shutdown()
        self._nccl = NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, self.model)
        self._nccl.init_transfer_engine(NCCLWeightTransferInitInfo(**init_info.nccl))
        self.state = {**self.state, "group": init_info.group, "error": None}

    def start_weight_update(self) -> None:
        """Leaves the model alone: the checkpoint is checked first."""
        self._received = False

    def receive_weights(self, update_info: VerbatimUpdate) -> None:
        """Load the checkpoint. Raises BadCheckpoint with the model as it was, or TornWeights."""
        # The update may have been begun for an earlier one that broke off.
        self._received = False
        try:
            if refused := self.claims.refusal(update_info.owner, update_info.fence):
                raise BadCheckpoint(refused)
            held: dict[str, Any] = {"kind": "full", "root": None}
            if update_info.transfer is not None:
                self._receive(update_info.transfer)
            elif update_info.path is not None:
                source = self._take_source(update_info.path)
                self._load(source, self._fit(source, update_info.path), update_info.path)
                held = {"kind": source.kind, "root": source.root}
            else:
                raise BadCheckpoint("an update needs a path or a transfer")
            self._received = True
        except Exception as error:
            self.state = {**self.state, "error": str(error) or type(error).__name__}
            # Of several workers vLLM reads only the first failure; the others stay in their queues and are taken for answers to
            # the next request. So with several workers the error is only kept in the state.
            if self.parallel_config.world_size == 1:
                raise
            logger.error("%s", error)
            return
        updates = self.state["updates"] + 1
        self.state = {
            **self.state,
            "whole": True,
            "path": update_info.path,
            "version": update_info.version,
            "updates": updates,
            "error": None,
            **held,
        }

    def prepare(self, ticket: str, path: str, kind: str) -> dict[str, Any]:
        """Begin to prepare `path`, or tell how far that is. `{"done": False}` while its thread reads; then `root`, and `error`: why it
        cannot be loaded, None if it can."""
        if self._preparation is None or self._preparation.ticket != ticket:
            self._preparation = Preparation(ticket, path, lambda: open_source(path, kind, self._mirror))
        if not self._preparation.done:
            return {"done": False}
        try:
            source = self._preparation.result()
            self._fit(source, path)
        except Exception as error:
            return {"done": True, "error": str(error) or type(error).__name__}
        return {"done": True, "error": None, "root": source.root}

    def _take_source(self, path: str) -> WeightSource:
        """What was prepared of the path, if it was verified. Otherwise it is read now, for its files may be others since."""
        prepared, self._preparation = self._preparation, None
        if prepared is not None and prepared.path == path and prepared.source is not None and prepared.source.root is not None:
            return prepared.source
        return open_source(path, None, self._mirror)

    def _fit(self, source: WeightSource, path: str) -> Headers:
        """What to load of it. Raises BadCheckpoint if it does not fit; the model is not touched."""
        headers = self._drop_tied(source, path)
        self._check_shapes(headers, path)
        self._check_coverage(headers, path)
        return headers

    def check_transfer(self, transfer: dict[str, Any]) -> None:
        """Raises BadCheckpoint unless the engine joined that group and the parameters fill the model."""
        if transfer["group"] != self.state["group"]:
            raise BadCheckpoint("the engine is not in the trainer's NCCL group: the trainer has to connect again")
        described = zip(transfer["names"], transfer["dtype_names"], transfer["shapes"], strict=True)
        headers = {name: TensorHeader(tuple(shape), getattr(torch, dtype)) for name, dtype, shape in described}
        if len(headers) < len(transfer["names"]):
            raise BadCheckpoint("the trainer names a parameter twice")
        if twice := [name for name, first in self._tied.items() if name in headers and first in headers]:
            raise BadCheckpoint(f"the trainer sends {twice[0]} beside the weight that this model ties it to")
        self._check_shapes(headers, "the trainer's model")
        self._check_coverage(headers, "the trainer's model")

    def finish_weight_update(self) -> None:
        """Raises BadCheckpoint without weights to finish, so that no new label is set."""
        if not self._received:
            raise BadCheckpoint("no weights came since the update was started")
        self._received = False

    def shutdown(self) -> None:
        if self._nccl is not None:
            self._nccl.shutdown()
            self._nccl = None

    def _drop_tied(self, source: WeightSource, path: str) -> Headers:
        """Without the second name of tied weights, which must equal the first."""
        kept = dict(source.headers)
        for second, first in self._tied.items():
            if second not in kept or first not in kept:
                continue
            if not source.are_equal(first, second):
                raise BadCheckpoint(f"{path}: {second} differs from {first}, but this model ties them")
            del kept[second]
        return kept

    def _check_shapes(self, headers: Headers, path: str) -> None:
        for name, header in headers.items():
            original = self._original.get(name)
            if original is not None and original.shape != header.shape:
                raise BadCheckpoint(f"{path}: {name} has shape {list(header.shape)}, the model {list(original.shape)}")

    def _check_coverage(self, headers: Headers, path: str) -> None:
        """Raises BadCheckpoint unless the checkpoint fills what the original one fills."""
        wanted = {name: (header.shape, header.dtype) for name, header in headers.items()}
        if wanted == self._accepted:
            return
        if self._expected is None:
            original = {name: header for name, header in self._original.items() if name not in self._tied}
            self._expected = rehearse(self.model, original) if original else None
        covered = rehearse(self.model, headers)
        expected = self._expected or {name: max(count, 1) for name, count in covered.items() if name not in self._tied}
        short = [name for name, count in expected.items() if covered.get(name, 0) < count]
        if short:
            absent = [name for name in self._original if name not in headers and name not in self._tied]
            what = f"lacks {_some(absent)}" if absent else f"does not fill {_some(short)}"
            raise BadCheckpoint(f"{path} {what}")
        self._accepted = wanted

    def _load(self, source: WeightSource, headers: Headers, path: str) -> None:
        self.state = {**self.state, "whole": False}
        try:
            with torch.device(self.device):
                initialize_layerwise_reload(self.model)
                try:
                    self.model.load_weights(source.read(headers))
                finally:
                    # Also after an error: it puts back the tensors the kernels use, so that the next update finds a model.
                    finalize_layerwise_reload(self.model, self.model_config)
                self._retie()
        except Exception as error:
            raise TornWeights(f"reading {path} broke off, the weights are torn: {error}") from error

    def _receive(self, transfer: dict[str, Any]) -> None:
        """Raises BadCheckpoint before anything is received, TornWeights after. Waits for the trainer for as long as NCCL does."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        self.check_transfer(transfer)
        info = NCCLWeightTransferUpdateInfo(transfer["names"], transfer["dtype_names"], transfer["shapes"])
        self.state = {**self.state, "whole": False}
        try:
            with torch.device(self.device):
                self._nccl.start_weight_update()
                try:
                    self._nccl.receive_weights(info)
                    torch.accelerator.synchronize()
                finally:
                    self._nccl.finish_weight_update()
                self._retie()
        except Exception as error:
            raise TornWeights(f"the transfer broke off, the weights are torn: {error}") from error

    def _retie(self) -> None:
        # On a CPU vLLM packs each linear layer's weight for its kernel. The reload repacks the embedding but not the output layer that
        # shares its weight, which would keep using the old one.
        for second in self._tied:
            layer = self.model.get_submodule(second.rpartition(".")[0])
            if hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)


def rehearse(model: torch.nn.Module, headers: Headers) -> dict[str, int]:
    """How many elements of each parameter the checkpoint would fill, 0 where nothing lands. Leaves the model as it was.

    The model's own loaders run on the meta device, so renamed, packed and sharded weights count where they land. Raises BadCheckpoint
    naming a tensor that a loader refuses.
    """
    initialize_layerwise_reload(model)
    covered: dict[str, int] = {}
    current = ""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, header in headers.items():
            current = name
            yield name, torch.empty(header.shape, dtype=header.dtype, device="meta")

    wrapped = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        covered[name] = 0
        loader = getattr(parameter, "weight_loader", None)
        wrapped.append((parameter, loader))
        parameter.weight_loader = _counting(_original_loader(loader), name, covered)
    try:
        model.load_weights(tensors())
    except Exception as error:
        what = str(error) or type(error).__name__
        raise BadCheckpoint(f"the model has no place for {current}: {what}") from error
    finally:
        for parameter, loader in wrapped:
            parameter.weight_loader = loader
        _put_back(model)
    return covered


def _put_back(model: torch.nn.Module) -> None:
    """Undo `initialize_layerwise_reload`. vLLM's own finalize does too, but warns about every layer left unloaded."""
    model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def _original_loader(loader: Callable[..., Any]) -> Callable[..., Any]:
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]
    return loader


def _counting(loader: Callable[..., Any], name: str, covered: dict[str, int]) -> Callable[..., Any]:
    @functools.wraps(loader)
    def counted(*args: Any, **kwargs: Any) -> Any:
        target, source = args[0], args[1] if len(args) > 1 else kwargs["loaded_weight"]
        if not _castable(source.dtype, target.dtype):
            raise BadCheckpoint(f"{source.dtype} cannot become {target.dtype}")
        # vLLM never moves biases to the meta device.
        stand_in = target if target.is_meta else to_meta_tensor(target)
        with CopyCounter() as counter:
            result = loader(stand_in, *args[1:], **kwargs)
        covered[name] += counter.copied_numel
        return result

    return counted


def _castable(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a loader's silent cast is harmless: the same dtype, or between floats of 16 bits and more."""
    wide = source.is_floating_point and target.is_floating_point and min(source.itemsize, target.itemsize) >= 2
    return source == target or wide


def _tied_names(model: torch.nn.Module) -> dict[str, str]:
    """The second and later names of shared parameters, each with the first name."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def _original_headers(vllm_config: Any) -> Headers:
    """Headers of the checkpoint the engine was started with; empty if it was not safetensors or is gone."""
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    path = Path(model_config.model)
    try:
        if not path.is_dir():
            from huggingface_hub import snapshot_download

            path = Path(
                snapshot_download(
                    model_config.model,
                    revision=model_config.revision,
                    cache_dir=load_config.download_dir,
                    local_files_only=True,
                )
            )
        return open_checkpoint(path).headers
    except (BrokenWeights, OSError, ValueError):
        return {}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class VerbatimWorker:
    """Mixed into vLLM's worker: the methods for `/collective_rpc`.

    No method may raise, because of several errors vLLM reads one and leaves the rest for later requests. A worker without the
    backend answers `no_backend`."""

    def verbatim_weights(self) -> dict[str, Any]:
        """`whole`: False while the weights are torn; `path` and `version` of the last whole update, and the number of `updates`;
        `error` of the last update if it failed; `claimed_by`: who is changing the weights; `group`: the joined NCCL group; `kind` and
        `root` of the last update (None: it had no digests); `begun`:
        whether vLLM has begun an update and not ended it; `engine`: a random name until it starts again; `logprob_mode`: what the engine
        returns as logprobs."""
        told = self._answer(
            lambda engine: {
                **engine.state,
                "claimed_by": engine.claims.holder,
                "engine": engine.identity,
                "begun": self._weight_update_active,  # type: ignore[attr-defined]
            }
        )
        return {**told, "logprob_mode": self.vllm_config.model_config.logprobs_mode}  # type: ignore[attr-defined]

    def verbatim_claim(self, owner: str, fence: int, seconds: float) -> dict[str, Any]:
        """`error`: why the claim is refused, None if it is held."""
        return self._answer(lambda engine: {"error": engine.claims.take(owner, fence, seconds)})

    def verbatim_prepare(self, ticket: str, path: str, kind: str) -> dict[str, Any]:
        """See `VerbatimEngine.prepare`: begins with a new ticket, and answers at once. Safe while requests run."""
        return self._answer(lambda engine: engine.prepare(ticket, path, kind))

    def verbatim_check_transfer(self, transfer: dict[str, Any]) -> dict[str, Any]:
        """`error`: why the trainer's parameters cannot be received, None if they can. Safe while requests run."""
        return self._answer(lambda engine: _error_of(engine.check_transfer, transfer))

    def _answer(self, ask: Callable[[VerbatimEngine], dict[str, Any]]) -> dict[str, Any]:
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return ask(engine) if isinstance(engine, VerbatimEngine) else {"no_backend": _NO_BACKEND}


def _error_of(check: Callable[[Any], object], what: Any) -> dict[str, Any]:
    try:
        check(what)
    except Exception as error:
        # No worker may raise: see `VerbatimWorker`.
        return {"error": str(error) or type(error).__name__}
    return {"error": None}


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, VerbatimEngine)
