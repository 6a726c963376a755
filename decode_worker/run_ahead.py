"""Whether the next step may be launched while the current one still runs, before its tokens are known. A pure policy.

Between two steps the host waits for tokens, sends them, schedules, builds the batch and launches. A GPU would be idle
meanwhile. So the host does this while the next step already runs. That step takes its input tokens on the device, from the step
before it. To launch it, the host must only know which sequences go on, and by how many tokens.

The host cannot know that a token under way is a stop token, or a guide's last. Such a sequence computes one token too many,
which is dropped. If a row can only be sampled once the host knows the previous token (``Sequence.needs_host_to_sample``:
guides, watermarks, bad words of several tokens, processors), the step is launched all the same, and the engine defers its
sampling (:class:`kvrelay.engine.step.interface.LaunchedStep`): the forward pass needs only the token, which is on the device.

Chunks of prompts run ahead, too: their tokens are known. A prompt whose last chunk is under way generates in the next step.
These wait for the tokens of the current step:

- a beam search, because its next sequences, and the blocks that they share, follow from the tokens;
- a prompt that begins, because preemptions are decided between steps;
- log probabilities of a prompt, which count what is there already.

A sequence that waits for room delays no step: it could not join the next one anyway, as long as no sequence leaves. But if a
sequence leaves with the step under way, and a prompt waits for blocks, the next step waits to see whether there are enough now.
A stop token is seen after the next step was launched; then the step after that waits. So a sequence joins one step later than
without running ahead, and so does one that waits for a place in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class GoingOn:
    """Who has something to compute behind the step under way."""

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
    """Those of ``running`` that go on behind the step ``flying``; None if the next step must wait for tokens under way.

    ``joining``: who would be admitted to that step with its K/V in place. ``awaits_room``: a prompt would, if there were more room.
    A token under way that is the last one by its number is not followed by a row.
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
        if num_ahead < num_uncomputed:
            prompts.append(StepRow(one, num_uncomputed - num_ahead, num_ahead))
            num_in_both += num_ahead > 0
        elif one.num_output_tokens + 1 < one.sampling.max_tokens and one.num_tokens + 1 < max_model_len:
            generating.append(StepRow(one, 1, num_ahead))
            num_in_both += 1
    # Whoever ended is still in the step under way; its blocks come back with it.
    return None if awaits_room and num_in_both < len(flying) else GoingOn(generating, prompts)
