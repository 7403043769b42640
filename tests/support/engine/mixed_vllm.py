"""A vLLM of which there is no build for CPUs: its Python over the compiled kernels of the tests' own vLLM, in an environment of its own.

    python -m tests.support.engine.mixed_vllm 0.33.0 .cache/engines/0.33.0

The wheel for GPUs is downloaded, without what it depends on. Good for as long as its Python calls the kernels as the other version does:
no proof of a number, which the tests recompute.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory


def make_mixed(version: str, environment: Path) -> None:
    """Make the environment, whose other packages are those of this one. Raises CalledProcessError if the wheel cannot be downloaded."""
    source = environment / "mixed"
    source.mkdir(parents=True)
    with TemporaryDirectory() as downloads:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", downloads]
        subprocess.run([*download, f"vllm=={version}"], check=True)
        (wheel,) = Path(downloads).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(source, [name for name in archive.namelist() if not name.endswith(".so")])
    shared = Path(sysconfig.get_path("purelib"))
    for kernel in (shared / "vllm").glob("*.so"):
        (source / "vllm" / kernel.name).symlink_to(kernel)
    _mark_for_cpu(source, version)
    venv.create(environment)
    packages = next((environment / "lib").glob("python*")) / "site-packages"
    # In this order: the first vllm that is found is imported.
    (packages / "mixed.pth").write_text(f"{source.resolve()}\n{shared}\n")


def _mark_for_cpu(source: Path, version: str) -> None:
    """vLLM takes its platform from its version's suffix."""
    (metadata,) = source.glob("vllm-*.dist-info")
    marked = metadata.rename(source / f"vllm-{version}+cpu.dist-info")
    text = (marked / "METADATA").read_text()
    (marked / "METADATA").write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))


if __name__ == "__main__":
    make_mixed(sys.argv[1], Path(sys.argv[2]))
