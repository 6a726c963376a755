"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeded noise, log probabilities.

Rows pay for what they ask for: a batch of greedy rows is one argmax, and penalties and filters touch only the rows that have them.
A random row draws one uniform number (:mod:`kvrelay.engine.noise`) and takes the token where the cumulative probability of what the
filters left, in vocabulary order, passes it. So a token depends on logits, seed and position, never on the batch.

Filters (as Hugging Face's, for ties inclusive): top-k keeps every logit not below the k-th largest; top-p keeps the smallest set of
likeliest tokens whose mass reaches p; min-p keeps tokens of at least ``min_p`` times the likeliest one's probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kvrelay.common.sampling import SampledToken
from kvrelay.engine.noise import uniforms
from kvrelay.engine.sequence import Sequence

_SEED_MASK = 2**64 - 1
_NUM_CANDIDATES = 1024  # likeliest tokens to look at before a whole vocabulary is sorted
_CDF_BLOCK = 128  # tokens per block of the two-level cumulative distribution
# Smaller ones, which a client may ask for, would turn logits into infinities and the row into NaN.
_MIN_TEMPERATURE = 1e-6
_MIN_REPETITION_PENALTY = 1e-6

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What a batch's sequences ask of the sampler, as arrays ``[num_rows]``; penalties as sparse entries ``[num_entries]``.

    There is one entry for each distinct token of a sequence that has penalties: of prompt and output if it has a
    repetition penalty, else of the output.
    """

    temperature: Floats
    top_k: npt.NDArray[np.int32]  # 0 = off
    top_p: Floats
    min_p: Floats
    repetition: Floats
    presence: Floats
    frequency: Floats
    uniforms: npt.NDArray[np.float64]
    entry_rows: list[int]
    entry_tokens: list[int]
    entry_counts: list[int]  # occurrences in the output

    @classmethod
    def of(cls, sequences: Seq[Sequence]) -> SamplingRows:
        """From the sequences' parameters and tokens; the noise is that of the next position."""
        params = [sequence.sampling for sequence in sequences]
        seeds = np.array([row.seed & _SEED_MASK for row in params], dtype=np.uint64)
        positions = np.array([sequence.num_tokens for sequence in sequences], dtype=np.uint64)
        entry_rows: list[int] = []
        entry_tokens: list[int] = []
        entry_counts: list[int] = []
        for row, sequence in enumerate(sequences):
            if sequence.sampling.needs_penalties:
                counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
                if sequence.sampling.repetition_penalty != 1.0:
                    counts.update(dict.fromkeys(sequence.token_ids[: sequence.num_prompt_tokens], 0))
                entry_rows += [row] * len(counts)
                entry_tokens += counts.keys()
                entry_counts += counts.values()
        return cls(
            temperature=np.array(
                [max(row.temperature, _MIN_TEMPERATURE) if row.temperature > 0 else 0.0 for row in params],
                dtype=np.float32,
            ),
            top_k=np.array([min(row.top_k, 2**31 - 1) for row in params], dtype=np.int32),
            top_p=np.array([row.top_p for row in params], dtype=np.float32),
            min_p=np.array([row.min_p for row in params], dtype=np.float32),
            repetition=np.array(
                [max(row.repetition_penalty, _MIN_REPETITION_PENALTY) for row in params], dtype=np.float32
            ),
            presence=np.array([row.presence_penalty for row in params], dtype=np.float32),
            frequency=np.array([row.frequency_penalty for row in params], dtype=np.float32),
            uniforms=uniforms(seeds, positions),
            entry_rows=entry_rows,
            entry_tokens=entry_tokens,
            entry_counts=entry_counts,
        )


def sample(
    logits: torch.Tensor,
    sequences: Seq[Sequence],
    argmax_rows: Callable[[torch.Tensor], torch.Tensor],
    penalize_rows: Callable[[torch.Tensor, SamplingRows], None],
    draw_rows: Callable[[torch.Tensor, SamplingRows], torch.Tensor],
) -> list[SampledToken]:
    """One token per row of ``logits`` ``[num_rows, vocab]`` of any dtype, which may be changed in place.

    ``argmax_rows``, ``penalize_rows`` and ``draw_rows`` are the device's (see :class:`kvrelay.engine.ops.Ops`).
    """
    params = [sequence.sampling for sequence in sequences]
    wants_logprobs = [index for index, row in enumerate(params) if row.num_logprobs is not None]
    raw = torch.log_softmax(logits[wants_logprobs].float(), dim=-1) if wants_logprobs else None
    if all(row.temperature == 0 and not row.needs_penalties for row in params):
        tokens = argmax_rows(logits)
    else:
        rows, logits = SamplingRows.of(sequences), logits.float()
        if rows.entry_rows:
            penalize_rows(logits, rows)
        tokens = draw_rows(logits, rows)
    token_ids: list[int] = tokens.tolist()
    sampled = [SampledToken(token_id) for token_id in token_ids]
    if raw is not None:
        counts = [params[index].num_logprobs or 0 for index in wants_logprobs]
        chosen = [token_ids[index] for index in wants_logprobs]
        for index, token in zip(wants_logprobs, _with_logprobs(raw, chosen, counts), strict=True):
            sampled[index] = token
    return sampled


def penalize(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Apply penalties to ``logits`` ``[num_rows, vocab]`` in place, entry by entry.

    Repetition as Hugging Face's processor does it (a positive logit is divided, a negative one multiplied), then
    frequency per occurrence and presence once, as OpenAI's API defines them.
    """
    entry_rows = np.array(rows.entry_rows)
    index = torch.from_numpy(entry_rows), torch.tensor(rows.entry_tokens)
    counts = torch.tensor(rows.entry_counts, dtype=torch.float32)
    values = logits[index]
    repetition = torch.from_numpy(rows.repetition[entry_rows])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= torch.from_numpy(rows.frequency[entry_rows]) * counts
    values -= torch.from_numpy(rows.presence[entry_rows]) * (counts > 0)
    logits[index] = values


def draw_tokens(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Token ids ``[num_rows]`` from ``logits`` ``[num_rows, vocab]`` fp32 on the CPU. Greedy where the temperature is 0."""
    is_random = rows.temperature > 0
    random_rows = torch.from_numpy(np.flatnonzero(is_random))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    if not is_random.all():
        greedy_rows = torch.from_numpy(np.flatnonzero(~is_random))
        tokens[greedy_rows] = logits[greedy_rows].argmax(dim=-1)
    if is_random.any():
        scaled = logits[random_rows].div_(torch.from_numpy(rows.temperature[is_random])[:, None])
        least = _least_kept(scaled, rows.top_k[is_random], rows.top_p[is_random], rows.min_p[is_random])
        tokens[random_rows] = _invert_cdf(scaled, least, torch.from_numpy(rows.uniforms[is_random]))
    return tokens


def _least_kept(
    logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: Floats, min_p: Floats
) -> torch.Tensor | None:
    """The least logit ``[n, 1]`` that the filters keep, -inf for rows without filters; None if no row has any."""
    ordered_rows = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(ordered_rows) and not min_p.any():
        return None
    # log 0 = -inf keeps everything.
    least = logits.amax(dim=-1, keepdim=True) + torch.from_numpy(min_p)[:, None].log()
    if len(ordered_rows):
        index = torch.from_numpy(ordered_rows)
        picked = logits if len(index) == len(logits) else logits[index]
        least[index] = torch.maximum(least[index], _ordered_threshold(picked, top_k[ordered_rows], top_p[ordered_rows]))
    return least


def _ordered_threshold(logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: Floats) -> torch.Tensor:
    """The least logit ``[n, 1]`` that top-k and top-p keep."""
    threshold, is_known = _threshold_among(logits, top_k, top_p, min(_NUM_CANDIDATES, logits.shape[-1]))
    unknown = np.flatnonzero(~is_known)
    if len(unknown):
        index = torch.from_numpy(unknown)
        threshold[index], _ = _threshold_among(logits[index], top_k[unknown], top_p[unknown], logits.shape[-1])
    return threshold


def _threshold_among(
    logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: Floats, num_candidates: int
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """``_ordered_threshold`` by a look at the likeliest ``num_candidates`` tokens, and for which rows that was enough."""
    ordered = logits.topk(num_candidates, dim=-1).values  # [n, num_candidates]
    peak = ordered[:, :1]
    last = torch.from_numpy(np.minimum(top_k, num_candidates).astype(np.int64))[:, None]
    by_rank = torch.where(last > 0, ordered.gather(1, (last - 1).clamp_(min=0)), -torch.inf)
    threshold, is_known = by_rank, top_k <= num_candidates
    if (top_p < 1).any():
        # Mass is counted in what top-k left, ties beyond the candidates included.
        left = (logits - peak).exp_().mul_(logits >= by_rank).sum(-1, dtype=torch.float64)
        mass = (ordered - peak).exp_().mul_(ordered >= by_rank).double() / left[:, None]
        cumulative = mass.cumsum(dim=-1)
        limit = torch.from_numpy(top_p.astype(np.float64))[:, None]
        # A token stays if the mass before it has not reached p.
        num_kept = (cumulative - mass < limit).sum(dim=-1, keepdim=True).clamp_(min=1)
        by_mass = torch.where(limit < 1, ordered.gather(1, num_kept - 1), -torch.inf)
        threshold = torch.maximum(by_rank, by_mass)
        is_known = is_known & ((top_p >= 1) | (cumulative[:, -1] >= limit[:, 0]).numpy())
    return threshold, is_known | (num_candidates == logits.shape[-1])


def _invert_cdf(logits: torch.Tensor, least: torch.Tensor | None, draws: torch.Tensor) -> torch.Tensor:
    """The first token ``[n]``, in vocabulary order, whose cumulative probability exceeds the draw ``[n]`` fp64.

    Logits below ``least`` have no probability. Sums are fp64: in fp32, with a vocabulary of 100,000, they would move
    boundaries by more than rare tokens are wide. Two levels, blocks and then the tokens of one block, because an fp64
    scan of everything costs more than the softmax. A row of NaN yields some token: a broken row must not end its step.
    """
    vocab_size = logits.shape[-1]
    weights = torch.softmax(logits, dim=-1)
    if least is not None:
        weights.mul_(logits >= least)
    weights = F.pad(weights, (0, -weights.shape[-1] % _CDF_BLOCK)).view(len(weights), -1, _CDF_BLOCK)
    by_block = weights.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = draws[:, None] * by_block[:, -1:]
    block = _first_above(by_block, target)
    before = torch.where(block > 0, by_block.gather(1, (block - 1).clamp(min=0)), 0.0)
    in_block = weights[torch.arange(len(weights)), block[:, 0]].double().cumsum(dim=-1)
    tokens = block * _CDF_BLOCK + _first_above(in_block, target - before)
    return tokens[:, 0].clamp_(max=vocab_size - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index ``[n, 1]`` of the first element above the target; where rounding leaves none, of the last with any weight."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    index = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return index.clamp_(max=cumulative.shape[-1] - 1)


def _with_logprobs(raw: torch.Tensor, token_ids: Seq[int], counts: Seq[int]) -> list[SampledToken]:
    # raw: [n, vocab] fp32 log probabilities
    chosen = raw.gather(1, torch.tensor(token_ids, device=raw.device)[:, None])[:, 0].tolist()
    most = min(max(counts), raw.shape[-1])
    top = raw.topk(most, dim=-1)
    values, indices = top.values.tolist(), top.indices.tolist()
    return [
        SampledToken(token_id, logprob, tuple(zip(ids[:count], logprobs[:count], strict=True)))
        for token_id, logprob, count, ids, logprobs in zip(token_ids, chosen, counts, indices, values, strict=True)
    ]
