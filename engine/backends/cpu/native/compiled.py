"""Where the compiled kernels come from: this machine's compiler, or those that were compiled when an image was made.

A compiler's output lies in the cache under a hash of sources, compiler and processor: a second start takes it from there. Without a
compiler, as in our images, ``prebuilt/`` beside this file is looked through for the best that this processor runs; it is filled
by :mod:`kvrelay.engine.backends.cpu.native.prebuild`.
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
    """The kernels cannot be had on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of processor that kernels are compiled for ahead of time."""

    name: str
    flags: tuple[str, ...]  # of the compiler
    needs: frozenset[str]  # as /proc/cpuinfo calls them


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE = "-mprefer-vector-width=512"
VARIANTS = (  # the best first
    Variant("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16", _WIDE), _V4 | {"avx512_bf16"}),
    Variant("x86-64-v4", ("-march=x86-64-v4", _WIDE), _V4),
    Variant("x86-64-v3", ("-march=x86-64-v3",), _V3),
)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/kvrelay/kernels``, default ``~/.cache/kvrelay/kernels``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvrelay" / "kernels"


def find_library(cache_dir: Path, prebuilt_dir: Path = PREBUILT_DIR) -> Path:
    """The library for this machine, compiled if need be. Raises CpuKernelsError."""
    compiler = shutil.which("g++")
    if compiler is None:
        return _prebuilt(prebuilt_dir, processor_flags())
    path = cache_dir / f"cpu-{_key(compiler)}.so"
    if not path.exists():
        compile_library(compiler, ("-march=native",), path)
    return path


def compile_library(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile the kernels into ``path``, whole or not at all: two workers may do so at once. Raises CpuKernelsError."""
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
    """Where a variant lies. Of other sources than these it would be another file."""
    return directory / f"cpu-{variant.name}-{_hash(*_source_texts())}.so"


def processor_flags() -> frozenset[str]:
    """What this machine's processor can do, as Linux names it; empty if Linux does not say."""
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
