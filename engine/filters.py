"""Which tokens top-k, top-p, min-p and typical sampling leave, in this order, on any device.

As Hugging Face's warpers have them, for ties inclusive: top-k keeps every logit not below the k-th largest; top-p keeps the
smallest set of likeliest tokens whose mass reaches p; min-p keeps tokens at least ``min_p`` times as likely as the likeliest one.
Locally typical sampling (Meister et al., "Locally Typical Sampling", TACL 2023) keeps the smallest set of mass p whose
information is nearest to the distribution's entropy. Each filter counts mass in what those before it left.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.sampling_rows import Floats, SamplingRows

_NUM_CANDIDATES = 1024  # tokens to look at before a whole vocabulary is sorted


def least_kept(logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: Floats, min_p: Floats) -> torch.Tensor | None:
    """The least logit ``[n, 1]`` that top-k, top-p and min-p keep, -inf for rows without them; None if no row has any.

    ``logits`` ``[n, vocab]`` are divided by the temperature already.
    """
    ordered_rows = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(ordered_rows) and not min_p.any():
        return None
    device = logits.device
    # log 0 = -inf keeps everything.
    least = logits.amax(dim=-1, keepdim=True) + torch.from_numpy(min_p).to(device)[:, None].log()
    if len(ordered_rows):
        index = torch.from_numpy(ordered_rows).to(device)
        picked = logits if len(index) == len(logits) else logits[index]
        least[index] = torch.maximum(least[index], _ordered_threshold(picked, top_k[ordered_rows], top_p[ordered_rows]))
    return least


def drop_atypical(logits: torch.Tensor, least: torch.Tensor | None, typical_p: Floats) -> torch.Tensor:
    """``logits`` ``[n, vocab]`` with -inf for what ``least`` (see ``least_kept``) or typical sampling drops; a new tensor.

    Every row must have ``typical_p < 1``; it keeps at least its most typical token.
    """
    left = logits if least is None else logits.masked_fill(logits < least, -torch.inf)
    p = torch.softmax(left, dim=-1)
    # A token's information, -log p, is as far from the entropy, its mean, as the logit is from the logits' mean.
    mean = torch.where(p > 0, p * left, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    distance = (left - mean).abs_()
    threshold, is_known = _typical_threshold(distance, p, typical_p, min(_NUM_CANDIDATES, logits.shape[-1]))
    unknown = np.flatnonzero(~is_known)
    if len(unknown):
        index = torch.from_numpy(unknown).to(logits.device)
        threshold[index], _ = _typical_threshold(distance[index], p[index], typical_p[unknown], logits.shape[-1])
    return left.masked_fill(distance > threshold, -torch.inf)


def filter_typical_rows(logits: torch.Tensor, rows: SamplingRows) -> SamplingRows:
    """All filters of the rows that have ``typical_p``, applied to ``logits`` ``[num_rows, vocab]`` in place.

    Returns the rows with these filters off: for a device whose kernel knows the others only.
    """
    is_picked = (rows.typical_p < 1) & (rows.temperature > 0)
    picked = np.flatnonzero(is_picked)
    if not len(picked):
        return rows
    index = torch.from_numpy(picked).to(logits.device)
    scaled = logits[index] / torch.from_numpy(rows.temperature[picked]).to(logits.device)[:, None]
    least = least_kept(scaled, rows.top_k[picked], rows.top_p[picked], rows.min_p[picked])
    kept = drop_atypical(scaled, least, rows.typical_p[picked])
    logits[index] = logits[index].masked_fill_(kept == -torch.inf, -torch.inf)
    return dataclasses.replace(
        rows,
        top_k=np.where(is_picked, np.int32(0), rows.top_k),
        top_p=np.where(is_picked, np.float32(1), rows.top_p),
        min_p=np.where(is_picked, np.float32(0), rows.min_p),
        typical_p=np.where(is_picked, np.float32(1), rows.typical_p),
    )


def _ordered_threshold(logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: Floats) -> torch.Tensor:
    """The least logit ``[n, 1]`` that top-k and top-p keep."""
    threshold, is_known = _threshold_among(logits, top_k, top_p, min(_NUM_CANDIDATES, logits.shape[-1]))
    unknown = np.flatnonzero(~is_known)
    if len(unknown):
        index = torch.from_numpy(unknown).to(logits.device)
        threshold[index], _ = _threshold_among(logits[index], top_k[unknown], top_p[unknown], logits.shape[-1])
    return threshold


def _threshold_among(
    logits: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: Floats, num_candidates: int
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """``_ordered_threshold`` by a look at the likeliest ``num_candidates`` tokens, and for which rows that was enough."""
    ordered = logits.topk(num_candidates, dim=-1).values  # [n, num_candidates]
    peak = ordered[:, :1]
    last = torch.from_numpy(np.minimum(top_k, num_candidates).astype(np.int64)).to(logits.device)[:, None]
    by_rank = torch.where(last > 0, ordered.gather(1, (last - 1).clamp_(min=0)), -torch.inf)
    threshold, is_known = by_rank, top_k <= num_candidates
    if (top_p < 1).any():
        # Mass is counted in what top-k left, ties beyond the candidates included.
        left = (logits - peak).exp_().mul_(logits >= by_rank).sum(-1, dtype=torch.float64)
        mass = (ordered - peak).exp_().mul_(ordered >= by_rank).double() / left[:, None]
        cumulative = mass.cumsum(dim=-1)
        limit = torch.from_numpy(top_p.astype(np.float64)).to(logits.device)[:, None]
        # A token stays if the mass before it has not reached p.
        num_kept = (cumulative - mass < limit).sum(dim=-1, keepdim=True).clamp_(min=1)
        by_mass = torch.where(limit < 1, ordered.gather(1, num_kept - 1), -torch.inf)
        threshold = torch.maximum(by_rank, by_mass)
        is_known = is_known & ((top_p >= 1) | (cumulative[:, -1] >= limit[:, 0]).cpu().numpy())
    return threshold, is_known | (num_candidates == logits.shape[-1])


def _typical_threshold(
    distance: torch.Tensor, p: torch.Tensor, typical_p: Floats, num_candidates: int
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """The largest distance ``[n, 1]`` that is kept, by a look at the ``num_candidates`` nearest; for which rows that was enough."""
    nearest = distance.topk(num_candidates, dim=-1, largest=False)
    cumulative = p.gather(1, nearest.indices).cumsum(dim=-1, dtype=torch.float64)
    limit = torch.from_numpy(typical_p.astype(np.float64)).to(distance.device)[:, None]
    last = (cumulative < limit).sum(dim=-1, keepdim=True).clamp_(max=num_candidates - 1)
    is_known = (cumulative[:, -1] >= limit[:, 0]).cpu().numpy() | (num_candidates == distance.shape[-1])
    return nearest.values.gather(1, last), is_known
