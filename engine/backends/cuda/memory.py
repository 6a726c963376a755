"""How much of a GPU's memory a KV pool takes: a pure function of what was measured.

A worker's share is of the whole GPU, and its weights, its largest step and its pool are in it. So workers that share a GPU need not
know of each other: as long as their shares leave a tenth or so, it does not matter who starts first, and one that is started
again gets what it had. A share of what is *free* would be another one at every start.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOST_OF_FREE = 0.9


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one GPU's memory, measured when a worker's weights are there and no step is under way."""

    total: int
    free: int  # to whoever asks first
    held: int  # by this worker: its weights, and what torch keeps. What CUDA itself takes is in no share
    step: int  # what the largest step takes beside that, while it runs

    @property
    def text(self) -> str:
        """For people."""
        sizes = (self.total, self.held, self.step, self.free)
        return "{:.1f} GiB in all, {:.1f} held by the weights, {:.2f} for the largest step; {:.1f} are free".format(
            *(size / 2**30 for size in sizes)
        )


def pool_nbytes(memory: GpuMemory, fraction: float) -> int:
    """Bytes of the pool of a worker whose share of the GPU is ``fraction``, 0 if that is less than it has without one.

    Never more than nine tenths of what is free, the largest step left out: others may have taken more than was left to them, and
    the graphs of decode steps, tables and libraries come behind the pool.
    """
    share = int(memory.total * fraction) - memory.held
    return max(0, min(share, int(memory.free * _MOST_OF_FREE)) - memory.step)
