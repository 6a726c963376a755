"""From logits to tokens, step by step; each step is a module.

    masks of guides, set and forbid (logits) → penalties → watermark → processors → temperature, filters → draw

Rows pay only for what they ask for. A batch of plain greedy rows is one argmax; everything else touches only the rows that need it.
A random row draws one uniform number (:mod:`kvrelay.engine.sampling.noise`), and takes the token where the cumulative probability
of the kept tokens, in vocabulary order, exceeds it. So a token depends on logits, parameters, tokens so far, seed and choice, never
on the batch. Log probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.sampling.logits import LogitRules
from kvrelay.engine.sampling.penalties import Penalties
from kvrelay.engine.sampling.processors import LogitsProcessor, run_processors
from kvrelay.engine.sampling.rows import Asking, SamplingRows
from kvrelay.engine.sampling.sampled import Logprobs, Sampled, UnderWay
from kvrelay.engine.sampling.watermark import add_watermark
from kvrelay.engine.step.plan import Rules
from kvrelay.engine.step.slots import LOGPROBS, PENALTIES, PROCESSORS, RANDOM, WATERMARK


class SamplerOps(Protocol):
    """The device operations that the sampler needs."""

    def upload(self, arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copy the arrays to the device, in one go and without waiting.

        The host's arrays may be changed afterwards, or be shared. Some may be empty.
        """

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens ``[n]`` int64 of ``logits`` ``[n, vocab]`` in the model's dtype or fp32."""

    def mask_tokens(self, logits: torch.Tensor, rows: Seq[int], bitmask: npt.NDArray[np.int32]) -> None:
        """Set logits of tokens without a bit to -inf, in place, in ``rows`` of ``logits`` ``[num_rows, vocab]`` of any float type.

        ``bitmask`` ``[len(rows), ceil(vocab / 32)]``: token ``t`` has bit ``t % 32`` of word ``t // 32``. Does not wait for the
        device.
        """

    def penalize(self, logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None) -> None:
        """Apply penalties to ``logits`` ``[n, vocab]`` fp32 in place, without waiting for the device.

        ``last_tokens``: ``[n]`` int64 on the device, the tokens under way of rows that have one; None if none has. Called only if
        the penalties change something.
        """

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Token ids ``[n]`` int64 drawn from ``logits`` ``[n, vocab]`` fp32, which may be changed; greedy at temperature 0."""


def sample(
    logits: torch.Tensor,
    asking: Asking,
    rules: Rules | None,
    ops: SamplerOps,
    processors: Mapping[str, LogitsProcessor],
    under_way: UnderWay | None = None,
) -> Sampled:
    """One token per row of ``logits`` ``[num_rows, vocab]`` of any dtype, which may be changed in place.

    ``processors`` must have every name that a row selects. ``under_way``: tokens that the host does not know yet (see PlanRow).
    Penalties count them on the device; nothing else that such a row asks for may depend on them. Waits for the device only if a
    processor does.
    """
    wants_logprobs = asking.rows_with(LOGPROBS)
    raw: torch.Tensor | None = None
    if len(wants_logprobs):
        (picked,) = ops.upload((wants_logprobs,))  # indexing with a list would wait for the device
        raw = torch.log_softmax(logits[picked].float(), dim=-1)
    placed = None if rules is None else LogitRules(rules)
    if placed is not None:
        placed.mask(logits, ops.mask_tokens)
    if (placed is not None and placed.sets_any) or len(asking.rows_with(PENALTIES | WATERMARK | PROCESSORS)):
        logits = logits.float()
        process_logits(logits, asking, placed, ops, processors, under_way)
    is_random = len(asking.rows_with(RANDOM)) > 0
    tokens = ops.draw_tokens(logits.float(), SamplingRows.of(asking)) if is_random else ops.argmax(logits)
    if raw is None:
        return Sampled(tokens, None)
    counts = [asking.sequences[row].sampling.num_top_logprobs or 0 for row in wants_logprobs.tolist()]
    return Sampled(tokens, Logprobs.of(raw, tokens[picked], wants_logprobs.tolist(), counts))


def process_logits(
    logits: torch.Tensor,
    asking: Asking,
    rules: LogitRules | None,
    ops: SamplerOps,
    processors: Mapping[str, LogitsProcessor],
    under_way: UnderWay | None = None,
) -> None:
    """All steps between masks and temperature, on ``logits`` ``[num_rows, vocab]`` fp32 in place.

    ``rules`` must have masked them.
    """
    if rules is not None:
        rules.apply(logits, ops.upload)
    if len(asking.rows_with(PENALTIES)):
        penalties = Penalties.of(asking, None if under_way is None else under_way.counts)
        if not penalties.change_nothing:
            last_tokens = under_way.token_ids if under_way is not None and penalties.has_under_way else None
            ops.penalize(logits, penalties, last_tokens)
    add_watermark(logits, asking)
    if len(asking.rows_with(PROCESSORS)):
        run_processors(logits, asking, processors, ops.upload)
        if rules is not None:
            rules.forbid_again(logits, ops.upload, ops.mask_tokens)
