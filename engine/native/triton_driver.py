"""Triton without a compiler: its one library for CUDA, compiled ahead.

Triton compiles kernels by itself, but wants a C compiler once per machine for ``driver.c``, through which it asks CUDA for
devices and launches. In an image without one, :func:`use_prebuilt` hands over what :func:`compile_driver` made from the same
file of the same Triton. (Before Triton 3.8 a launcher was compiled for every kernel's signature, too: those need a compiler.)
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import triton
from triton.backends import nvidia

from kvrelay.engine.native.compiled import PREBUILT_DIR

_LIBCUDA = "libcuda.so.1"
_MODULE = "cuda_utils"


def use_prebuilt(directory: Path = PREBUILT_DIR) -> bool:
    """Give Triton the library that lies in ``directory``, if there is no compiler here; whether it was given.

    Side effect: sets ``triton.knobs.build.impl`` for this process.
    """
    path = _driver_path(directory)
    if any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")) or not path.exists():
        return False

    def build(name: str, *_: object) -> str:
        if name != _MODULE:
            raise RuntimeError(
                f"Triton {triton.__version__} wants {name} compiled, and there is no C compiler (apt install gcc)"
            )
        return str(path)

    triton.knobs.build.impl = build
    return True


def compile_driver(directory: Path) -> Path:
    """Compile Triton's driver into ``directory``. Raises subprocess.CalledProcessError, OSError.

    Linked against a libcuda without content: the real one comes into a container with its GPU.
    """
    path = _driver_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        stub = Path(scratch) / _LIBCUDA
        _gcc("-shared", f"-Wl,-soname,{_LIBCUDA}", "-x", "c", "/dev/null", "-o", str(stub))
        _gcc(
            str(_source()), "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", str(path),
            f"-I{_source().parent / 'include'}", f"-I{sysconfig.get_paths()['include']}",
            "-Wl,--no-as-needed", f"-L{scratch}", f"-l:{_LIBCUDA}",
        )  # fmt: skip
    return path


def _source() -> Path:
    return Path(nvidia.__file__ or "").with_name("driver.c")


def _driver_path(directory: Path) -> Path:
    digest = hashlib.sha256(_source().read_bytes()).hexdigest()[:16]
    return directory / f"triton-{_MODULE}-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _gcc(*arguments: str) -> None:
    subprocess.run(["gcc", *arguments], check=True)  # noqa: S603, S607
