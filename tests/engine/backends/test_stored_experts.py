"""Quantised experts on a GPU, kept as stored: a layer gives the result of full weights, on one rank and on two."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.engine.backends.cuda.experts import CudaExperts
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.weights.parameters import SparseWeights
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.kernels.rows.activation import clamped_swiglu, silu_mul
from tests.engine.conftest import tokens
from tests.engine.weights.stored_models import HALF, load_stored, logits, save_gpt_oss, save_in_format, save_mixtral

FORMATS = ("awq", "fp8-blocks", "gptq-8-bits", "int8-channels")
CUTS = {
    "one rank": [Cut()],
    "columns": [Cut(0, 2), Cut(1, 2)],
    "whole experts": [Cut(0, 2, has_whole_experts=True), Cut(1, 2, has_whole_experts=True)],
}


def save(name: str, directory: Path) -> Path:
    """Save a model of one layer with four experts."""
    if name == "mxfp4":
        save_gpt_oss(directory)
        return directory
    save_mixtral(directory / "full")
    return save_in_format(directory / "full", directory / "stored", name)


def layer(directory: Path, cut: Cut, *, keeps: bool) -> SparseWeights:
    (found,) = load_stored(directory, cut, keeps=keeps).layers
    assert isinstance(found.mlp, SparseWeights)
    return found.mlp


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights on a CPU, and kernels in the interpreter")
@pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # warnings of numpy about rows for another rank's experts
@pytest.mark.parametrize("name", ["mxfp4", *FORMATS])
def test_a_layer_over_ranks_is_that_of_full_weights(name: str, tmp_path: Path) -> None:
    directory, generator = save(name, tmp_path), torch.Generator().manual_seed(2)
    activation: Any = partial(clamped_swiglu, alpha=1.702, limit=7.0) if name == "mxfp4" else silu_mul
    hidden = torch.randn(5, 64, generator=generator).to(HALF)
    ids = torch.rand(5, 4, generator=generator).topk(2).indices
    factors = torch.rand(5, 2, generator=generator)
    wanted = CudaExperts(layer(directory, Cut(), keeps=False).experts, activation)(hidden, ids, factors).float()
    for kind, cuts in CUTS.items():
        total = torch.zeros_like(wanted)
        for cut in cuts:
            sparse = layer(directory, cut, keeps=True)
            assert isinstance(sparse.experts.gate_up, StoredWeight)
            assert isinstance(sparse.experts.down, StoredWeight)
            own, num_experts = ids - sparse.first_expert, sparse.experts.num_experts
            here = own.masked_fill((own < 0) | (own >= num_experts), num_experts)
            total += CudaExperts(sparse.experts, activation)(hidden, here, factors).float()
        # Two ranks round two fp16 sums.
        assert (total - wanted).norm() < 2e-3 * wanted.norm(), kind


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="weights on a CPU, and kernels in the interpreter")
@pytest.mark.filterwarnings("ignore")  # warnings of transformers
def test_gpt_oss_in_mxfp4_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    save_gpt_oss(tmp_path)
    ours = logits(tmp_path, load_stored(tmp_path, Cut(), keeps=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    with torch.inference_mode():
        wanted = model(torch.tensor([tokens(1, 9)]), use_cache=False).logits[0]
    assert (ours - wanted).norm() < 4e-3 * wanted.norm()  # each layer rounds to fp16
