"""Which experts a token goes to, and with which factors. Pure functions of a router's logits.

Sources: Mixtral (Jiang et al. 2024) and Qwen for softmax. DeepSeek-V2 and -V3 (2024) for groups, sigmoid and the load-balancing
bias. gpt-oss takes the softmax of the chosen logits, which equals the normalised softmax of all.
"""

from __future__ import annotations

import torch

from kvrelay.engine.config.experts import Router, Scoring


def route(logits: torch.Tensor, router: Router, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``[num_tokens, num_experts]`` -> (expert ids int64, factors fp32), both ``[num_tokens, top_k]``.

    ``bias`` ``[num_experts]`` is added to scores for choosing experts, not to factors.
    """
    wide = logits.float()
    scores = wide.softmax(dim=-1) if router.scoring is Scoring.SOFTMAX else wide.sigmoid()
    ranks = scores if bias is None else scores + bias
    if router.num_groups > 1:
        groups = ranks.view(len(ranks), router.num_groups, -1)
        of_groups = groups.topk(router.num_scoring, dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(of_groups, dtype=torch.bool)
        chosen.scatter_(1, of_groups.topk(router.top_groups, dim=-1).indices, True)
        ranks = groups.masked_fill(~chosen[:, :, None], -torch.inf).view_as(scores)
    expert_ids = ranks.topk(router.top_k, dim=-1).indices
    factors = scores.gather(1, expert_ids)
    if router.is_normalised:
        factors = factors / (factors.sum(dim=-1, keepdim=True) + 1e-20)
    return expert_ids, factors * router.scale
