"""The small operations of a decode step on the CPU, in C++: what stands between the matrix products."""

from kvrelay.engine.native.library import CpuKernels, CpuKernelsError

__all__ = ["CpuKernels", "CpuKernelsError"]
