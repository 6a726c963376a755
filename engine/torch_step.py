"""A step that was launched on torch, until its tokens are on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.batch import Batch
from kvrelay.engine.copies import Copied
from kvrelay.engine.sampled import Sampled
from kvrelay.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class TorchStep:
    """Implements :class:`kvrelay.engine.interface.LaunchedStep`.

    On a GPU its kernels and the copy of its tokens are queued on the stream, with an event behind them; on a CPU all is done.
    """

    batch: Batch
    sampled: Sampled | None  # of batch.sampling_rows, on the device; None if no row samples
    _fetched: Sampled | None
    _done: torch.cuda.Event | None
    _behind: Copied | None

    @classmethod
    def launched(
        cls, batch: Batch, sampled: Sampled | None, device: torch.device, behind: Copied | None = None
    ) -> TorchStep:
        """Everything of the step is queued; what is left is to bring the tokens to the host.

        ``behind``: the copies of blocks that it reads, or may.
        """
        fetched = None if sampled is None else sampled.fetch()
        done: torch.cuda.Event | None = None
        if device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return cls(batch, sampled, fetched, done, behind)

    @property
    def places(self) -> dict[Sequence, int]:
        """Which of the sampled tokens is whose."""
        return {self.batch.rows[index].sequence: place for place, index in enumerate(self.batch.sampling_rows)}

    def fed_to(self, fed_from: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` ``[n]``, but this step's token of the place ``fed_from`` ``[n]`` where that is not -1; on the device."""
        assert self.sampled is not None, "a step that samples nothing feeds no other"
        return torch.where(fed_from >= 0, self.sampled.tokens[fed_from.clamp_min(0)], token_ids)

    def wait(self) -> list[SampledToken | None]:
        """See LaunchedStep."""
        if self._done is not None:
            self._done.synchronize()
        if self._behind is not None:
            self._behind.synchronize()  # it is over; if it has failed, there is no token
        results: list[SampledToken | None] = [None] * len(self.batch.rows)
        if self._fetched is not None:
            for index, token in zip(self.batch.sampling_rows, self._fetched.read(), strict=True):
                results[self.batch.order[index]] = token
        return results
