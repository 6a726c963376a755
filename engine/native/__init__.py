"""The bf16 operations of a step on the CPU, in C++."""

from kvrelay.engine.native.compiled import CpuKernelsError
from kvrelay.engine.native.library import CpuKernels

__all__ = ["CpuKernels", "CpuKernelsError"]
