"""Whether the next step may be launched while the current one still runs, before its tokens are known. A pure policy.

Between two steps the host waits for tokens, sends them, schedules, builds the batch and launches. A GPU would be idle meanwhile. So
the host does this while the next step already runs. That step takes its input tokens on the device, from the step before it. To
launch it, the host must only know which sequences continue, and by how many tokens.

The host cannot know that a pending token is a stop token, or a guide's last. Such a sequence computes one token too many, which is
dropped. Some rows can be sampled only once the host knows the previous token (``Sequence.needs_host_to_sample``: guides,
watermarks, bad words of several tokens, processors). Their step is launched too, because the forward pass needs only the token on
the device. The engine defers its sampling (:class:`kvrelay.engine.step.interface.LaunchedStep`).

Chunks of prompts run ahead, too: their tokens are known. A prompt whose last chunk is running generates in the next step. These
wait for the tokens of the current step:

- a beam search, because its next sequences, and the blocks that they share, follow from the tokens;
- a prompt that begins, because preemptions are decided between steps;
- a prompt with an image that one step must compute whole, because no other prompt may take its room;
- log probabilities of a prompt, which count those known so far.

A sequence that waits for room delays no step: it cannot join until a sequence leaves. But if a sequence leaves with the running
step and a prompt waits for blocks, the next step waits to see whether there are enough. A stop token is seen only after the next
step was launched; then the step after that waits. So such a prompt joins one step later than without running ahead. The same holds
for a sequence that waits for a place in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class GoingOn:
    """The rows that continue after the running step."""

    generating: list[StepRow]
    prompts: list[StepRow]  # in the order of ``running``, with all that is left of each


def who_goes_on(
    flying: Seq[StepRow],
    running: Seq[Sequence],
    joining: Iterable[Sequence],
    max_model_len: int,
    *,
    awaits_room: bool = False,
) -> GoingOn | None:
    """The rows of ``running`` that continue after the step ``flying``; None if the next step must wait for its tokens.

    ``joining``: sequences with K/V that would join the next step. ``awaits_room``: whether a prompt would join if there were more
    room. A sequence that reaches its maximum length with the pending token gets no row.
    """
    under_way = {row.sequence: row.num_tokens for row in flying}
    if any(one.sampling.beam_search is not None for one in joining):
        return None
    generating: list[StepRow] = []
    prompts: list[StepRow] = []
    num_in_both = 0
    for one in running:
        num_ahead, num_uncomputed = under_way.get(one, 0), one.num_uncomputed_tokens
        asks_for_logprobs = one.sampling.num_prompt_logprobs is not None and num_uncomputed > 1
        if asks_for_logprobs or one.sampling.beam_search is not None or (num_ahead == 0 and num_uncomputed == 1):
            return None
        if any(span.stop > one.num_computed_tokens + num_ahead for span in one.whole_spans):
            return None
        if num_ahead < num_uncomputed:
            prompts.append(StepRow(one, num_uncomputed - num_ahead, num_ahead))
            num_in_both += num_ahead > 0
        elif one.num_output_tokens + 1 < one.sampling.max_tokens and one.num_tokens + 1 < max_model_len:
            generating.append(StepRow(one, 1, num_ahead))
            num_in_both += 1
    # A sequence that has ended is still in the running step, and its blocks are released after it.
    return None if awaits_room and num_in_both < len(flying) else GoingOn(generating, prompts)
