"""Raises the logits of green tokens (:mod:`kvrelay.common.watermark`), for the rows that ask for a watermark."""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.common.watermark import MULTIPLIERS, Words, keys_of, mix, threshold_of
from kvrelay.engine.sampling.rows import Asking
from kvrelay.engine.step.slots import WATERMARK

_LOW32 = 2**32 - 1


def add_watermark(logits: torch.Tensor, asking: Asking) -> None:
    """``logits`` ``[num_rows, vocab]`` fp32, in place: plus ``delta`` where the token is green behind its row's last one."""
    vocab_size = logits.shape[-1]
    make = _green_cpu if logits.device.type == "cpu" else green_on_device
    for row in asking.rows_with(WATERMARK).tolist():
        sequence = asking.sequences[row]
        watermark = sequence.sampling.watermark
        assert watermark is not None, f"{sequence.name} asks for no watermark"
        keys = keys_of(np.array(sequence.token_ids[-1:], dtype=np.uint32))
        green = make(keys, vocab_size, threshold_of(watermark.gamma), logits.device)
        logits[row].add_(green, alpha=watermark.delta)


def _green_cpu(keys: Words, vocab_size: int, threshold: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(mix(np.arange(vocab_size, dtype=np.uint32) ^ keys) < threshold)


def green_on_device(keys: Words, vocab_size: int, threshold: int, device: torch.device) -> torch.Tensor:
    """Whether each token ``[vocab]`` is green, by the hash of :func:`kvrelay.common.watermark.mix` in 64-bit integers.

    For GPUs; on a CPU numpy, which knows unsigned words, is several times as fast.
    """
    words = torch.arange(vocab_size, dtype=torch.int64, device=device).bitwise_xor_(int(keys[0]))
    for shift, multiplier in zip((16, 13), MULTIPLIERS, strict=True):
        words ^= words >> shift
        # The product may pass 2**63: what wraps around is above the 32 bits that stay.
        words = words.mul_(multiplier).bitwise_and_(_LOW32)
    words ^= words >> 16
    return words < threshold
