"""Models of transformers over our Triton kernels, in their interpreter or on a GPU: softcaps, sinks, windows, unequal heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.engine import transformers_engine
from kvrelay.engine.backends.cuda.ops import CudaPagedOps

from .test_types import PROMPTS, Run, engine_of, generate, logprobs, relayed, saved

BLOCK_SIZE = 8  # a kernel's smallest


@pytest.mark.full
@pytest.mark.timeout(600)  # the interpreter takes half a minute for each on a quiet machine
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "mimo_v2_flash"])
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_kernels_compute_what_transformers_does(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(model_type, tmp_path)
    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        monkeypatch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
    changes = {"block_size": BLOCK_SIZE, "device": "cuda" if is_cuda else "cpu"}
    engines = [engine_of(tmp_path, **changes) for _ in range(2)]
    outputs = relayed(*map(Run, engines), num_tokens=4)
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        expected, expected_logprobs = generate(model, prompt, 4)
        assert [token.token_id for token in tokens] == expected
        torch.testing.assert_close(torch.stack(list(map(logprobs, tokens))), expected_logprobs, atol=2e-4, rtol=2e-4)
