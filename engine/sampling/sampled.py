"""Sampled tokens on their way from the device to the host, and those that the next step takes before they are there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.common.sampling import SampledToken


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What a step's rows go on from that the host does not know yet: tokens of the step in front, which still runs."""

    counts: npt.NDArray[np.int32]  # [num_rows] how many tokens each row has under way, 0 or 1
    token_ids: torch.Tensor  # [num_rows] int64 on the device; anything where there is none


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of some of the sampled tokens, and of the likeliest beside each."""

    rows: list[int]  # [n] which of the sampled tokens they belong to
    counts: list[int]  # [n] how many of the likeliest each wants
    chosen: torch.Tensor  # [n] fp32
    top_values: torch.Tensor  # [n, max(counts)] fp32
    top_ids: torch.Tensor  # [n, max(counts)] int64

    @classmethod
    def of(cls, raw: torch.Tensor, tokens: torch.Tensor, rows: list[int], counts: Seq[int]) -> Logprobs:
        """From ``raw`` ``[n, vocab]`` fp32, the log probabilities, and ``tokens`` ``[n]`` int64, what was sampled of each."""
        top = raw.topk(min(max(counts), raw.shape[-1]), dim=-1)
        chosen = raw.gather(1, tokens[:, None])[:, 0]
        return cls(rows, list(counts), chosen, top.values, top.indices)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled, on the device or on the host."""

    tokens: torch.Tensor  # [num_tokens] int64
    logprobs: Logprobs | None

    def fetch(self) -> Sampled:
        """The same on the host. On a GPU the copies are launched and not waited for: ``read`` only behind them."""
        if self.tokens.device.type == "cpu":
            return self
        logprobs = self.logprobs
        if logprobs is not None:
            fetched = map(_fetch, (logprobs.chosen, logprobs.top_values, logprobs.top_ids))
            logprobs = Logprobs(logprobs.rows, logprobs.counts, *fetched)
        return Sampled(_fetch(self.tokens), logprobs)

    def read(self) -> list[SampledToken]:
        """The tokens as numbers. On the device it waits for it."""
        token_ids: list[int] = self.tokens.tolist()
        sampled = [SampledToken(token_id) for token_id in token_ids]
        if (logprobs := self.logprobs) is not None:
            of_rows = zip(
                logprobs.rows,
                logprobs.counts,
                logprobs.chosen.tolist(),
                logprobs.top_ids.tolist(),
                logprobs.top_values.tolist(),
                strict=True,
            )
            for row, count, chosen, ids, values in of_rows:
                top = tuple(zip(ids[:count], values[:count], strict=True))
                sampled[row] = SampledToken(token_ids[row], chosen, top)
        return sampled


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    # Pinned: a copy into other memory would make the host wait.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
