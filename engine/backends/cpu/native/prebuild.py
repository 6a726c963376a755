"""Compiles the CPU kernels ahead of time, for images without a compiler.

Used as ``python -m kvrelay.engine.backends.cpu.native.prebuild DIR``. DIR becomes ``prebuilt/`` beside this file: the kernels for
each kind of processor. Needs g++.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from kvrelay.engine.backends.cpu.native.compiled import VARIANTS, CpuKernelsError, compile_library, prebuilt_path


def prebuild(directory: Path) -> list[Path]:
    """Compile everything into ``directory``; returns the files. Raises CpuKernelsError."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise CpuKernelsError("there is no g++ (apt install g++)")
    paths = [prebuilt_path(directory, variant) for variant in VARIANTS]
    for variant, path in zip(VARIANTS, paths, strict=True):
        compile_library(compiler, variant.flags, path)
    return paths


if __name__ == "__main__":
    for built in prebuild(Path(sys.argv[1])):
        print(built)  # noqa: T201 - a build step's output
