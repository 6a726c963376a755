"""The watermark of Kirchenbauer et al., "A Watermark for Large Language Models" (ICML 2023): which tokens are green, and the test.

Each token makes a part ``gamma`` of the vocabulary green for the token behind it ("left hash", a context of one). Generation
adds ``delta`` to the logits of green tokens (:mod:`kvrelay.engine.sampling.watermark`); whoever knows the hash counts green tokens
afterwards: text without a watermark has a part ``gamma`` of them, up to chance.

The hash is ours, and may never change: texts outlive programs. A token is green behind another exactly if
``mix(token ^ mix(previous + 0x9E3779B9)) < gamma * 2**32``, where ``mix`` is the finalizer of MurmurHash3 (A. Appleby, public
domain), a bijection of 32-bit words. So a list's size is gamma's part of the vocabulary up to chance, where the paper has it exact;
in return a token's colour costs six integer operations, the same on every machine, whatever the vocabulary. There is no secret in
it: everybody can detect the watermark, and who knows of it can wash it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

GOLDEN = 0x9E3779B9  # keeps token 0 from being mixed to 0
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)  # of MurmurHash3's finalizer


def mix(words: Words) -> Words:
    """MurmurHash3's finalizer of each 32-bit word."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(MULTIPLIERS[0])
    words = words ^ (words >> np.uint32(13))
    words = words * np.uint32(MULTIPLIERS[1])
    return words ^ (words >> np.uint32(16))


def keys_of(previous: Words) -> Words:
    """What the colour of the next token is keyed by."""
    return mix(previous + np.uint32(GOLDEN))


def is_green(previous: Words, token_ids: Words, gamma: float) -> npt.NDArray[np.bool_]:
    """Whether each token is green behind its predecessor; both arrays ``[n]``."""
    green: npt.NDArray[np.bool_] = mix(token_ids ^ keys_of(previous)) < threshold_of(gamma)
    return green


def threshold_of(gamma: float) -> int:
    """Hashes below it are green: ``gamma * 2**32``, within 0 to ``2**32 - 1``."""
    return min(max(int(gamma * 2**32), 0), 2**32 - 1)


@dataclass(frozen=True, slots=True)
class Detection:
    """How green a text is."""

    num_scored: int  # distinct pairs of neighbours
    num_green: int
    gamma: float

    @property
    def green_fraction(self) -> float:
        """Of the scored tokens; 0 if there are none."""
        return self.num_green / self.num_scored if self.num_scored else 0.0

    @property
    def z(self) -> float:
        """Standard deviations above what chance gives (the paper's equation 3); 0 if nothing was scored."""
        if not self.num_scored:
            return 0.0
        deviation = math.sqrt(self.num_scored * self.gamma * (1 - self.gamma))
        return (self.num_green - self.gamma * self.num_scored) / deviation

    @property
    def p_value(self) -> float:
        """How likely text without a watermark is at least this green, by the normal approximation."""
        return 0.5 * math.erfc(self.z / math.sqrt(2))


def detect(token_ids: Sequence[int], gamma: float = 0.5) -> Detection:
    """Score ``token_ids``; the first has no predecessor and is not scored.

    Each pair of neighbours counts once, as the paper advises: what repeats itself proves nothing by it. Raises ValueError
    unless ``0 < gamma < 1``.
    """
    if not 0 < gamma < 1:
        raise ValueError(f"gamma is {gamma}; it must lie between 0 and 1")
    tokens = np.asarray(token_ids, dtype=np.uint32)
    pairs = np.unique(np.stack((tokens[:-1], tokens[1:])), axis=1)
    green = is_green(pairs[0], pairs[1], gamma)
    return Detection(num_scored=len(green), num_green=int(green.sum()), gamma=gamma)
