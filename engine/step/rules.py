"""Computes the leader's rules for sampling: bias, allowed tokens, bad words, early stop tokens, guides' masks.

Bad words and early stop tokens follow from a sequence's tokens, and masks from its guide; the engine knows neither. A bad word is a
sequence of tokens that must not be completed. One of a single token never comes. The last token of a longer one may not come after
the others, which may be in the prompt. Another tokenization of the same text is another sequence; the gateway must list all it
knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.step.plan import Rules
from kvrelay.engine.step.sequence import GuideState, Sequence


class Asked(NamedTuple):
    """What a step samples of one sequence: its next token, and one after each token of a draft."""

    sequence: Sequence | None  # None: it has ended
    num_ahead: int = 0  # its tokens under way
    draft: tuple[int, ...] = ()


def may_have_rules(params: SamplingParams) -> bool:
    """Whether the parameters may ever set or forbid a token."""
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_tokens)


def has_rules(sequence: Sequence, num_ahead: int = 0) -> bool:
    """Whether anything other than its guide sets or forbids tokens for the sequence's next one.

    ``num_ahead``: tokens before that one that are under way.
    """
    params = sequence.sampling
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words) or _is_early(sequence, num_ahead)


def make_rules(asking: Seq[Asked], vocab_size: int) -> Rules | None:
    """The rules of a step; None if there are none. ``asking``: in the order of the rows that sample.

    A sequence with tokens under way may only have bad words of a single token. A guide must allow the draft.
    """
    guided: list[tuple[GuideState, tuple[int, ...]]] = []
    rules = Rules([], [], [], [], [], [], [], [], b"")
    is_ruled, num_rows = False, 0
    for sequence, num_ahead, draft in asking:
        first, num_rows = num_rows, num_rows + 1 + len(draft)
        if sequence is None:
            continue
        if sequence.guide is not None:
            guided.append((sequence.guide, draft))
            rules.guided_rows.extend(range(first, num_rows))
        if has_rules(sequence, num_ahead):
            is_ruled = True
            for end in range(len(draft) + 1):
                _add(rules, first + end, sequence, num_ahead, draft[:end], vocab_size)
    if guided:
        return msgspec.structs.replace(rules, bitmask=_masks(guided, len(rules.guided_rows), vocab_size))
    return rules if is_ruled else None


def num_words(vocab_size: int) -> int:
    """32-bit words that have a bit for each token."""
    return -(-vocab_size // 32)


def _masks(guided: Seq[tuple[GuideState, tuple[int, ...]]], num_rows: int, vocab_size: int) -> bytes:
    import numpy as np  # noqa: PLC0415 - guides need it, and nothing else here: who has a fake engine may lack it

    bitmask, row = np.zeros((num_rows, num_words(vocab_size)), dtype=np.int32), 0
    for guide, draft in guided:
        guide.fill(bitmask[row])
        if draft:
            guide.fill_along(bitmask[row + 1 : row + 1 + len(draft)], draft)
        row += 1 + len(draft)
    return bitmask.tobytes()


def _add(rules: Rules, row: int, sequence: Sequence, num_ahead: int, draft: tuple[int, ...], vocab_size: int) -> None:
    """Add the rules for the token after the sequence's tokens, ``num_ahead`` unknown ones, and ``draft``."""
    params = sequence.sampling
    for token_id, value in params.logit_bias:
        rules.bias_rows.append(row)
        rules.bias_tokens.append(token_id)
        rules.bias_values.append(value)
    rules.allowed_rows.extend([row] * len(params.allowed_token_ids))
    rules.allowed_tokens.extend(params.allowed_token_ids)
    assert not num_ahead or all(len(word) == 1 for word in params.bad_words), (
        f"{sequence.key}: {params.bad_words} behind {num_ahead} tokens that nobody knows"
    )
    longest = max(map(len, params.bad_words), default=0)
    token_ids = [*sequence.token_ids[-longest:], *draft] if draft else sequence.token_ids
    forbidden = [word[-1] for word in params.bad_words if _would_complete(word, token_ids)]
    if _is_early(sequence, num_ahead + len(draft)):
        # A model's list of stop tokens may have ids without logits.
        forbidden += [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]
    rules.forbidden_rows.extend([row] * len(forbidden))
    rules.forbidden_tokens.extend(forbidden)


def _is_early(sequence: Sequence, num_ahead: int) -> bool:
    return sequence.num_output_tokens + num_ahead < sequence.sampling.min_tokens


def _would_complete(word: tuple[int, ...], token_ids: Seq[int]) -> bool:
    num_before = len(word) - 1
    if num_before == 0:
        return True
    return word[-2] == token_ids[-1] and list(word[:-1]) == token_ids[-num_before:]
