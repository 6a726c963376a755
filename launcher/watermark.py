"""``kvrelay watermark``: tests whether a text carries the watermark that requests can ask for.

:mod:`kvrelay.engine.sampling.watermark` describes the watermark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.engine.sampling.watermark import is_green
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.launcher.models import resolve_model


@dataclass(frozen=True, slots=True)
class Detection:
    """The counts of a watermark test."""

    num_scored: int  # distinct pairs of neighbours
    num_green: int
    gamma: float

    @property
    def green_fraction(self) -> float:
        """The green part of the scored tokens; 0 if none were scored."""
        return self.num_green / self.num_scored if self.num_scored else 0.0

    @property
    def z(self) -> float:
        """Standard deviations above chance (the paper's equation 3); 0 if none were scored."""
        if not self.num_scored:
            return 0.0
        deviation = math.sqrt(self.num_scored * self.gamma * (1 - self.gamma))
        return (self.num_green - self.gamma * self.num_scored) / deviation

    @property
    def p_value(self) -> float:
        """The probability that text without a watermark is at least this green, by the normal approximation."""
        return 0.5 * math.erfc(self.z / math.sqrt(2))


def detect(token_ids: Sequence[int], gamma: float = 0.5) -> Detection:
    """Score ``token_ids``. The first token has no predecessor and is not scored.

    Each distinct pair of neighbours counts once, as the paper advises, because repetition is no evidence. Raises ValueError unless
    ``0 < gamma < 1``.
    """
    if not 0 < gamma < 1:
        raise ValueError(f"gamma is {gamma}; it must lie between 0 and 1")
    tokens = np.asarray(token_ids, dtype=np.uint32)
    pairs = np.unique(np.stack((tokens[:-1], tokens[1:])), axis=1)
    green = is_green(pairs[0], pairs[1], gamma)
    return Detection(num_scored=len(green), num_green=int(green.sum()), gamma=gamma)


def report(text: str, model: str, gamma: float) -> list[str]:
    """The lines to print about ``text``, split by ``model``'s tokenizer. Raises KvrelayError if there is no such model.

    The tokenizer may split the text differently than it was generated, above all at its ends. That loses a few green tokens.
    """
    tokenizer = Tokenizer.load(resolve_model(model, needs_weights=False))
    found = detect(tokenizer.encode(text, add_special_tokens=False), gamma)
    return [
        f"scored tokens   {found.num_scored}",
        f"green fraction  {found.green_fraction:.3f} (by chance {gamma:g})",
        f"z               {found.z:.2f}",
        f"p-value         {found.p_value:.3g}",
    ]
