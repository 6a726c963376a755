"""What is checked before it is timed."""

from __future__ import annotations

import enum


class Kernel(enum.StrEnum):
    """A kernel, or all of them together in a model: norms, rotary embeddings and activations are checked there only."""

    DECODE = "decode attention"
    PREFILL = "prefill attention"
    BOXES = "prefill attention by TMA"
    FP8 = "attention over fp8 KV"
    LINEAR = "linears with 8-bit weights"
    SAMPLING = "sampling"
    MODEL = "whole model"
