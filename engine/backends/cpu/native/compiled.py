"""Finds the compiled CPU kernels: from this machine's compiler, or from those that were compiled with the image.

The compiler's output is cached under a hash of sources, compiler and processor, so a second start takes it from there. Our images
have no compiler. There, ``prebuilt/`` beside this file is searched for the best variant that this processor runs.
:mod:`kvrelay.engine.backends.cpu.native.prebuild` fills that folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cpp")
    for name in ("ops", "linear", "linear_dot_products", "linear_portable", "low_rank", "attention")
)
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("step.h", "linear.h"))
_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
_COMPILE_S = 120.0

PREBUILT_DIR = Path(__file__).with_name("prebuilt")


class CpuKernelsError(Exception):
    """The kernels cannot be used on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of processor that kernels are compiled for ahead of time."""

    name: str
    flags: tuple[str, ...]  # flags of the compiler
    needs: frozenset[str]  # names in /proc/cpuinfo


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE = "-mprefer-vector-width=512"
VARIANTS = (  # best first
    Variant("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16", _WIDE), _V4 | {"avx512_bf16"}),
    Variant("x86-64-v4", ("-march=x86-64-v4", _WIDE), _V4),
    Variant("x86-64-v3", ("-march=x86-64-v3",), _V3),
)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/kvrelay/kernels``, default ``~/.cache/kvrelay/kernels``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvrelay" / "kernels"


def find_library(cache_dir: Path, prebuilt_dir: Path = PREBUILT_DIR) -> Path:
    """The path of the library for this machine, compiled if necessary. Raises CpuKernelsError."""
    compiler = shutil.which("g++")
    if compiler is None:
        return _prebuilt(prebuilt_dir, processor_flags())
    path = cache_dir / f"cpu-{_key(compiler)}.so"
    if not path.exists():
        compile_library(compiler, ("-march=native",), path)
    return path


def compile_library(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile the kernels into ``path``, completely or not at all, because two workers may do so at once.

    Raises CpuKernelsError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            built = Path(directory) / path.name
            command = [compiler, *_FLAGS, *flags, *map(str, _SOURCES), "-o", str(built)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_S)  # noqa: S603
            if ended.returncode:
                raise CpuKernelsError(f"{compiler} fails: {ended.stderr.strip()[-500:]}")
            built.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CpuKernelsError(f"cannot compile into {path.parent}: {error}") from error


def prebuilt_path(directory: Path, variant: Variant) -> Path:
    """The path of a variant's library. It contains a hash of the sources."""
    return directory / f"cpu-{variant.name}-{_hash(*_source_texts())}.so"


def processor_flags() -> frozenset[str]:
    """This processor's features, by Linux' names; empty if Linux does not list them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def _prebuilt(directory: Path, flags: frozenset[str]) -> Path:
    for variant in VARIANTS:
        path = prebuilt_path(directory, variant)
        if variant.needs <= flags and path.exists():
            return path
    raise CpuKernelsError("there is no g++ (apt install g++), and nothing compiled ahead for this processor")


def _source_texts() -> list[str]:
    return [source.read_text() for source in (*_HEADERS, *_SOURCES)]


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    processor = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        processor = "\n".join(line for line in lines if line.startswith(("model", "cpu family", "flags", "Features")))
    return _hash(*_source_texts(), *_FLAGS, version, platform.machine(), processor)


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
