"""From logits to tokens, step by step; each step is a module of its own.

    masks of guides, set and forbid (logits) → penalties → watermark → processors → temperature, filters → draw

Rows pay for what they ask for: a batch of plain greedy rows is one argmax, and all else touches only the rows that ask for it.
A random row draws one uniform number (:mod:`kvrelay.engine.sampling.noise`) and takes the token where the cumulative probability
of what the filters left, in vocabulary order, passes it. So a token depends on logits, parameters, tokens so far, seed and
choice, never on the batch. Log probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.sampling.logits import LogitRules, has_rules
from kvrelay.engine.sampling.penalties import Penalties
from kvrelay.engine.sampling.processors import LogitsProcessor, run_processors
from kvrelay.engine.sampling.rows import SamplingRows
from kvrelay.engine.sampling.sampled import Logprobs, Sampled, UnderWay
from kvrelay.engine.sampling.watermark import add_watermark
from kvrelay.engine.step.sequence import Sequence


class SamplerOps(Protocol):
    """What the sampler needs of a device."""

    def upload(self, arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays on the device, in one go and without waiting for it. The host's memory may change afterwards, or be shared.

        Some may be empty.
        """

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens ``[n]`` int64 of ``logits`` ``[n, vocab]`` in the model's dtype or fp32."""

    def penalize(self, logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None) -> None:
        """Apply penalties to ``logits`` ``[n, vocab]`` fp32 in place, without waiting for the device.

        ``last_tokens``: ``[n]`` int64 on the device, the tokens under way of rows that have one; None if none has. Only called if
        the penalties change anything.
        """

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Token ids ``[n]`` int64 drawn from ``logits`` ``[n, vocab]`` fp32, which may be changed; greedy at temperature 0."""


def sample(
    logits: torch.Tensor,
    sequences: Seq[Sequence],
    ops: SamplerOps,
    processors: Mapping[str, LogitsProcessor],
    under_way: UnderWay | None = None,
) -> Sampled:
    """One token per row of ``logits`` ``[num_rows, vocab]`` of any dtype, which may be changed in place.

    ``processors`` must have every name that a sequence asks for. ``under_way``: tokens that the host does not know yet (see
    StepRow). Penalties count them on the device; nothing else that a sequence with one asks for may depend on it. Waits for the
    device only if a processor does.
    """
    num_ahead = [0] * len(sequences) if under_way is None else under_way.counts
    params = [sequence.sampling for sequence in sequences]
    # Guides are asked first: the device still computes the logits meanwhile.
    is_ruled = any(map(has_rules, sequences, num_ahead))
    is_guided = any(sequence.guide is not None for sequence in sequences)
    rules = LogitRules.of(sequences, logits.shape[-1], num_ahead) if is_ruled or is_guided else None
    wants_logprobs = [index for index, row in enumerate(params) if row.num_top_logprobs is not None]
    raw: torch.Tensor | None = None
    if wants_logprobs:
        (picked,) = ops.upload((np.array(wants_logprobs),))  # indexing with a list would wait for the device
        raw = torch.log_softmax(logits[picked].float(), dim=-1)
    if rules is not None:
        rules.mask(logits, ops.upload)
    if is_ruled or any(_is_processed(sequence) for sequence in sequences):
        logits = logits.float()
        process_logits(logits, sequences, rules, ops, processors, under_way)
    if all(row.temperature == 0 for row in params):
        tokens = ops.argmax(logits)
    else:
        tokens = ops.draw_tokens(logits.float(), SamplingRows.of(sequences, num_ahead))
    if raw is None:
        return Sampled(tokens, None)
    counts = [params[index].num_top_logprobs or 0 for index in wants_logprobs]
    return Sampled(tokens, Logprobs.of(raw, tokens[picked], wants_logprobs, counts))


def process_logits(
    logits: torch.Tensor,
    sequences: Seq[Sequence],
    rules: LogitRules | None,
    ops: SamplerOps,
    processors: Mapping[str, LogitsProcessor],
    under_way: UnderWay | None = None,
) -> None:
    """Everything between masks and temperature, on ``logits`` ``[num_rows, vocab]`` fp32 in place; ``rules`` have masked them."""
    if rules is not None:
        rules.apply(logits, ops.upload)
    if any(sequence.sampling.needs_penalties for sequence in sequences):
        penalties = Penalties.of(sequences, None if under_way is None else under_way.counts)
        if not penalties.change_nothing:
            last_tokens = under_way.token_ids if under_way is not None and penalties.has_under_way else None
            ops.penalize(logits, penalties, last_tokens)
    add_watermark(logits, sequences)
    if any(sequence.sampling.processors for sequence in sequences):
        run_processors(logits, sequences, processors, ops.upload)
        if rules is not None:
            rules.forbid_again(logits, ops.upload)


def _is_processed(sequence: Sequence) -> bool:
    params = sequence.sampling
    return params.needs_penalties or params.watermark is not None or bool(params.processors)
