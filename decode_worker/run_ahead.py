"""Which step may be launched while the one before it still runs, and nobody knows its tokens yet. A pure policy.

On a GPU the host would otherwise stand between two steps: wait for the tokens, send them, schedule, build the batch, launch. It
does all of that while the next step runs. That step takes its input tokens on the device, from the step before it. What the host
must know to launch it is only that each sequence goes on, and by how many tokens.

It cannot know that a token under way is a stop token: such a sequence computes one token too many, which does not count. Penalties
count a token under way on the device; bias, allowed tokens and ``min_tokens`` depend on positions only. All else that depends on
tokens waits for them: guides, watermarks, bad words of several tokens, processors, beams, and prompts. So does what needs a look at
the logits on the host, typical sampling: the step would not be launched before the tokens in front of it are there.

Who waits for room that is not there holds nobody up: it could not join the next step anyway, as long as nobody leaves. Where
somebody does leave with the step under way and a prompt waits for blocks, the next step waits to see if there are enough now. A
stop token is seen when the next step is launched already; then the one behind that waits. So a sequence joins one step later than
if no step ran ahead, and so does one that waits for a place in the batch.
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
        or sampling.watermark is not None
        or sampling.beam_search is not None
        or sampling.processors
        or any(len(word) > 1 for word in sampling.bad_words)
        or (sampling.typical_p < 1 and sampling.temperature > 0)
    )


def sequences_that_go_on(
    flying: Seq[StepRow],
    running: Seq[Sequence],
    joining: Iterable[Sequence],
    max_model_len: int,
    *,
    awaits_room: bool = False,
) -> list[Sequence] | None:
    """Those of ``running`` that need a row behind the step ``flying``; None if that depends on tokens under way.

    ``joining``: who would be admitted to that step. ``awaits_room``: somebody else would, if there were more room. A token under
    way that is the last one by its number is not followed by a row.
    """
    decoding = {row.sequence for row in flying if row.num_tokens == 1 and row.samples}
    if any(not sequence.block_table or not samples_without_its_last_token(sequence) for sequence in joining):
        return None
    if any(one not in decoding or not samples_without_its_last_token(one) for one in running):
        return None
    going_on = [
        one
        for one in running
        if one.num_output_tokens + 1 < one.sampling.max_tokens and one.num_tokens + 1 < max_model_len
    ]
    # Whoever ended is still in the step under way; its blocks come back with it.
    return None if awaits_room and len(going_on) < len(flying) else going_on
