"""Lets the tests' engine serve Qwen2.5-VL without torchvision, of which the package index has no build for CPUs.

Images go through transformers' own Pillow image processor. What is stood in for is the processor of videos, which no test shows, and the
import of torchvision by modules of which only other parts are used. To be called once, in a process that serves or forks servers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULES = ("transformers.models.qwen2_vl.image_processing_qwen2_vl",)
_TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def serve_without_torchvision() -> None:
    """No-op where torchvision is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    _import_modules()
    _stand_in_for_videos()
    _inspect_models_here()


def _import_modules() -> None:
    """With empty modules in torchvision's place, gone afterwards: transformers goes on knowing that it is not there."""
    from transformers.utils import is_torchvision_available

    assert not is_torchvision_available()
    for name in _TORCHVISION:
        stand_in = sys.modules[name] = ModuleType(name)
        stand_in.__spec__ = ModuleSpec(name, None)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, stand_in)
    try:
        for name in _MODULES:
            importlib.import_module(name)
    finally:
        for name in _TORCHVISION:
            del sys.modules[name]


def _stand_in_for_videos() -> None:
    from transformers import processing_utils
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.video_processing_utils import VideoProcessorMixin

    class NoVideos(VideoProcessorMixin):
        """What a processor asks of its video processor before there is a video."""

        merge_size = 2

    def load(*_: Any, **__: Any) -> NoVideos:
        return NoVideos()

    AutoVideoProcessor.from_pretrained = load
    processing_utils.transformers_module.VideoProcessorMixin = VideoProcessorMixin


def _inspect_models_here() -> None:
    """vLLM would look at the class of a model in a new process, where nothing stands in for torchvision."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()
