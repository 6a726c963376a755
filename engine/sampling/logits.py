"""Applies the rules for the next tokens to logits: bias, allowed and forbidden tokens, guides' masks.

The leader has computed the rules (:mod:`kvrelay.engine.step.rules`). Only rows with rules are touched. A forbidden token gets the
logit -inf. Only an operator's processor could raise that again, so it is forbidden once more afterwards. A guide's mask comes
first, on logits of any type: a row with nothing else needs no fp32 copy. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvrelay.engine.sampling.bitmask import MaskTokens, Upload
from kvrelay.engine.step.plan import Rules


class _Placed(NamedTuple):
    """The rules' arrays on the device."""

    bias_rows: torch.Tensor  # [num_biases] int64, like the others
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor  # fp32
    restricted_rows: torch.Tensor  # [num_restricted] rows with allowed tokens
    allowed_rows: torch.Tensor  # [num_allowed]
    allowed_tokens: torch.Tensor
    forbidden_rows: torch.Tensor  # [num_forbidden]
    forbidden_tokens: torch.Tensor
    contested_rows: torch.Tensor  # [num_contested] rows with both a guide and forbidden tokens


class LogitRules:
    """A step's rules, ready to apply to its logits."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    @property
    def sets_any(self) -> bool:
        """Whether there are rules beside masks."""
        rules = self._rules
        return bool(rules.bias_rows or rules.allowed_rows or rules.forbidden_rows)

    def mask(self, logits: torch.Tensor, mask_tokens: MaskTokens) -> None:
        """Forbid the tokens that guides do not allow, in ``logits`` ``[num_rows, vocab]`` of any floating type, in place."""
        rules = self._rules
        if rules.guided_rows:
            bitmask = np.frombuffer(rules.bitmask, dtype=np.int32).reshape(len(rules.guided_rows), -1)
            mask_tokens(logits, rules.guided_rows, bitmask)

    def apply(self, logits: torch.Tensor, upload: Upload) -> None:
        """Apply bias, allowed and forbidden tokens to masked ``logits`` ``[num_rows, vocab]`` fp32, in place."""
        placed = self._place(upload)
        if self._rules.bias_rows:
            logits.index_put_((placed.bias_rows, placed.bias_tokens), placed.bias_values, accumulate=True)
        self._forbid(logits, placed)

    def forbid_again(self, logits: torch.Tensor, upload: Upload, mask_tokens: MaskTokens) -> None:
        """Forbid everything again in ``logits`` ``[num_rows, vocab]`` fp32, in place: a processor may have raised logits."""
        self.mask(logits, mask_tokens)
        self._forbid(logits, self._place(upload))

    def _place(self, upload: Upload) -> _Placed:
        others = {*self._rules.allowed_rows, *self._rules.forbidden_rows}
        ints = (
            list(dict.fromkeys(self._rules.allowed_rows)),
            self._rules.allowed_rows,
            self._rules.allowed_tokens,
            self._rules.forbidden_rows,
            self._rules.forbidden_tokens,
            [row for row in self._rules.guided_rows if row in others],
        )
        bias_rows, bias_tokens, *indices = (
            np.array(numbers, dtype=np.int64) for numbers in (self._rules.bias_rows, self._rules.bias_tokens, *ints)
        )
        bias_values = np.array(self._rules.bias_values, dtype=np.float32)
        return _Placed(*upload((bias_rows, bias_tokens, bias_values, *indices)))

    def _forbid(self, logits: torch.Tensor, placed: _Placed) -> None:
        # A guide may allow only tokens that other rules forbid, as at the end of its grammar before ``min_tokens``. Then
        # only the guide counts: a
        # token outside of a grammar cannot be taken back.
        contested = placed.contested_rows
        guided = logits[contested] if len(contested) else None
        if self._rules.allowed_rows:
            index = (placed.allowed_rows, placed.allowed_tokens)
            values = logits[index]
            logits.index_fill_(0, placed.restricted_rows, -torch.inf)
            logits.index_put_(index, values)
        if self._rules.forbidden_rows:
            nothing = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
            logits.index_put_((placed.forbidden_rows, placed.forbidden_tokens), nothing)
        if guided is not None:
            left = logits[contested]
            is_empty = left.isneginf().all(dim=-1, keepdim=True)
            logits.index_put_((contested,), torch.where(is_empty, guided, left))
