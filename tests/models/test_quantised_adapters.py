"""Adapters on a base with quantised weights, or weights rounded at the start: results equal those of the dequantised
base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.engine.backends.cpu.linear import has_packed_linear
from kvrelay.engine.step.interface import AdapterSlots, Engine
from kvrelay.engine.weights.rounding import Rounding, rounded
from tests.adapters import linear_shapes, write_adapter
from tests.engine import conftest as native
from tests.engine.ranks.conftest import load_ranks

from .test_quantised import FORMATS, dequantised, logits_of, ours, stored
from .test_transformers_adapters import merged_with
from .test_types import engine_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' and compressed-tensors' own


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    native.save_model(directory, transformers.LlamaConfig(**native.SIZES))
    return directory


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> AdapterRef:
    return write_adapter(tmp_path / "adapter", linear_shapes(llama), rank=6, seed=4)


def slots_of(engine: Engine) -> AdapterSlots:
    assert engine.adapters is not None
    return engine.adapters


@pytest.mark.parametrize("name", FORMATS)
def test_an_adapter_on_stored_weights(name: str, llama: Path, adapter: AdapterRef, tmp_path: Path) -> None:
    """Our forward pass and transformers' apply the adapter to the dequantised weights. Without the adapter the base is
    unchanged."""
    made = FORMATS[name]
    directory = stored(llama, tmp_path / "stored", made)
    model = dequantised(llama, directory, made)
    base, wanted = logits_of(model), logits_of(merged_with(model, tmp_path / "adapter"))
    assert (wanted - base).abs().max() > 0.1, "the adapter changes nothing"
    for engine in (native.load(directory, dtype="float32", adapter_bytes=1), engine_of(directory, adapter_bytes=1)):
        slots_of(engine).load(3, tmp_path / "adapter", adapter.digest)
        torch.testing.assert_close(ours(engine, 3), wanted, rtol=0, atol=2e-4)
        torch.testing.assert_close(ours(engine), base, rtol=0, atol=2e-4)


def test_an_adapter_on_ranks_of_stored_weights(llama: Path, adapter: AdapterRef, tmp_path: Path) -> None:
    made = FORMATS["gptq-act-order"]
    directory = stored(llama, tmp_path / "stored", made)
    wanted = logits_of(merged_with(dequantised(llama, directory, made), tmp_path / "adapter"))
    engine: Any = load_ranks(directory, 2, dtype="float32", adapters=str(tmp_path))
    try:
        slots_of(engine).load(1, tmp_path / "adapter", adapter.digest)
        torch.testing.assert_close(ours(engine, 1), wanted, rtol=0, atol=2e-4)
    finally:
        engine.close()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_an_adapter_on_weights_that_were_rounded_at_the_start(llama: Path, adapter: AdapterRef, tmp_path: Path) -> None:
    """In bf16, as the reference also rounds to bf16. The head's weights are rounded like those of the layers."""
    if not has_packed_linear(torch.bfloat16):
        pytest.skip("this CPU has no bf16 kernels")
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    for linear in model.modules():
        if isinstance(linear, torch.nn.Linear):
            full = linear.weight.data
            linear.weight.data = rounded(full, Rounding.INT8).dequantised().to(full.dtype)
    base, wanted = logits_of(model), logits_of(merged_with(model.float(), tmp_path / "adapter"))
    engine = native.load(llama, dtype="bfloat16", weight_format="int8", adapter_bytes=1)
    slots_of(engine).load(1, tmp_path / "adapter", adapter.digest)
    distance = (ours(engine, 1) - wanted).norm() / wanted.norm()
    assert distance < 0.03 < (wanted - base).norm() / wanted.norm()
