"""What a sequence's parameters set or forbid: bias, allowed tokens, bad words, stop tokens before their time, the guide.

Only rows that ask are touched. What is forbidden has a logit of -inf, which no later step can raise but an operator's processor,
and after those it is forbidden once more. A guide's mask comes first, on logits of whatever type: a row that has nothing else needs
no copy in fp32. Nothing here waits for the device.

A bad word is a sequence of tokens that is never completed: one of a single token never comes, of a longer one the last token
does not come where the others stand at the end of the tokens so far, prompt included. Text that the tokenizer splits otherwise
is another sequence; it is for the gateway to name all it knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.sampling.bitmask import Upload, apply_bitmask, num_words
from kvrelay.engine.step.sequence import Sequence


def has_rules(sequence: Sequence, num_ahead: int = 0) -> bool:
    """Whether anything is set or forbidden for the sequence's next token by other than its guide.

    ``num_ahead``: how many tokens come before that one and are under way.
    """
    params = sequence.sampling
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words) or _is_early(sequence, num_ahead)


class _Placed(NamedTuple):
    """The rules' numbers on the device."""

    bias_rows: torch.Tensor  # [num_biases] int64, as the rest
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor  # fp32
    restricted_rows: torch.Tensor  # [num_restricted] those that have allowed tokens
    allowed_rows: torch.Tensor  # [num_allowed]
    allowed_tokens: torch.Tensor
    forbidden_rows: torch.Tensor  # [num_forbidden]
    forbidden_tokens: torch.Tensor
    contested_rows: torch.Tensor  # [num_contested] those that have both a guide and something forbidden


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What a batch's sequences set and forbid for their next tokens; sparse entries, and bit masks of guided rows."""

    bias_rows: list[int]
    bias_tokens: list[int]
    bias_values: list[float]
    allowed_rows: list[int]  # where there is an entry of a row, none but such tokens may come
    allowed_tokens: list[int]
    forbidden_rows: list[int]
    forbidden_tokens: list[int]
    guided_rows: list[int]
    bitmask: npt.NDArray[np.int32]  # [len(guided_rows), ceil(vocab / 32)]

    @classmethod
    def of(cls, sequences: Seq[Sequence], vocab_size: int, num_ahead: Seq[int] | None = None) -> LogitRules:
        """From the sequences' parameters, tokens and guides.

        ``num_ahead``: how many tokens of each are under way, None: none. Of such a sequence bad words must be single tokens.
        """
        guided_rows = [row for row, sequence in enumerate(sequences) if sequence.guide is not None]
        bitmask = np.zeros((len(guided_rows), num_words(vocab_size)), dtype=np.int32)
        for words, row in zip(bitmask, guided_rows, strict=True):
            guide = sequences[row].guide
            assert guide is not None, f"row {row} lost its guide"
            guide.fill(words)
        rules = cls([], [], [], [], [], [], [], guided_rows, bitmask)
        for row, (sequence, ahead) in enumerate(zip(sequences, num_ahead or [0] * len(sequences), strict=True)):
            if has_rules(sequence, ahead):
                rules._add(row, sequence, ahead, vocab_size)
        return rules

    def _add(self, row: int, sequence: Sequence, num_ahead: int, vocab_size: int) -> None:
        params = sequence.sampling
        for token_id, value in params.logit_bias:
            self.bias_rows.append(row)
            self.bias_tokens.append(token_id)
            self.bias_values.append(value)
        self.allowed_rows.extend([row] * len(params.allowed_token_ids))
        self.allowed_tokens.extend(params.allowed_token_ids)
        assert not num_ahead or all(len(word) == 1 for word in params.bad_words), (
            f"{sequence.key}: {params.bad_words} behind {num_ahead} tokens that nobody knows"
        )
        forbidden = [word[-1] for word in params.bad_words if _would_complete(word, sequence.token_ids)]
        if _is_early(sequence, num_ahead):
            # A model's list of them may name tokens that it has no logits for.
            forbidden += [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]
        self.forbidden_rows.extend([row] * len(forbidden))
        self.forbidden_tokens.extend(forbidden)

    def mask(self, logits: torch.Tensor, upload: Upload) -> None:
        """Forbid what the guides do not allow, in ``logits`` ``[num_rows, vocab]`` of any floating type, in place."""
        if self.guided_rows:
            apply_bitmask(logits, self.guided_rows, self.bitmask, upload)

    def apply(self, logits: torch.Tensor, upload: Upload) -> None:
        """Set, and forbid the rest, in ``logits`` ``[num_rows, vocab]`` fp32 that are masked, in place."""
        placed = self._place(upload)
        if self.bias_rows:
            logits.index_put_((placed.bias_rows, placed.bias_tokens), placed.bias_values, accumulate=True)
        self._forbid(logits, placed)

    def forbid_again(self, logits: torch.Tensor, upload: Upload) -> None:
        """Forbid all of it in ``logits`` ``[num_rows, vocab]`` fp32, in place: somebody may have raised them."""
        self.mask(logits, upload)
        self._forbid(logits, self._place(upload))

    def _place(self, upload: Upload) -> _Placed:
        others = {*self.allowed_rows, *self.forbidden_rows}
        ints = (
            list(dict.fromkeys(self.allowed_rows)),
            self.allowed_rows,
            self.allowed_tokens,
            self.forbidden_rows,
            self.forbidden_tokens,
            [row for row in self.guided_rows if row in others],
        )
        bias_rows, bias_tokens, *indices = (
            np.array(numbers, dtype=np.int64) for numbers in (self.bias_rows, self.bias_tokens, *ints)
        )
        bias_values = np.array(self.bias_values, dtype=np.float32)
        return _Placed(*upload((bias_rows, bias_tokens, bias_values, *indices)))

    def _forbid(self, logits: torch.Tensor, placed: _Placed) -> None:
        # A guide may leave just tokens that the rest forbids, as at the end of its grammar before ``min_tokens``. Then it alone
        # counts: a token outside of a grammar cannot be taken back, and nobody could read what follows.
        contested = placed.contested_rows
        guided = logits[contested] if len(contested) else None
        if self.allowed_rows:
            index = (placed.allowed_rows, placed.allowed_tokens)
            values = logits[index]
            logits.index_fill_(0, placed.restricted_rows, -torch.inf)
            logits.index_put_(index, values)
        if self.forbidden_rows:
            nothing = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
            logits.index_put_((placed.forbidden_rows, placed.forbidden_tokens), nothing)
        if guided is not None:
            left = logits[contested]
            is_empty = left.isneginf().all(dim=-1, keepdim=True)
            logits.index_put_((contested,), torch.where(is_empty, guided, left))


def _is_early(sequence: Sequence, num_ahead: int) -> bool:
    return sequence.num_output_tokens + num_ahead < sequence.sampling.min_tokens


def _would_complete(word: tuple[int, ...], token_ids: Seq[int]) -> bool:
    num_before = len(word) - 1
    if num_before == 0:
        return True
    return word[-2] == token_ids[-1] and list(word[:-1]) == token_ids[-num_before:]
