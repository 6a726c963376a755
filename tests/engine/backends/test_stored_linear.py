"""Quantised projections that are kept as stored: their products equal those of full weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.engine.backends.cuda import linear as module
from kvrelay.engine.backends.cuda.linear import FullLinear, RoundedLinear, StoredLinear, can_multiply, is_for_vectors
from kvrelay.engine.config.model import load_config
from kvrelay.engine.weights.checkpoint import load_weights
from kvrelay.engine.weights.parameters import ModelWeights
from kvrelay.engine.weights.rounding import RoundedWeight, Rounding, rounded
from kvrelay.engine.weights.stored import StoredWeight
from tests.engine.conftest import SIZES, save_model
from tests.engine.weights.stored_models import GPTQ, HALF, fp8, int8, logits
from tests.engine.weights.storing import Tensors, awq, gptq, integers, store

PROJECTIONS = ("qkv", "o", "gate_up", "down")


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "version": "gemm"},
        lambda weight: awq(integers(weight, 4, 32, symmetric=False)),
    ),
    "gptq": (GPTQ, lambda weight: gptq(integers(weight, 4, 32, symmetric=True), 4)),
    "gptq-act-order": (
        {**GPTQ, "desc_act": True},
        lambda weight: gptq(integers(weight, 4, 32, symmetric=False, shuffled=True), 4),
    ),
    "gptq-8-bits": ({**GPTQ, "bits": 8}, lambda weight: gptq(integers(weight, 8, 32, symmetric=False), 8)),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8),
    "int8-channels": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases, and with sizes that groups of 32 divide."""
    directory = tmp_path_factory.mktemp("qwen")
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_model(directory, transformers.Qwen2Config(**{**sizes, "initializer_range": 0.05}))
    return directory


def stored(source: Path, target: Path, name: str, but: str = "") -> Path:
    """Save the model in a format, except modules with ``but`` in their names."""
    quantization, make = FORMATS[name]

    def of(module: str, weight: torch.Tensor) -> Tensors | None:
        return make(weight) if module.endswith("_proj") and not (but and but in module) else None

    return store(source, target, quantization, of)


def load(directory: Path, *, keeps: bool, has_e4m3: bool = True) -> ModelWeights:
    keep = partial(can_multiply, has_e4m3=has_e4m3) if keeps else None
    config = load_config(directory)
    return load_weights(directory, config, HALF, torch.device("cpu"), lambda done, total: None, keeps=keep)


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_full_weights(
    name: str, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLAB_OUTS", 50)
    monkeypatch.setattr(module, "MAX_ROWS", 8)
    stored(qwen, tmp_path, name)
    kept, full = load(tmp_path, keeps=True), load(tmp_path, keeps=False)
    generator = torch.Generator().manual_seed(2)
    for projection in PROJECTIONS:
        part = "attention" if projection in ("qkv", "o") else "mlp"
        ours, theirs = (getattr(one.layers[1], part) for one in (kept, full))
        weight, wanted = getattr(ours, projection), getattr(theirs, projection)
        bias = getattr(theirs, f"{projection}_bias")
        assert isinstance(weight, StoredWeight), projection
        assert torch.equal(weight.dequantised(), wanted)
        linear = StoredLinear(weight, bias, num_multiprocessors=16)
        for num_rows in (1, 8, 9):  # nine rows are multiplied by slabs
            hidden = torch.randn(num_rows, wanted.shape[1], generator=generator).to(HALF)
            expected = hidden.double() @ wanted.double().T + (0 if bias is None else bias.double())
            torch.testing.assert_close(linear(hidden).double(), expected, rtol=2**-10, atol=1e-3)


def test_only_a_row_alone_goes_to_the_vector_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(40, 64, generator=generator).to(HALF)
    bias, hidden = full[:, 0].contiguous(), torch.randn(3, 64, generator=generator).to(HALF)
    alone: list[int] = []

    def counted(kernel: Any, x: torch.Tensor, *rest: Any) -> Any:
        alone.append(len(x))
        return kernel(x, *rest)

    for name in ("vector_linear", "vector_rounded_linear"):
        monkeypatch.setattr(module, name, partial(counted, getattr(module, name)))
    weight = rounded(full, Rounding.INT8)
    for linear, exact in (
        (FullLinear(full, bias), full.double()),
        (RoundedLinear(weight, bias, num_multiprocessors=16), weight.values.double() * weight.scale.double()[:, None]),
    ):
        for num_rows in (1, 3):
            expected = hidden[:num_rows].double() @ exact.T + bias.double()
            torch.testing.assert_close(linear(hidden[:num_rows]).double(), expected, rtol=2**-10, atol=1e-3)
    assert alone == [1, 1]


def test_a_row_alone_may_be_strided() -> None:
    """Parts of transformers give such rows, and cuBLAS takes them."""
    generator = torch.Generator().manual_seed(3)
    full, wide = (torch.randn(shape, generator=generator).to(HALF) for shape in ((40, 64), (1, 128)))
    hidden = wide[:, ::2]
    torch.testing.assert_close(FullLinear(full, None)(hidden), hidden @ full.T, rtol=2**-10, atol=1e-3)


def test_full_weights_for_vectors_are_contiguous_and_in_16_bits() -> None:
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert is_for_vectors(weight)
    assert not is_for_vectors(weight.float())
    assert not is_for_vectors(weight.T)
    assert not is_for_vectors(weight[:512])  # too few outputs for our programs


def test_what_a_gpu_does_not_multiply_becomes_full(qwen: Path, tmp_path: Path) -> None:
    """fp8 on a GPU without e4m3, and a joined matrix with a part that is not quantised, become full weights."""
    for name in ("fp8-blocks", "awq"):
        weights = load(stored(qwen, tmp_path / name, name), keeps=True, has_e4m3=False)
        assert isinstance(weights.layers[0].attention.qkv, StoredWeight) == (name == "awq")
    mixed = load(stored(qwen, tmp_path / "mixed", "awq", but="k_proj"), keeps=True)
    assert isinstance(mixed.layers[0].attention.qkv, torch.Tensor)
    assert isinstance(mixed.layers[0].attention.o, StoredWeight)


def test_parts_in_another_order_of_inputs_become_full(qwen: Path, tmp_path: Path) -> None:
    def of(module: str, weight: torch.Tensor) -> Tensors | None:
        if not module.endswith("_proj"):
            return None
        return gptq(integers(weight, 4, 32, symmetric=True, shuffled=module.endswith("k_proj")), 4)

    store(qwen, tmp_path, GPTQ, of)
    kept, full = load(tmp_path, keeps=True), load(tmp_path, keeps=False)
    assert torch.equal(kept.layers[0].attention.qkv, full.layers[0].attention.qkv)
    assert isinstance(kept.layers[0].mlp.gate_up, StoredWeight)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="weights on a CPU, and kernels in the interpreter")
@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-blocks"])
def test_a_model_of_stored_weights_gives_the_logits_of_full_ones(name: str, qwen: Path, tmp_path: Path) -> None:
    stored(qwen, tmp_path, name)
    ours, wanted = (logits(tmp_path, load(tmp_path, keeps=keeps)) for keeps in (True, False))
    assert (ours - wanted).norm() < 4e-3 * wanted.norm()  # each layer rounds to fp16


@pytest.mark.parametrize("name", ["awq", "fp8-blocks"])
def test_weights_may_be_rounded_again(name: str, qwen: Path, tmp_path: Path) -> None:
    stored(qwen, tmp_path, name)
    full, config = load(tmp_path, keeps=False), load_config(tmp_path)
    keep = partial(can_multiply, has_e4m3=True)
    weights = load_weights(tmp_path, config, HALF, torch.device("cpu"), lambda *_: None, Rounding.INT8, keeps=keep)
    for ours, wanted in zip(weights.layers, full.layers, strict=True):
        assert isinstance(ours.attention.qkv, RoundedWeight)
        assert isinstance(wanted.attention.qkv, torch.Tensor)
        assert torch.equal(ours.attention.qkv.values, rounded(wanted.attention.qkv, Rounding.INT8).values)
