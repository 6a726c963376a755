"""Recurrent layers of transformers' types over our kernels, in the interpreter or on a GPU. See also ``test_kernels.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from kvrelay.engine import transformers_engine
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.conftest import assert_same_tokens

from .played_ranks import ThreadedRanks
from .test_kernels import BLOCK_SIZE, FEW, Run, relayed
from .test_ranks import TOLERANCE
from .test_types import again, saved

LAYERS = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(120),  # the interpreter takes some seconds on a quiet machine
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
]


def on_kernels(directory: Path) -> TorchEngine:
    """An engine that computes with kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
        return again(directory, block_size=BLOCK_SIZE)


def test_transformers_functions_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would compute the same, slowly. Chunks end within blocks, and some of them in the next one."""
    saved("qwen3_next", tmp_path, **LAYERS)
    plain = [Run(again(tmp_path, device="cpu", block_size=BLOCK_SIZE)) for _ in range(2)]
    expected = list(relayed(*plain, FEW))
    ours = [Run(on_kernels(tmp_path)) for _ in range(2)]
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.delattr(modeling_qwen3_next, name)
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
