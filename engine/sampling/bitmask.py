"""Masks with one bit per token, as grammars fill them, applied to logits on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")  # [256, 8]
# Upper bound of each token's logit: infinity if the token is allowed. As words, because numpy has no bf16.
_LIMITS_OF_BYTE = {
    dtype: torch.where(torch.from_numpy(_BITS_OF_BYTE) == 1, torch.inf, -torch.inf).to(dtype).view(words).numpy()
    for dtype, words in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16))
}

Upload = Callable[[Seq[npt.NDArray[Any]]], list[torch.Tensor]]
"""See :meth:`kvrelay.engine.sampling.sampler.SamplerOps.upload`."""
MaskTokens = Callable[[torch.Tensor, Seq[int], npt.NDArray[np.int32]], None]
"""See :meth:`kvrelay.engine.sampling.sampler.SamplerOps.mask_tokens`."""


def apply_bitmask(logits: torch.Tensor, rows: Seq[int], bitmask: npt.NDArray[np.int32]) -> None:
    """Set the logits of tokens without a bit to -inf, in place, in ``rows`` of ``logits`` ``[num_rows, vocab]`` (fp32, bf16 or
    fp16).

    ``bitmask`` ``[len(rows), ceil(vocab / 32)]``: token ``t`` has bit ``t % 32`` of word ``t // 32``.
    """
    vocab_size = logits.shape[-1]
    # A minimum with rows of a table takes a fifteenth of the time of a masked fill, whose branches cannot be predicted.
    table = _LIMITS_OF_BYTE[logits.dtype]
    for row, words in zip(rows, bitmask, strict=True):
        limits = table.take(words.astype("<i4", copy=False).view(np.uint8), axis=0)
        of_row = logits[row]
        torch.minimum(of_row, torch.from_numpy(limits).view(logits.dtype).view(-1)[:vocab_size], out=of_row)
