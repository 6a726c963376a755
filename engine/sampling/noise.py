"""Counter-based sampling noise: one uniform number per sampled token, a pure function of (seed, choice, position).

Any worker can continue any sequence, alone or in any batch, because the noise does not depend on earlier draws. The generator is
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None]
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Ten rounds. ``counter`` is ``[4, n]``, ``key`` ``[2, n]``, the result ``[4, n]``; all hold 32-bit words."""
    c0, c1, c2, c3 = counter
    # The keys of all rounds are computed at once: with few rows, the number of calls counts.
    for k0, k1 in zip(*((word + _ROUNDS * weyl) & _LOW32 for word, weyl in zip(key, _WEYL, strict=True)), strict=True):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT32) ^ c1 ^ k0,
            product1 & _LOW32,
            (product0 >> _SHIFT32) ^ c3 ^ k1,
            product0 & _LOW32,
        )
    return np.stack((c0, c1, c2, c3))


def uniforms(
    seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, ``[n]``: one per (64-bit seed, 32-bit choice, position)."""
    counter = np.stack((positions & _LOW32, positions >> _SHIFT32, choices & _LOW32, np.zeros_like(positions)))
    words = philox4x32(counter, np.stack((seeds & _LOW32, seeds >> _SHIFT32)))
    bits = (words[0] << _SHIFT32 | words[1]) >> np.uint64(11)
    draws: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return draws
