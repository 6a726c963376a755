"""The modules of transformers that our operations replace. A module that computes something else stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cpu.ops import CpuPagedOps
from kvrelay.engine.models.hf import parts as hf_parts
from kvrelay.engine.models.hf import ranked
from kvrelay.engine.models.hf.kept import KeptLinear
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.models.ops import Linear
from kvrelay.engine.weights.rounding import AnyWeight
from kvrelay.engine.weights.stored import StoredWeight
from tests.engine.shapes import ONE_LAYER

from .test_types import engine_of, saved

WIDTH = 16


class ShiftedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden - hidden.mean(-1, keepdim=True))


class ScaledMLP(LlamaMLP):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 1.1


class OneTypeOps(CpuPagedOps):
    """Norms only rows of the weight's type, as kernels do."""

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert hidden.dtype == weight.dtype
        return super().rms_norm(hidden, weight, eps)


class Holder(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


def mlp(kind: type[LlamaMLP], **fields: Any) -> LlamaMLP:
    return kind(LlamaConfig(hidden_size=WIDTH, intermediate_size=24, num_attention_heads=2, **fields))


PARTS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "norm": (lambda: LlamaRMSNorm(WIDTH, eps=1e-5), True),
    "norm on top of 1": (lambda: Gemma2RMSNorm(WIDTH, eps=1e-6), True),
    "norm with a mean": (lambda: ShiftedRMSNorm(WIDTH), False),
    "mlp": (lambda: mlp(LlamaMLP, mlp_bias=True), True),
    "mlp with gelu": (lambda: mlp(LlamaMLP, hidden_act="gelu"), False),
    "mlp with a scale": (lambda: mlp(ScaledMLP), False),
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_part_is_replaced_only_by_one_with_its_results(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    make, is_replaced = PARTS[kind]
    part = make().to(dtype)
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.5)
    hidden = torch.randn(2, 3, WIDTH).to(dtype)
    expected = part(hidden)
    holder = Holder(part)
    pool = torch.zeros(1, 1, 2, 1, 1, 1, dtype=dtype)
    hf_parts._replace_in(holder, "", CpuPagedOps(ONE_LAYER, pool), dtype, lambda linear, names: linear, frozenset())
    assert (holder.part is not part) == is_replaced
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(holder.part(hidden), expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_a_norm_of_a_residual_in_fp32_is_that_of_the_module() -> None:
    torch.manual_seed(5)
    part = LlamaRMSNorm(WIDTH, eps=1e-5).to(torch.bfloat16)
    nn.init.normal_(part.weight, std=0.5)
    hidden = torch.randn(2, 3, WIDTH)
    holder = Holder(part)
    ops = OneTypeOps(ONE_LAYER, torch.zeros(1, 1, 2, 1, 1, 1, dtype=torch.bfloat16))
    hf_parts._replace_in(holder, "", ops, torch.bfloat16, lambda linear, names: linear, frozenset())
    assert holder.part is not part
    torch.testing.assert_close(holder.part(hidden), part(hidden))


class ExpandingOps(CpuPagedOps):
    """Multiplies with stored weights."""

    def make_linear(self, weight: AnyWeight, bias: torch.Tensor | None) -> Linear:
        full = weight.dequantised() if isinstance(weight, StoredWeight) else weight
        linear = super().make_linear(full, bias)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            assert rows.stride(1) == 1, "kernels would refuse these rows"
            return linear(rows)

        return multiply


def kept(linear: nn.Linear) -> KeptLinear:
    """The layer with its weight in int8."""
    scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
    values = (linear.weight / scale).round().to(torch.int8)
    bias = None if linear.bias is None else nn.Parameter(linear.bias.detach())
    return KeptLinear(StoredWeight(values, scale, None, linear.in_features, None, torch.float32), bias)


@torch.no_grad()
def test_gate_and_up_of_unequal_forms_are_products_of_their_own() -> None:
    torch.manual_seed(5)
    ops = ExpandingOps(ONE_LAYER, torch.zeros(1, 1, 2, 1, 1, 1))
    hidden = torch.randn(3, WIDTH)
    for names, is_whole in ((("gate_proj", "up_proj"), True), (("gate_proj",), False)):
        part = mlp(LlamaMLP, mlp_bias=True)
        for name in names:
            setattr(part, name, kept(getattr(part, name)))
        expected = part(hidden)
        holder = Holder(part)
        hf_parts._replace_in(holder, "", ops, torch.float32, lambda linear, names: linear, frozenset())
        assert (holder.part is not part) == is_whole
        assert not any(isinstance(one, nn.Linear | KeptLinear) for one in holder.modules())
        torch.testing.assert_close(holder.part(hidden), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_products_get_rows_whose_numbers_are_side_by_side() -> None:
    layer = kept(nn.Linear(WIDTH, 24))
    holder, hidden = Holder(layer), torch.randn(1, WIDTH, 3).transpose(1, 2)
    expected = layer(hidden)
    ops = ExpandingOps(ONE_LAYER, torch.zeros(1, 1, 2, 1, 1, 1))
    hf_parts._replace_in(holder, "", ops, torch.float32, lambda linear, names: linear, frozenset())
    torch.testing.assert_close(holder.part(hidden), expected)


@torch.no_grad()
def test_a_layer_whose_weight_others_read_becomes_full() -> None:
    layer = kept(nn.Linear(WIDTH, 24))
    holder, hidden = Holder(layer), torch.randn(3, WIDTH)
    expected = layer(hidden)
    ops = CpuPagedOps(ONE_LAYER, torch.zeros(1, 1, 2, 1, 1, 1))
    hf_parts._replace_in(holder, "", ops, torch.float32, lambda linear, names: linear, frozenset((layer,)))
    assert type(holder.part) is nn.Linear
    assert torch.equal(holder.part(hidden), expected)


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("llama", {"_Norm": 9, "_Mlp": 4}),
        ("gemma2", {"_Norm": 17}),  # its activation is not silu
        ("qwen3_moe", {"_Norm": 17, "experts": 4}),
        ("gpt_oss", {"_Norm": 9, "experts": 4}),
        ("deepseek_v3", {"_Norm": 17, "_Mlp": 4, "experts": 3}),
    ],
)
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_no_part_is_forgotten(
    model_type: str, parts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(model_type, tmp_path)
    made: list[TransformersModel] = []
    load = ranked.load_model
    monkeypatch.setattr(ranked, "load_model", lambda *given, **how: made.append(load(*given, **how)) or made[0])
    engine_of(tmp_path)
    modules = list(made[0].model.modules())
    found = Counter(type(module).__name__ for module in modules)
    found["experts"] = sum(hf_parts._BOUND in vars(module) for module in modules)
    assert {name: found[name] for name in ("_Norm", "_Mlp", "experts") if found[name]} == parts
    assert not any(type(module) is nn.Linear for module in modules)


@pytest.mark.filterwarnings("ignore")
def test_experts_that_come_out_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("qwen3_moe", tmp_path)
    run = hf_parts._run_experts
    monkeypatch.setattr(
        hf_parts, "_run_experts", lambda module, hidden, ids, factors: run(module, hidden, ids, 2 * factors)
    )
    with pytest.raises(ModelError, match="is not what transformers computes"):
        engine_of(tmp_path)
