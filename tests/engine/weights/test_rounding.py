"""Weights in 8 bits: the bounds of their rounding by row, and their place in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import load_config
from kvrelay.engine.weights import rounding as module
from kvrelay.engine.weights.checkpoint import load_weights
from kvrelay.engine.weights.rounding import RoundedWeight, Rounding, rounded

from .stored_models import save_gpt_oss

CPU = torch.device("cpu")
PROJECTIONS = ("qkv", "o", "gate_up", "down")


def matrix(dtype: torch.dtype) -> torch.Tensor:
    """A matrix of rows of very different size, with a row of zeros and a row with a single non-zero number."""
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None]
    weight[7] = 0
    weight[8] = 0
    weight[8, 3] = -0.3
    return weight.to(dtype)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_weight_moves_further_than_its_rows_scale_allows(rounding: Rounding, dtype: torch.dtype) -> None:
    weight = matrix(dtype)
    kept = weight.clone()
    result = rounded(weight, rounding)
    assert torch.equal(weight, kept)
    assert (result.values.dtype, result.scale.dtype) == (rounding.dtype, torch.float32)
    assert torch.equal(result.scale, result.scale.bfloat16().float())
    error = (result.dequantised().double() - weight.double()).abs()
    step, size = result.scale.double()[:, None], weight.double().abs()
    # Half a step: of int8 half a scale; of e4m3 2^-4 of the number, or half its smallest step below 2^-6. Where the
    # scale was rounded down to bf16, the largest number is clipped to the format's largest.
    half_step = 0.5 * step if rounding is Rounding.INT8 else torch.maximum(size * 2**-4, 2**-10 * step)
    assert (error <= half_step * 1.0001 + size * 2**-8 * (size > 0.99 * size.amax(dim=1, keepdim=True))).all()
    assert (result.dequantised()[7] == 0).all()
    assert result.dequantised()[8, 3] == pytest.approx(-0.3, rel=2**-8)
    # Every row uses nearly the whole range of the format.
    largest = result.values.float().abs().amax(dim=1)
    assert (largest[[row for row in range(50) if row != 7]] >= rounding.largest * 0.93).all()


@pytest.mark.parametrize("rounding", Rounding)
def test_parts_of_a_matrix_are_rounded_as_the_whole_is(rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(torch.bfloat16)
    whole = rounded(weight, rounding)
    monkeypatch.setattr(module, "_MAX_ELEMENTS", 3 * 70 + 1)
    parts = RoundedWeight.empty((50, 70), rounding, torch.bfloat16, CPU)
    parts[:20].copy_(weight[:20])
    parts[20:].copy_(weight[20:].double())  # a checkpoint's own dtype does not matter
    assert parts.shape == (50, 70)
    assert torch.equal(parts.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(parts.scale, whole.scale)


@pytest.mark.parametrize("rounding", Rounding)
def test_a_checkpoints_projections_are_rounded_and_nothing_else(llama: tuple[Path, Any], rounding: Rounding) -> None:
    config = load_config(llama[0])
    full, small = (
        load_weights(llama[0], config, torch.bfloat16, CPU, lambda done, total: None, kind) for kind in (None, rounding)
    )
    pairs = list(zip(small.layers, full.layers, strict=True))
    inner = [(getattr(one, part), getattr(other, part)) for one, other in pairs for part in ("attention", "mlp")]
    for part, wanted in [*pairs, *inner]:
        for name in set(part.__slots__) - {"attention", "mlp"}:
            ours, theirs = getattr(part, name), getattr(wanted, name)
            if name not in PROJECTIONS:
                assert theirs is None or torch.equal(ours, theirs), name
                continue
            by_hand = rounded(theirs, rounding)
            assert torch.equal(ours.scale, by_hand.scale), name
            assert torch.equal(ours.values.view(torch.uint8), by_hand.values.view(torch.uint8)), name
    for name in ("embed", "norm", "lm_head"):
        assert torch.equal(getattr(small, name), getattr(full, name))


@pytest.mark.parametrize("rounding", Rounding)
def test_ranks_have_the_numbers_of_one(llama: tuple[Path, Any], rounding: Rounding) -> None:
    """A row's scale is that of its whole row, also on a rank with only some of the columns."""
    config = load_config(llama[0])
    whole, *ranks = (
        load_weights(llama[0], config, torch.bfloat16, CPU, lambda done, total: None, rounding, cut)
        for cut in (Cut(), Cut(0, 2), Cut(1, 2))
    )
    for index, layer in enumerate(whole.layers):
        for part, name in (("attention", "o"), ("mlp", "down")):
            wanted = getattr(getattr(layer, part), name)
            ours = [getattr(getattr(rank.layers[index], part), name) for rank in ranks]
            assert torch.equal(
                torch.cat([one.values.view(torch.uint8) for one in ours], dim=1), wanted.values.view(torch.uint8)
            )
            assert all(torch.equal(one.scale, wanted.scale) for one in ours)
        downs = [rank.layers[index].mlp.gate_up.dequantised().chunk(2) for rank in ranks]
        gates_and_ups = [torch.cat(parts) for parts in zip(*downs, strict=True)]
        assert torch.equal(torch.cat(gates_and_ups), layer.mlp.gate_up.dequantised())


def test_ranks_round_experts_as_one_does(tmp_path: Path) -> None:
    save_gpt_oss(tmp_path)
    config = load_config(tmp_path)
    for has_whole_experts in (False, True):
        whole, *ranks = (
            load_weights(tmp_path, config, torch.bfloat16, CPU, lambda done, total: None, Rounding.INT8, cut)
            for cut in (Cut(), Cut(0, 2, has_whole_experts), Cut(1, 2, has_whole_experts))
        )
        wanted, *ours = (
            one.layers[0].mlp.experts.down.dequantised().view(-1, 64, len_of(one)) for one in (whole, *ranks)
        )
        assert torch.equal(torch.cat(ours, dim=0 if has_whole_experts else 2), wanted)


def len_of(weights: Any) -> int:
    """The number of inputs of an expert's second product."""
    return int(weights.layers[0].mlp.experts.down.shape[1])
