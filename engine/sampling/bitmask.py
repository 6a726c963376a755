"""Masks of one bit per token, as grammars fill them, applied to logits on the device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")  # [256, 8]
# What each token's logit may be at most: infinity where it may come. As words, since numpy knows no bf16.
_LIMITS_OF_BYTE = {
    dtype: torch.where(torch.from_numpy(_BITS_OF_BYTE) == 1, torch.inf, -torch.inf).to(dtype).view(words).numpy()
    for dtype, words in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16))
}

Upload = Callable[[Seq[npt.NDArray[Any]]], list[torch.Tensor]]
"""See :meth:`kvrelay.engine.sampling.sampler.SamplerOps.upload`."""


def apply_bitmask(logits: torch.Tensor, rows: Seq[int], bitmask: npt.NDArray[np.int32], upload: Upload) -> None:
    """Set the logits of tokens without a bit to -inf, in place, in ``rows`` of ``logits`` ``[num_rows, vocab]`` fp32, bf16 or fp16.

    Does not wait for the device.

    ``bitmask`` ``[len(rows), ceil(vocab / 32)]``: token ``t`` has bit ``t % 32`` of word ``t // 32``.
    """
    vocab_size = logits.shape[-1]
    if logits.device.type == "cpu":
        # A minimum with a table's rows takes a fifteenth of the time of a masked fill, whose branches nobody can predict.
        table = _LIMITS_OF_BYTE[logits.dtype]
        for row, words in zip(rows, bitmask, strict=True):
            limits = table.take(words.astype("<i4", copy=False).view(np.uint8), axis=0)
            of_row = logits[row]
            torch.minimum(of_row, torch.from_numpy(limits).view(logits.dtype).view(-1)[:vocab_size], out=of_row)
    else:
        index, words = upload((np.array(rows, dtype=np.int64), bitmask))
        may_come = unpack_on_device(words, vocab_size)
        logits[index] = logits[index].masked_fill_(~may_come, -torch.inf)


def unpack_on_device(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``[n, ceil(vocab / 32)]`` int32 -> ``[n, vocab]`` bool: by shifts, for GPUs."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts).bitwise_and_(1).flatten(1)[:, :vocab_size] == 1
