"""The bf16 operations of a step on the CPU, in C++."""

from kvrelay.engine.backends.cpu.native.compiled import CpuKernelsError
from kvrelay.engine.backends.cpu.native.library import CpuKernels

__all__ = ["CpuKernels", "CpuKernelsError"]
