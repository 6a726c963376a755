"""The bf16 operations of a step on the CPU, in C++."""

from kvrelay.engine.native.library import CpuKernels, CpuKernelsError

__all__ = ["CpuKernels", "CpuKernelsError"]
