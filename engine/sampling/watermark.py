"""The watermark of Kirchenbauer et al., "A Watermark for Large Language Models" (ICML 2023): raises the logits of green tokens.

Each token makes a part ``gamma`` of the vocabulary green for the next token ("left hash", a context of one). Generation adds
``delta`` to the logits of green tokens. A detector that knows the hash counts green tokens: text without a watermark has about a
part ``gamma``.

The hash is our own and must never change, because texts outlive programs. A token is green after another if and only if ``mix(token
^ mix(previous + 0x9E3779B9)) < gamma * 2**32``, where ``mix`` is the finalizer of MurmurHash3 (A. Appleby, public domain), a
bijection of 32-bit words. So the green list's size is about gamma's part of the vocabulary, where the paper's is exact. In return,
a token's colour costs six integer operations, equal on all machines and for every vocabulary. It is no secret: anyone can detect
the watermark, and anyone who knows of it can remove it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.sampling.rows import Asking
from kvrelay.engine.step.slots import WATERMARK

Words = npt.NDArray[np.uint32]

GOLDEN = 0x9E3779B9  # keeps token 0 from being mixed to 0
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)  # constants of MurmurHash3's finalizer
_LOW32 = 2**32 - 1


def mix(words: Words) -> Words:
    """MurmurHash3's finalizer, applied to each 32-bit word."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(MULTIPLIERS[0])
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(MULTIPLIERS[1])
    return words ^ (words >> np.uint32(16))


def keys_of(previous: Words) -> Words:
    """The keys of the next tokens' colours."""
    return mix(previous + np.uint32(GOLDEN))


def is_green(previous: Words, token_ids: Words, gamma: float) -> npt.NDArray[np.bool_]:
    """Whether each token is green after its predecessor; both arrays ``[n]``."""
    green: npt.NDArray[np.bool_] = mix(token_ids ^ keys_of(previous)) < threshold_of(gamma)
    return green


def threshold_of(gamma: float) -> int:
    """Hashes below this are green: ``gamma * 2**32``, within 0 to ``2**32 - 1``."""
    return min(max(int(gamma * 2**32), 0), 2**32 - 1)


def add_watermark(logits: torch.Tensor, asking: Asking) -> None:
    """Add ``delta`` to ``logits`` ``[num_rows, vocab]`` fp32, in place, for tokens that are green after their row's last token."""
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
    """Whether each token ``[vocab]`` is green, with the hash of :func:`mix` in 64-bit integers.

    For GPUs; on a CPU numpy has unsigned words and is several times as fast.
    """
    words = torch.arange(vocab_size, dtype=torch.int64, device=device).bitwise_xor_(int(keys[0]))
    for shift, multiplier in zip((16, 13), MULTIPLIERS, strict=True):
        words ^= words >> shift
        # The product may overflow 2**63, but only above the 32 bits that are kept.
        words = words.mul_(multiplier).bitwise_and_(_LOW32)
    words ^= words >> 16
    return words < threshold
