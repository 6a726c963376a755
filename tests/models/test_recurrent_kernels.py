"""Recurrent layers of transformers' types over our kernels, in the interpreter or on a GPU. See also ``test_kernels.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine import transformers_engine
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.conftest import assert_same_tokens

from .played_ranks import ThreadedRanks
from .test_kernels import BLOCK_SIZE, FEW, Run, relayed
from .test_ranks import TOLERANCE
from .test_types import again, saved

DELTA_RULE = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
MAMBA = ("mamba2_chunk_scan", "mamba2_selective_state_update")
LAYERS = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),  # the interpreter takes ten seconds for each on a quiet machine
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
]


def on_kernels(directory: Path) -> TorchEngine:
    """An engine that computes with kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
        return again(directory, block_size=BLOCK_SIZE)


@pytest.mark.parametrize(
    ("model_type", "layers", "functions"),
    [
        ("qwen3_next", LAYERS | {"linear_num_key_heads": 4}, DELTA_RULE),  # a value head per key head
        pytest.param("qwen3_5_moe_text", LAYERS, DELTA_RULE, marks=pytest.mark.full),
        ("nemotron_h", LAYERS, MAMBA),
        pytest.param("bamba", {}, MAMBA, marks=pytest.mark.full),
        pytest.param("granitemoehybrid", LAYERS, MAMBA, marks=pytest.mark.full),
        pytest.param("mamba2", {"num_hidden_layers": 2}, MAMBA, marks=pytest.mark.full),
        pytest.param("falcon_h1", {"num_hidden_layers": 2}, MAMBA, marks=pytest.mark.full),
    ],
)
def test_transformers_functions_are_not_called(
    model_type: str, layers: dict[str, Any], functions: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would compute the same, slowly. Chunks end within blocks, and some of them in the next one."""
    saved(model_type, tmp_path, **layers)
    plain = [Run(again(tmp_path, device="cpu", block_size=BLOCK_SIZE)) for _ in range(2)]
    expected = list(relayed(*plain, FEW))
    ours = [Run(on_kernels(tmp_path)) for _ in range(2)]
    for name in ("causal_conv1d_fn", *functions):
        family = model_type.removesuffix("_text")
        monkeypatch.delattr(f"transformers.models.{family}.modeling_{family}.{name}")
    for given, wanted in zip(relayed(*ours, FEW), expected, strict=True):
        assert_same_tokens(given, wanted, TOLERANCE)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="threads share one device")
def test_two_ranks_hand_over_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("qwen3_5_text", tmp_path, **LAYERS)
    expected = list(relayed(*(Run(on_kernels(tmp_path)) for _ in range(2)), FEW))
    monkeypatch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
    with ThreadedRanks(tmp_path, 2, monkeypatch, block_size=BLOCK_SIZE) as two:
        one = on_kernels(tmp_path)
        for given, wanted in zip(relayed(Run(two), Run(one), FEW), expected, strict=True):  # type: ignore[arg-type]
            assert_same_tokens(given, wanted, TOLERANCE)
