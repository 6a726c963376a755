"""How much of a GPU's memory a KV pool takes: a pure function of measurements.

A worker's share is a part of the whole GPU, and covers its weights, its largest step and its pool. So workers that share a GPU need
not know of each other. As long as their shares leave about a tenth, it does not matter which starts first, and a restarted worker
gets what it had. A share of the *free* memory would differ at every start.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOST_OF_FREE = 0.9


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one GPU's memory, measured after loading the weights while no step runs."""

    total: int
    free: int  # free for any process
    held: int  # this worker's weights and torch's cache; CUDA's own memory is in no share
    step: int  # additional memory of the largest step while it runs

    @property
    def text(self) -> str:
        """A text for error messages and logs."""
        sizes = (self.total, self.held, self.step, self.free)
        return "{:.1f} GiB in all, {:.1f} held by the weights, {:.2f} for the largest step; {:.1f} are free".format(
            *(size / 2**30 for size in sizes)
        )


def pool_nbytes(memory: GpuMemory, fraction: float) -> int:
    """The pool's bytes for a worker whose share of the GPU is ``fraction``; 0 if the share is smaller than what it holds without a
    pool.

    Never more than nine tenths of the free memory after the largest step. Other processes may have taken more than their share, and
    the graphs of decode steps, tables and libraries are allocated after the pool.
    """
    share = int(memory.total * fraction) - memory.held
    return max(0, min(share, int(memory.free * _MOST_OF_FREE)) - memory.step)
