"""A step that was launched on torch, until its tokens are on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.kv.copies import Copied
from kvrelay.engine.sampling.sampled import Sampled
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Deferred:
    """Everything is queued up to the logits, which ``sample`` holds until it is told to go on with them."""

    sample: Callable[[], Sampled]


@dataclass(frozen=True, slots=True)
class _Queued:
    """Everything is queued, the copy of the tokens to the host included."""

    sampled: Sampled | None  # of batch.sampling_rows, on the device; None if no row samples
    fetched: Sampled | None


class TorchStep:
    """Implements :class:`kvrelay.engine.step.interface.LaunchedStep`: deferred ──sample──▶ queued, or queued from the start.

    On a GPU what is queued is on the stream, with an event behind it; on a CPU all of it is done.
    """

    def __init__(
        self, batch: Batch, sampled: Sampled | Deferred | None, device: torch.device, behind: Copied | None = None
    ) -> None:
        """The step is on the stream as far as ``sampled`` says; None if no row samples.

        ``behind``: the copies of blocks that it reads, or may.
        """
        self._batch = batch
        self._behind = behind
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._state = sampled if isinstance(sampled, Deferred) else self._queue(sampled)
        self._mark()

    @property
    def is_deferred(self) -> bool:
        """See LaunchedStep."""
        return isinstance(self._state, Deferred)

    @property
    def places(self) -> dict[Sequence, int]:
        """Which of the sampled tokens is whose."""
        return {self._batch.rows[index].sequence: place for place, index in enumerate(self._batch.sampling_rows)}

    def fed_to(self, fed_from: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` ``[n]``, but this step's token of the place ``fed_from`` ``[n]`` where that is not -1; on the device."""
        assert isinstance(self._state, _Queued), "a step that was not told to sample feeds no other"
        assert self._state.sampled is not None, "a step that samples nothing feeds no other"
        return torch.where(fed_from >= 0, self._state.sampled.tokens[fed_from.clamp_min(0)], token_ids)

    def sample(self) -> None:
        """See LaunchedStep."""
        assert isinstance(self._state, Deferred), "a step samples once"
        self._state = self._queue(self._state.sample())
        self._mark()

    def wait(self) -> list[SampledToken | None]:
        """See LaunchedStep."""
        if self._done is not None:
            self._done.synchronize()
        if self._behind is not None:
            self._behind.synchronize()  # it is over; if it has failed, there is no token
        assert isinstance(self._state, _Queued), "a step that was not told to sample yields no tokens"
        results: list[SampledToken | None] = [None] * len(self._batch.rows)
        if self._state.fetched is not None:
            for index, token in zip(self._batch.sampling_rows, self._state.fetched.read(), strict=True):
                results[self._batch.order[index]] = token
        return results

    def _queue(self, sampled: Sampled | None) -> _Queued:
        return _Queued(sampled, None if sampled is None else sampled.fetch())

    def _mark(self) -> None:
        """What ``wait`` waits for is queued."""
        if self._done is not None:
            self._done.record()
