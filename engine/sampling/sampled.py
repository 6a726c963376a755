"""Sampled tokens on their way from the device to the host, and tokens that the next step uses before they arrive."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.common.sampling import SampledToken


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Tokens of the step in front, which still runs, so the host does not know them yet."""

    counts: npt.NDArray[np.int32]  # [num_rows] number of tokens of each row under way, 0 or 1
    token_ids: torch.Tensor  # [num_rows] int64 on the device; arbitrary where there is none


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of some sampled tokens, and of the likeliest tokens at each place."""

    rows: list[int]  # [n] indices of the sampled tokens
    counts: list[int]  # [n] number of likeliest tokens that each wants
    chosen: torch.Tensor  # [n] fp32
    top_values: torch.Tensor  # [n, max(counts)] fp32
    top_ids: torch.Tensor  # [n, max(counts)] int64

    @classmethod
    def of(cls, raw: torch.Tensor, tokens: torch.Tensor, rows: list[int], counts: Seq[int]) -> Logprobs:
        """From log probabilities ``raw`` ``[n, vocab]`` fp32 and the sampled ``tokens`` ``[n]`` int64."""
        top = raw.topk(min(max(counts), raw.shape[-1]), dim=-1)
        chosen = raw.gather(1, tokens[:, None])[:, 0]
        return cls(rows, list(counts), chosen, top.values, top.indices)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's sampled tokens, on the device or on the host."""

    tokens: torch.Tensor  # [num_tokens] int64
    logprobs: Logprobs | None

    def fetch(self) -> Sampled:
        """A copy on the host. On a GPU the copies are only launched: call ``read`` after they are done."""
        if self.tokens.device.type == "cpu":
            return self
        logprobs = self.logprobs
        if logprobs is not None:
            fetched = map(_fetch, (logprobs.chosen, logprobs.top_values, logprobs.top_ids))
            logprobs = Logprobs(logprobs.rows, logprobs.counts, *fetched)
        return Sampled(_fetch(self.tokens), logprobs)

    def read(self) -> list[SampledToken]:
        """The tokens as numbers. If they are on the device, this waits for it."""
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
