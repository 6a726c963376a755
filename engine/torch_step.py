"""A step launched on torch, until its tokens are on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.kv.device.copies import Copied
from kvrelay.engine.sampling.sampled import Sampled
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.plan import RowResult, SamplingInputs


@dataclass(frozen=True, slots=True)
class Deferred:
    """The state of a step whose work is queued up to the logits, which it keeps for ``sample``."""

    sample: Callable[[SamplingInputs], Sampled]


class TorchStep:
    """Implements :class:`kvrelay.engine.step.interface.LaunchedStep`: deferred ──sample──▶ queued, or queued from the start.

    On a GPU, queued work is on the stream, with an event after it; on a CPU all of it is done.
    """

    def __init__(
        self,
        batch: Batch,
        sampled: Sampled | Deferred | None,
        logprobs: Mapping[int, tuple[SampledToken, ...]],
        device: torch.device,
        behind: Copied | None,
    ) -> None:
        """``sampled``: how far the step is queued; None if no row samples.

        ``logprobs``: of prompts, by row. ``behind``: the copies of blocks that it may read.
        """
        self._batch = batch
        self._logprobs = logprobs
        self._behind = behind
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._state = sampled if isinstance(sampled, Deferred) else self._queue(sampled)
        self._mark()

    @property
    def is_deferred(self) -> bool:
        """See LaunchedStep."""
        return isinstance(self._state, Deferred)

    def sample(self, inputs: SamplingInputs) -> None:
        """See LaunchedStep."""
        assert isinstance(self._state, Deferred), "a step samples once"
        self._state = self._queue(self._state.sample(inputs))
        self._mark()

    def wait(self) -> list[RowResult]:
        """See LaunchedStep."""
        if self._done is not None:
            self._done.synchronize()
        if self._behind is not None:
            self._behind.synchronize()  # the copies are over; if one failed, the tokens are invalid
        assert not isinstance(self._state, Deferred), "a step that was not told to sample yields no tokens"
        tokens: list[tuple[SampledToken, ...]] = [()] * len(self._batch.rows)
        if self._state is not None:
            for index, token in zip(self._batch.sampling_rows.tolist(), self._state.read(), strict=True):
                tokens[index] = (token,)
        return [RowResult(of_row, self._logprobs.get(index, ())) for index, of_row in enumerate(tokens)]

    def _queue(self, sampled: Sampled | None) -> Sampled | None:
        """Launch the copy of the tokens to the host."""
        return None if sampled is None else sampled.fetch()

    def _mark(self) -> None:
        """Record the point that ``wait`` waits for."""
        if self._done is not None:
            self._done.record()
