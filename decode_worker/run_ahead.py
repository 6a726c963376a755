"""Which step may be launched while the one before it still runs, and nobody knows its tokens yet. A pure policy.

On a GPU the host would otherwise stand between two steps: wait for the tokens, send them, schedule, build the batch, launch. It
does all of that while the next step runs. That step takes its input tokens on the device, from the step before it. What the host
must know to launch it is only that each sequence goes on, and by how many tokens.

It cannot know that a token under way is a stop token, or a guide's last: such a sequence computes one token too many, which does
not count. Where a row can only be sampled once the host knows the token in front (``Sequence.needs_host_to_sample``: guides,
watermarks, bad words of several tokens, processors), the step is launched all the same, and the engine defers its
sampling (:class:`kvrelay.engine.step.interface.LaunchedStep`): the forward pass needs only the token, which is on the device.

What waits for the tokens in front: a beam search, whose next sequences, and the blocks that they share, follow from them; and
prompts, whether they join or have more to compute. What they get of a step, and who is preempted for their blocks, is settled
between steps.

Who waits for room that is not there holds nobody up: it could not join the next step anyway, as long as nobody leaves. Where
somebody does leave with the step under way and a prompt waits for blocks, the next step waits to see if there are enough now. A
stop token is seen when the next step is launched already; then the one behind that waits. So a sequence joins one step later than
if no step ran ahead, and so does one that waits for a place in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence


def sequences_that_go_on(
    flying: Seq[StepRow],
    running: Seq[Sequence],
    joining: Iterable[Sequence],
    max_model_len: int,
    *,
    awaits_room: bool = False,
) -> list[Sequence] | None:
    """Those of ``running`` that need a row behind the step ``flying``; None if the step must wait for tokens under way.

    ``joining``: who would be admitted to that step. ``awaits_room``: somebody else would, if there were more room. A token under
    way that is the last one by its number is not followed by a row.
    """
    decoding = {row.sequence for row in flying if row.num_tokens == 1 and row.samples}
    if any(not sequence.block_table or sequence.sampling.beam_search is not None for sequence in joining):
        return None
    if any(one not in decoding or one.sampling.beam_search is not None for one in running):
        return None
    going_on = [
        one
        for one in running
        if one.num_output_tokens + 1 < one.sampling.max_tokens and one.num_tokens + 1 < max_model_len
    ]
    # Whoever ended is still in the step under way; its blocks come back with it.
    return None if awaits_room and len(going_on) < len(flying) else going_on
