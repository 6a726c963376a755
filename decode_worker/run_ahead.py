"""Which step may be launched while the one before it still runs, and nobody knows its tokens yet. A pure policy.

On a GPU the host would otherwise stand between two steps: wait for the tokens, send them, schedule, build the batch, launch. It
does all of that while the next step runs. That step takes its input tokens on the device, from the step before it. What the host
must know to launch it is only that each sequence goes on, and by how many tokens.

It cannot know that a token under way is a stop token: such a sequence computes one token too many, which does not count. All else
that depends on tokens waits for them: guides, penalties, watermarks, bad words, beams, whatever needs room that is not there, and
prompts. So does what the host must set in the logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from kvrelay.engine.interface import StepRow
from kvrelay.engine.sequence import Sequence


def samples_without_its_last_token(sequence: Sequence) -> bool:
    """Whether a token of the sequence can be sampled before the host knows the one in front of it."""
    sampling = sequence.sampling
    return not (
        sequence.guide is not None
        or sampling.needs_penalties
        or sampling.watermark is not None
        or sampling.beam_search is not None
        or sampling.processors
        or sampling.bad_words
        or sampling.logit_bias  # as those above it is set by the host, which would wait for the device to do so
        or sampling.allowed_token_ids
        or sampling.min_tokens > sequence.num_output_tokens
    )


def sequences_that_go_on(
    flying: Seq[StepRow], running: Seq[Sequence], joining: Iterable[Sequence], max_model_len: int
) -> list[Sequence] | None:
    """Those of ``running`` that need a row behind the step ``flying``; None if that depends on tokens under way.

    ``joining``: who would be admitted to that step. A token under way that is the last one by its number is not followed by a row.
    """
    decoding = {row.sequence for row in flying if row.num_tokens == 1 and row.samples}
    if any(not sequence.block_table or not samples_without_its_last_token(sequence) for sequence in joining):
        return None
    if any(one not in decoding or not samples_without_its_last_token(one) for one in running):
        return None
    return [
        one
        for one in running
        if one.num_output_tokens + 1 < one.sampling.max_tokens and one.num_tokens + 1 < max_model_len
    ]
