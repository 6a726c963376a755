"""What the leader computes for sampling: bias, allowed tokens, bad words, stop tokens before their time, guides' masks.

Bad words and early stop tokens follow from a sequence's tokens, masks from its guide, and neither is the engine's to know.

A bad word is a sequence of tokens that is never completed: one of a single token never comes, of a longer one the last token
does not come where the others stand at the end of the tokens so far, prompt included. Text that the tokenizer splits otherwise
is another sequence; it is for the gateway to name all it knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.step.plan import Rules
from kvrelay.engine.step.sequence import GuideState, Sequence


def may_have_rules(params: SamplingParams) -> bool:
    """Whether anything is ever set or forbidden by the parameters."""
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_tokens)


def has_rules(sequence: Sequence, num_ahead: int = 0) -> bool:
    """Whether anything is set or forbidden for the sequence's next token by other than its guide.

    ``num_ahead``: how many tokens come before that one and are under way.
    """
    params = sequence.sampling
    return bool(params.logit_bias or params.allowed_token_ids or params.bad_words) or _is_early(sequence, num_ahead)


def make_rules(asking: Seq[tuple[Sequence | None, int]], vocab_size: int) -> Rules | None:
    """The rules of a step, or None if there are none. ``asking``: of each row that samples, whose it is (None: a sequence that has
    ended), and how many tokens that has under way.

    Of a sequence with tokens under way bad words must be single tokens.
    """
    guides: list[GuideState] = []
    rules = Rules([], [], [], [], [], [], [], [], b"")
    is_ruled = False
    for row, (sequence, num_ahead) in enumerate(asking):
        if sequence is None:
            continue
        if sequence.guide is not None:
            guides.append(sequence.guide)
            rules.guided_rows.append(row)
        if has_rules(sequence, num_ahead):
            is_ruled = True
            _add(rules, row, sequence, num_ahead, vocab_size)
    if guides:
        return msgspec.structs.replace(rules, bitmask=_masks(guides, vocab_size))
    return rules if is_ruled else None


def num_words(vocab_size: int) -> int:
    """32-bit words that hold a bit for each token."""
    return -(-vocab_size // 32)


def _masks(guides: Seq[GuideState], vocab_size: int) -> bytes:
    import numpy as np  # noqa: PLC0415 - guides need it, and nothing else here: who has a fake engine may lack it

    bitmask = np.zeros((len(guides), num_words(vocab_size)), dtype=np.int32)
    for words, guide in zip(bitmask, guides, strict=True):
        guide.fill(words)
    return bitmask.tobytes()


def _add(rules: Rules, row: int, sequence: Sequence, num_ahead: int, vocab_size: int) -> None:
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
    forbidden = [word[-1] for word in params.bad_words if _would_complete(word, sequence.token_ids)]
    if _is_early(sequence, num_ahead):
        # A model's list of them may name tokens that it has no logits for.
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
