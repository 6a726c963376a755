"""The interface of what guesses from a model's hidden states: an EAGLE-3 head, or a checkpoint's own layer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch


class Guesser(Protocol):
    """The forward pass of what guesses. It has no state but its weights; its K/V are in a pool of their own."""

    @property
    def taps(self) -> frozenset[int]:
        """The model's layers whose input it reads; the number of layers stands for the last layer's output."""

    @property
    def vocab_size(self) -> int:
        """Of the model."""

    @property
    def width(self) -> int:
        """Elements of a fused hidden state."""

    @property
    def token_ids(self) -> torch.Tensor | None:
        """``[draft_vocab]`` int64: ids of what it guesses in the model's vocabulary; None: it guesses all of that."""

    @property
    def has_collectives(self) -> bool:
        """Whether several ranks compute it together."""

    def fuse(self, taps: Seq[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """What it reads of the model at each place, ``[num_tokens, width]``.

        ``taps``: the inputs of the layers :attr:`taps`, in order. ``hidden``: the model's output behind its last norm. Both
        ``[num_tokens, hidden]``.
        """

    def write(self, fused: torch.Tensor, token_ids: torch.Tensor, step: Any) -> None:
        """Write the places' K/V into the pool. Arguments: see ``forward``."""

    def forward(
        self, fused: torch.Tensor, token_ids: torch.Tensor, step: Any, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``fused`` ``[num_tokens, width]``, and the ``token_ids`` ``[num_tokens]`` that follow the same places.

        Returns, for the places ``last`` only, what stands for the next place's ``fused``, and logits ``[.., draft_vocab]``. Side
        effect: writes the K/V of all places into the pool.
        """
