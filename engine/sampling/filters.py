"""Which tokens top-k, top-p, min-p and typical sampling keep, in this order, on any device.

The rules are those of Hugging Face's warpers, with ties included. Top-k keeps every logit not below the k-th largest. Top-p keeps
the smallest set of likeliest tokens whose mass reaches p. Min-p keeps tokens at least ``min_p`` times as likely as the likeliest.
Locally typical sampling (Meister et al., "Locally Typical Sampling", TACL 2023) keeps the smallest set of mass p whose information
is closest to the distribution's entropy. Each filter counts mass among the tokens that earlier ones kept.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.sampling.bitmask import Upload
from kvrelay.engine.sampling.rows import SamplingRows
from kvrelay.engine.step.slots import Floats

_NUM_CANDIDATES = 1024  # likeliest tokens to try before sorting the whole vocabulary
_ROWS_AT_ONCE = 8  # with a vocabulary of 128k: about 60 MiB beside their logits


def least_kept(logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: Floats, min_p: Floats) -> torch.Tensor | None:
    """The smallest logit ``[n, 1]`` that top-k, top-p and min-p keep, -inf for rows without them; None if no row has any.

    ``logits`` ``[n, vocab]`` are already divided by the temperature, and on the CPU, because the code branches on results.
    """
    ordered_rows = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(ordered_rows) and not min_p.any():
        return None
    least = _min_p_threshold(logits, torch.from_numpy(min_p))
    if len(ordered_rows):
        index = torch.from_numpy(ordered_rows)
        picked = logits if len(index) == len(logits) else logits[index]
        least[index] = torch.maximum(least[index], _ordered_threshold(picked, top_k[ordered_rows], top_p[ordered_rows]))
    return least


def drop_atypical(logits: torch.Tensor, least: torch.Tensor | None, typical_p: Floats) -> torch.Tensor:
    """``logits`` ``[n, vocab]`` with -inf for tokens that ``least`` (see ``least_kept``) or typical sampling drops; a new tensor.

    Must be on the CPU. Every row must have ``typical_p < 1``; it keeps at least its most typical token.
    """
    left = logits if least is None else logits.masked_fill(logits < least, -torch.inf)
    p, distance = _distances(left)
    limit = torch.from_numpy(typical_p.astype(np.float64))
    threshold, is_known = _typical_threshold(distance, p, limit, min(_NUM_CANDIDATES, logits.shape[-1]))
    unknown = (~is_known).nonzero()[:, 0]
    if len(unknown):
        threshold[unknown], _ = _typical_threshold(distance[unknown], p[unknown], limit[unknown], logits.shape[-1])
    return left.masked_fill(distance > threshold, -torch.inf)


def filter_typical_rows(logits: torch.Tensor, rows: SamplingRows, upload: Upload) -> SamplingRows:
    """Apply all filters to the rows of ``logits`` ``[num_rows, vocab]`` that have ``typical_p``, in place.

    Returns the rows with these filters off, for a device whose kernel has only the other filters. To avoid waiting for the device,
    it always sorts the whole vocabulary, a few rows at a time to save memory.
    """
    is_picked = (rows.typical_p < 1) & (rows.temperature > 0)
    picked = np.flatnonzero(is_picked)
    if not len(picked):
        return rows
    top_k, top_p, vocab_size = rows.top_k[picked], rows.top_p[picked], logits.shape[-1]
    index, *of_rows = upload(
        (
            picked,
            rows.temperature[picked],
            rows.min_p[picked],
            top_k.astype(np.int64),
            top_p.astype(np.float64),
            rows.typical_p[picked].astype(np.float64),
        )
    )
    for start in range(0, len(picked), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        places, (temperature, min_p, most, mass, limit) = index[part], (one[part] for one in of_rows)
        scaled = logits[places] / temperature[:, None]
        least = _min_p_threshold(scaled, min_p)
        if (top_k[part] > 0).any() or (top_p[part] < 1).any():
            threshold, _ = _threshold_among(scaled, most, mass if (top_p[part] < 1).any() else None, vocab_size)
            least = torch.maximum(least, threshold)
        p, distance = _distances(scaled.masked_fill_(scaled < least, -torch.inf))
        threshold, _ = _typical_threshold(distance, p, limit, vocab_size)
        is_dropped = scaled.isneginf() | (distance > threshold)
        logits[places] = logits[places].masked_fill_(is_dropped, -torch.inf)
    return dataclasses.replace(
        rows,
        top_k=np.where(is_picked, np.int32(0), rows.top_k),
        top_p=np.where(is_picked, np.float32(1), rows.top_p),
        min_p=np.where(is_picked, np.float32(0), rows.min_p),
        typical_p=np.where(is_picked, np.float32(1), rows.typical_p),
    )


def _min_p_threshold(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    # For min_p = 0, log 0 = -inf keeps everything.
    return logits.amax(dim=-1, keepdim=True) + min_p[:, None].log()


def _distances(left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, and the distance of each token's information from the entropy, both ``[n, vocab]``."""
    p = torch.softmax(left, dim=-1)
    # A token's information, -log p, differs from the entropy (its mean) by as much as the logit differs from the mean
    # logit.
    mean = torch.where(p > 0, p * left, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    return p, (left - mean).abs_()


def _ordered_threshold(logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: Floats) -> torch.Tensor:
    """The smallest logit ``[n, 1]`` that top-k and top-p keep, on the CPU."""
    most = torch.from_numpy(top_k.astype(np.int64))
    mass = torch.from_numpy(top_p.astype(np.float64)) if (top_p < 1).any() else None
    threshold, is_known = _threshold_among(logits, most, mass, min(_NUM_CANDIDATES, logits.shape[-1]))
    unknown = (~is_known).nonzero()[:, 0]
    if len(unknown):
        of_unknown = None if mass is None else mass[unknown]
        threshold[unknown], _ = _threshold_among(logits[unknown], most[unknown], of_unknown, logits.shape[-1])
    return threshold


def _threshold_among(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor | None, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit ``[n, 1]`` that top-k and top-p keep, found among the likeliest ``num_candidates`` tokens.

    ``top_k`` ``[n]`` int64, ``top_p`` ``[n]`` fp64, None if no row has it. Also returns ``[n]`` bool: rows for which the candidates
    sufficed.
    """
    ordered, _ = _first(logits, num_candidates, descending=True)  # [n, num_candidates]
    peak = ordered[:, :1]
    last = top_k.clamp(max=num_candidates)[:, None]
    by_rank = torch.where(last > 0, ordered.gather(1, (last - 1).clamp_(min=0)), -torch.inf)
    threshold, is_known = by_rank, top_k <= num_candidates
    if top_p is not None:
        # Mass is counted among the tokens that top-k kept, including ties beyond the candidates.
        left = (logits - peak).exp_().mul_(logits >= by_rank).sum(-1, dtype=torch.float64)
        mass = (ordered - peak).exp_().mul_(ordered >= by_rank).double() / left[:, None]
        cumulative = mass.cumsum(dim=-1)
        limit = top_p[:, None]
        # A token stays if the mass before it has not reached p.
        num_kept = (cumulative - mass < limit).sum(dim=-1, keepdim=True).clamp_(min=1)
        by_mass = torch.where(limit < 1, ordered.gather(1, num_kept - 1), -torch.inf)
        threshold = torch.maximum(by_rank, by_mass)
        is_known = is_known & ((top_p >= 1) | (cumulative[:, -1] >= top_p))
    return threshold, is_known if num_candidates < logits.shape[-1] else torch.ones_like(is_known)


def _typical_threshold(
    distance: torch.Tensor, p: torch.Tensor, typical_p: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest distance ``[n, 1]`` that is kept, found among the ``num_candidates`` nearest; and the rows for which these
    sufficed.

    ``typical_p`` ``[n]`` fp64.
    """
    nearest, places = _first(distance, num_candidates, descending=False)
    cumulative = p.gather(1, places).cumsum(dim=-1, dtype=torch.float64)
    last = (cumulative < typical_p[:, None]).sum(dim=-1, keepdim=True).clamp_(max=num_candidates - 1)
    is_known = cumulative[:, -1] >= typical_p
    return nearest.gather(1, last), is_known if num_candidates < distance.shape[-1] else torch.ones_like(is_known)


def _first(numbers: torch.Tensor, count: int, *, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest or smallest ``count`` numbers of each row in order, and their indices. Whole rows use the faster full sort."""
    if count == numbers.shape[-1]:
        return numbers.sort(dim=-1, descending=descending)
    return numbers.topk(count, dim=-1, largest=descending)
