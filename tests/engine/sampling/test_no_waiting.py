"""Sampling steps that must not wait for the device. They run on a device without numbers, where a wait would fail."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.common.sampling import Watermark
from kvrelay.engine.config.model import load_config
from kvrelay.engine.kv import pool as kv_pool
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.sampling.filters import filter_typical_rows
from kvrelay.engine.sampling.penalties import Penalties
from kvrelay.engine.sampling.rows import SamplingRows
from kvrelay.engine.sampling.sampled import UnderWay
from kvrelay.engine.sampling.sampler import sample
from tests.engine.conftest import VOCAB, sequence
from tests.engine.sampling.rig import asked
from tests.guides import TokensState


class NumberlessOps:
    """Implements SamplerOps on torch's meta device, whose tensors have only shapes and types."""

    def __init__(self) -> None:
        self.last_tokens: list[torch.Tensor | None] = []
        self.uploaded: list[list[Any]] = []

    def upload(self, arrays: Seq[npt.NDArray[Any]]) -> list[torch.Tensor]:
        self.uploaded += [array.tolist() for array in arrays]
        types = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
        return [torch.empty(one.shape, dtype=of, device="meta") for one, of in zip(arrays, types, strict=True)]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def penalize(self, logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor | None) -> None:
        self.last_tokens.append(last_tokens)

    def mask_tokens(self, logits: torch.Tensor, rows: Seq[int], bitmask: npt.NDArray[np.int32]) -> None:
        self.upload((np.array(rows, dtype=np.int64), bitmask))  # as the GPU's operations do

    def draw_tokens(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        filter_typical_rows(logits, rows, self.upload)  # as the GPU's operations begin
        return logits.argmax(dim=-1)


class OnlyUploads(TorchDispatchMode):
    """Fails if an operation mixes tensors of host and device, because a copy between them waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs or {}, result))
        devices = {one.device.type for one in flat if isinstance(one, torch.Tensor)}
        assert len(devices) < 2, f"{func} of tensors on {devices}"
        return result


PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "num_logprobs": 2},
    {"logit_bias": ((3, 1.0), (4, -1.0))},
    {"allowed_token_ids": (1, 2, 3)},
    {"min_tokens": 9, "stop_token_ids": (2, 5)},
    {"bad_words": ((7,), (8,))},
    {"typical_p": 0.9},
    {"typical_p": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
)
# For these the host must know all tokens first.
DEFERRED: tuple[dict[str, Any], ...] = (
    {"watermark": Watermark()},
    {"bad_words": ((7,), (2, 3, 8))},
    {"processors": ("mine",)},
    {"processors": ("mine", "other"), "allowed_token_ids": (1, 2, 3)},
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_ahead_is_sampled_without_waiting(dtype: torch.dtype, temperature: float) -> None:
    sequences = [sequence([1, 2, 3], [], temperature=temperature, **params) for params in PARAMS]
    assert not any(one.needs_host_to_sample for one in sequences)
    count = len(sequences)
    logits = torch.empty(count, VOCAB, dtype=dtype, device="meta")
    token_ids = torch.empty(count, dtype=torch.int64, device="meta")
    ops = NumberlessOps()
    with OnlyUploads():
        under_way = UnderWay(np.ones(count, dtype=np.int32), token_ids)
        sampled = sample(logits, *asked(sequences, VOCAB, [1] * count), ops, {}, under_way)
    assert sampled.tokens.shape == (count,)
    assert ops.last_tokens == [token_ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_deferred_step_is_sampled_without_waiting(dtype: torch.dtype, temperature: float) -> None:
    sequences = [sequence([1, 2, 3], [], temperature=temperature, **params) for params in (*PARAMS, *DEFERRED)]
    for one in (sequences[0], sequences[4], sequences[-1]):
        one.guide = TokensState([5])
    assert all(one.needs_host_to_sample for one in sequences[len(PARAMS) :])
    logits = torch.empty(len(sequences), VOCAB, dtype=dtype, device="meta")
    seen: list[tuple[int, Seq[Seq[int]]]] = []

    def note(logits: torch.Tensor, token_ids: Seq[Seq[int]]) -> None:
        seen.append((len(logits), token_ids))

    ops = NumberlessOps()
    with OnlyUploads():
        sampled = sample(logits, *asked(sequences, VOCAB), ops, {"mine": note, "other": note})
    assert sampled.tokens.shape == (len(sequences),)
    assert seen == [(2, [[1, 2, 3]] * 2), (1, [[1, 2, 3]])]
    # Rows given as a Python list would be copied with a wait.
    assert [len(sequences) - 2, len(sequences) - 1] in ops.uploaded


def test_blocks_are_copied_without_waiting(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ops = NumberlessOps()
    monkeypatch.setattr(kv_pool, "Uploader", lambda device: ops)
    pool = kv_pool.KvPool(geometry_of(load_config(llama[0]), 8, torch.bfloat16), 6, torch.device("meta"))
    with OnlyUploads():
        pool.copy_blocks([(1, 4), (1, 5), (0, 1)])
    assert ops.uploaded == [[1, 1, 0], [4, 5, 1]]


def test_tokens_under_way_are_only_looked_at_for_penalties() -> None:
    ops = NumberlessOps()
    logits, token_ids = torch.empty(2, VOCAB, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    plain = [sequence([1], []), sequence([2], [])]
    sample(logits, *asked(plain, VOCAB), ops, {}, UnderWay(np.array([1, 1], dtype=np.int32), token_ids))
    assert not ops.last_tokens
    with_entries = [sequence([1], []), sequence([2], [], repetition_penalty=1.1)]
    sample(logits, *asked(with_entries, VOCAB), ops, {}, UnderWay(np.array([1, 0], dtype=np.int32), token_ids))
    assert ops.last_tokens == [None]
