"""What a sequence's parameters set or forbid: bias, allowed tokens, bad words, stop tokens before their time, the guide.

Only rows that ask are touched. What is forbidden has a logit of -inf, which no later step can raise but an operator's processor,
and after those it is forbidden once more. A guide's mask comes first, on logits of whatever type: a row that has nothing else needs
no copy in fp32.

A bad word is a sequence of tokens that is never completed: one of a single token never comes, of a longer one the last token
does not come where the others stand at the end of the tokens so far, prompt included. Text that the tokenizer splits otherwise
is another sequence; it is for the gateway to name all it knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.bitmask import apply_bitmask, num_words
from kvrelay.engine.sequence import Sequence


def has_rules(sequence: Sequence) -> bool:
    """Whether anything is set or forbidden for the sequence's next token by other than its guide."""
    params = sequence.sampling
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words) or (
        params.min_tokens > 0 and sequence.num_output_tokens < params.min_tokens
    )


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What a batch's sequences set and forbid for their next tokens; sparse entries, and bit masks of guided rows."""

    bias_rows: list[int]
    bias_tokens: list[int]
    bias_values: list[float]
    allowed: list[tuple[int, tuple[int, ...]]]  # (row, the tokens that may come)
    forbidden_rows: list[int]
    forbidden_tokens: list[int]
    guided_rows: list[int]
    bitmask: npt.NDArray[np.int32]  # [len(guided_rows), ceil(vocab / 32)]

    @classmethod
    def of(cls, sequences: Seq[Sequence], vocab_size: int) -> LogitRules:
        """From the sequences' parameters, tokens and guides."""
        guided_rows = [row for row, sequence in enumerate(sequences) if sequence.guide is not None]
        bitmask = np.zeros((len(guided_rows), num_words(vocab_size)), dtype=np.int32)
        for words, row in zip(bitmask, guided_rows, strict=True):
            guide = sequences[row].guide
            assert guide is not None, f"row {row} lost its guide"
            guide.fill(words)
        rules = cls([], [], [], [], [], [], guided_rows, bitmask)
        for row, sequence in enumerate(sequences):
            if has_rules(sequence):
                rules._add(row, sequence, vocab_size)
        return rules

    def _add(self, row: int, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.sampling
        for token_id, value in params.logit_bias:
            self.bias_rows.append(row)
            self.bias_tokens.append(token_id)
            self.bias_values.append(value)
        if params.allowed_token_ids:
            self.allowed.append((row, params.allowed_token_ids))
        forbidden = [word[-1] for word in params.bad_words if _would_complete(word, sequence.token_ids)]
        if sequence.num_output_tokens < params.min_tokens:
            # A model's list of them may name tokens that it has no logits for.
            forbidden += [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]
        self.forbidden_rows.extend([row] * len(forbidden))
        self.forbidden_tokens.extend(forbidden)

    def mask(self, logits: torch.Tensor) -> None:
        """Forbid what the guides do not allow, in ``logits`` ``[num_rows, vocab]`` of any floating type, in place."""
        if self.guided_rows:
            apply_bitmask(logits, self.guided_rows, self.bitmask)

    def apply(self, logits: torch.Tensor) -> None:
        """Set, and forbid the rest, in ``logits`` ``[num_rows, vocab]`` fp32 that are masked, in place."""
        if self.bias_rows:
            values = torch.tensor(self.bias_values, dtype=logits.dtype, device=logits.device)
            logits.index_put_(_entries(logits, self.bias_rows, self.bias_tokens), values, accumulate=True)
        self._forbid(logits)

    def forbid_again(self, logits: torch.Tensor) -> None:
        """Forbid all of it in ``logits`` ``[num_rows, vocab]`` fp32, in place: somebody may have raised them."""
        self.mask(logits)
        self._forbid(logits)

    def _forbid(self, logits: torch.Tensor) -> None:
        # A guide may leave just tokens that the rest forbids, as at the end of its grammar before ``min_tokens``. Then it alone
        # counts: a token outside of a grammar cannot be taken back, and nobody could read what follows.
        others = {row for row, _ in self.allowed}.union(self.forbidden_rows)
        contested = [row for row in self.guided_rows if row in others]
        guided = logits[contested] if contested else None
        for row, token_ids in self.allowed:
            index = torch.tensor(token_ids, device=logits.device)
            values = logits[row, index]
            logits[row] = -torch.inf
            logits[row, index] = values
        if self.forbidden_rows:
            logits[_entries(logits, self.forbidden_rows, self.forbidden_tokens)] = -torch.inf
        if guided is not None:
            left = logits[contested]
            is_empty = left.isneginf().all(dim=-1, keepdim=True)
            logits[contested] = torch.where(is_empty, guided, left)


def _would_complete(word: tuple[int, ...], token_ids: Seq[int]) -> bool:
    num_before = len(word) - 1
    if num_before == 0:
        return True
    return word[-2] == token_ids[-1] and list(word[:-1]) == token_ids[-num_before:]


def _entries(logits: torch.Tensor, rows: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
